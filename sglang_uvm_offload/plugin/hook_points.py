"""The SGLang names and signatures that this plugin needs, and a check of the installed version against them.

The lists follow the newest tested version. Tested versions skip the check. Any other version is checked in a launch that
offloads, before anything is hooked or loaded.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Iterator
from typing import Any

import sglang

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin.since import SINCE, VERSION
from sglang_uvm_offload.plugin.weight_writes import WRITERS

logger = logging.getLogger(__name__)

TRIED = ("0.5.23", "0.5.22", "0.5.21")
"""The versions that pass all tests of ``scripts/try_sglang.sh``, each in a separate environment."""

HOOKED = {
    "sglang.srt.runtime_context.publish": "server_args, *, role",
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": "self",
    "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool": "self",
    "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs": "self",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": "self, forward_batch",
    "sglang.srt.model_loader.loader._initialize_model": "model_config, load_config",
    "sglang.srt.model_loader.loader.buffered_multi_thread_safetensors_weights_iterator": (
        "hf_weights_files, *, disable_mmap, prefetch, drop_cache_after_load"
    ),
    "sglang.srt.managers.scheduler.Scheduler.__init__": "self",
    "sglang.srt.managers.scheduler.Scheduler.get_init_info": "self",
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state": "self",
    "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info": "self",
    "sglang.srt.managers.scheduler.Scheduler.set_internal_state": "self, recv_req",
    "sglang.srt.managers.scheduler.Scheduler.process_batch_result": "self",
    "sglang.srt.managers.scheduler.Scheduler.on_idle": "self",
    "sglang.srt.managers.scheduler.Scheduler.handle_shutdown": "self",
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__": "self",
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__setattr__": "self, name, value",
    "sglang.srt.layers.n_gram_embedding.NgramEmbedding.__init__": "self",
    "sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod.create_weights": (
        "self, layer, input_size_per_partition, output_partition_sizes"
    ),
    **dict.fromkeys(
        [
            "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute",
            "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute",
        ],
        "self, forward_batch",
    ),
    "sglang.srt.eplb.expert_location_updater.ExpertLocationUpdater.update": "self",
    "sglang.srt.lora.layers.FusedMoEWithLoRA.__init__": "self, base_layer",
    **dict.fromkeys(
        [
            f"sglang.srt.managers.tokenizer_manager.SignalHandler.{name}"
            for name in ("sigterm_handler", "running_phase_sigquit_handler")
        ],
        "self",
    ),
    "sglang.srt.managers.tokenizer_manager.SignalHandler.__init__": "self, tokenizer_manager",
    "sglang.srt.entrypoints.engine.Engine.shutdown": "self",
    **dict.fromkeys(
        [
            f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{name}"
            for name in (
                *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
                *("update_weights_from_ipc", "end_weight_update", "release_memory_occupation", "resume_memory_occupation"),
            )
        ],
        "self, recv_req",
    ),
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts": (
        "hidden_states, w1, w2, topk_output, moe_runner_config, *, b1, b2, w1_scale, w2_scale, w1_zp, w2_zp"
    ),
    **dict.fromkeys(
        [
            "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.moe_align_block_size",
            "sglang.srt.layers.moe.fused_moe_triton.moe_align_block_size",
        ],
        "topk_ids, block_size, num_experts",
    ),
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.invoke_fused_moe_kernel": "A, B",
    "sglang.kernels.ops.moe.moe_align_single_token.moe_align_single_token": "topk_ids, block_size",
    "sglang.kernels.ops.moe.fused_moe_triton_kernels._get_b_tma_desc_cached": "B",
    "sglang.kernels.ops.moe.fused_moe_triton_kernels.support_tensor_descriptor": "",
    "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe.fused_marlin_moe": (
        "hidden_states, w1, w2, w1_scale, w2_scale, gating_output, topk_weights, topk_ids, *, w1_global_scale, "
        "w2_global_scale, w1_zeros, w2_zeros, g_idx1, g_idx2, sort_indices1, sort_indices2, w1_bias, w2_bias"
    ),
    "sglang.kernels.ops.moe.moe_wna16_marlin.moe_wna16_marlin_gemm": "a, c_or_none, b_q_weight",
    "sglang.srt.layers.moe.moe_runner.deep_gemm.DeepGemmRunnerCore.run": "self, runner_input, quant_info, running_state",
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader": "self, param",
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader_fused": "self, param",
}
"""The hooked functions and the parameters that a hook reads: positional ones before ``*``, keyword ones after it.
``weight_writes.WRITERS`` are also hooked, but their hook reads no parameters."""

CALLED = {
    "sglang.srt.arg_groups.arg_utils.with_fallback": "cls, name, value",
    "sglang.srt.arg_groups.overrides.declare_resolution": "server_args, source",
    "sglang.srt.arg_groups.overrides.model_config_of": "server_args",
    "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned": "server_args",
    "sglang.srt.arg_groups.overrides.resolving_view": "server_args",
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook": "name",
    "sglang.srt.configs.hybrid_arch.mambaish_config": "model_config",
    "sglang.srt.distributed.parallel_state.get_world_group": "",
    "sglang.srt.eplb.expert_location.get_global_expert_location_metadata": "",
    "sglang.srt.eplb.expert_location.ModelConfigForExpertLocation.from_model_config": "model_config",
    "sglang.srt.layers.moe.utils.get_moe_a2a_backend": "",
    "sglang.srt.layers.moe.utils.get_moe_runner_backend": "",
    "sglang.srt.mem_cache.kv_cache_configurator.mm_runtime_reservation_gb": "*, is_multimodal, mm_feature_transport",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs": "self, token_capacity",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache": "self, total_rest_memory",
    "sglang.srt.model_executor.model_runner.ModelRunner.configure_kv_cache_dtype": "self",
    "sglang.srt.model_executor.model_runner.ModelRunner.init_kv_cache_configurator": "self",
    "sglang.srt.model_executor.model_runner_components.layer_setup.resolve_layer_indices": (
        "*, model, model_config, is_draft_worker, draft_model_idx"
    ),
    "sglang.srt.model_executor.model_runner_components.load_model_utils.resolve_sliding_window_size": "model, model_config",
    "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator": "kvc",
    "sglang.srt.model_executor.pool_configurator.MemoryPoolConfigurator.calculate_pool_sizes": (
        "self, available_bytes, page_size"
    ),
    "sglang.srt.model_loader.weight_utils.safetensors_weights_iterator": "hf_weights_files",
    "sglang.srt.plugins.hook_registry.HookRegistry._apply_target": "target, hooks",
    "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks": "",
    "sglang.srt.plugins.hook_registry.HookRegistry.register": "target, hook, hook_type",
    "sglang.srt.plugins.load_plugins": "",
    "sglang.srt.runtime_context.get_context": "",
    "sglang.srt.runtime_context.get_device": "",
    "sglang.srt.runtime_context.get_exec": "",
    "sglang.srt.runtime_context.get_lora": "",
    "sglang.srt.runtime_context.get_mm": "",
    "sglang.srt.runtime_context.get_observability": "",
    "sglang.srt.runtime_context.get_parallel": "",
    "sglang.srt.runtime_context.get_platform": "",
    "sglang.srt.runtime_context.get_schedule": "",
    "sglang.srt.runtime_context.get_server_args": "",
    "sglang.srt.runtime_context.get_serving": "",
    "sglang.srt.runtime_context.pre_capture_activation_reserve_mb": "gpu_mem",
    "sglang.srt.utils.auth.auth_level": "level",
    "sglang.srt.utils.get_device_memory_capacity": "device",
    "sglang.srt.utils.kill_process_tree": "parent_pid, include_parent",
}
"""The functions that this plugin calls and the parameters that it passes, in the same notation."""

ATTRIBUTES = {
    "sglang.srt.server_args.ServerArgs": (
        "add_cli_args from_cli_args resolve_once attn_cp_size attn_dp_size base_gpu_id chat_template chunked_prefill_size "
        "completion_template context_length cpu_offload_gb cuda_graph_config device disable_flashinfer_autotune "
        "dllm_algorithm download_dir dp_size dwdp_size elastic_ep_backend enable_dp_lm_head enable_eplb "
        "enable_hierarchical_cache enable_lora enable_memory_saver enable_nvidia_megakernel enable_paged_experts "
        "enable_pdmux enable_two_batch_overlap ep_num_redundant_experts ep_size gpu_id_step hicache_ratio hicache_size "
        "hicache_storage_backend hicache_storage_backend_extra_config host init_expert_location json_model_override_args "
        "kt_weight_path kv_cache_dtype load_format lora_paths max_mamba_cache_size max_prefill_tokens max_running_requests "
        "max_total_tokens mem_fraction_static mm_feature_transport model_loader_extra_config model_path moe_a2a_backend "
        "moe_dp_size moe_runner_backend nnodes node_rank offload_group_size page_size ple_offload_backend "
        "ple_offload_embedding port pp_size quantization remote_instance_weight_loader_start_seed_via_transfer_engine "
        "revision speculative_algorithm speculative_draft_load_format speculative_draft_model_path "
        "speculative_draft_model_revision speculative_moe_runner_backend speculative_ngram_external_corpus_path "
        "speculative_num_draft_tokens speculative_token_map tokenizer_path tokenizer_worker_num tp_size use_ray "
        "weight_cache_mode"
    ),
    "sglang.srt.arg_groups.arg_utils": "A Arg NS",
    "sglang.srt.arg_groups.fields.parallel.Parallel": (
        "attn_dp_enabled dp_rank dp_size enable_dp_attention_local_control_broadcast nnodes pp_rank pp_size tp_rank tp_size"
    ),
    "sglang.srt.constants": "GPU_MEMORY_TYPE_WEIGHTS",
    "sglang.srt.eplb.expert_location.ExpertLocationMetadata": "physical_to_logical_map_cpu",
    "sglang.srt.eplb.expert_location.ModelConfigForExpertLocation": "num_layers num_logical_experts",
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": "offload_tags",
    "sglang.srt.managers.data_parallel_controller.DataParallelController": "_scheduler_init_infos",
    "sglang.srt.managers.tokenizer_manager.SignalHandler": "tokenizer_manager",
    "sglang.srt.configs.load_config.LoadConfig": "load_format",
    "sglang.srt.configs.model_config.ModelConfig": (
        "context_len dtype hf_config hf_text_config is_multimodal model_path quantization"
    ),
    "sglang.srt.distributed.parallel_state.GroupCoordinator": (
        "all_gather_object barrier broadcast_object rank_in_group world_size"
    ),
    "sglang.srt.entrypoints.engine.Engine": "server_args_class tokenizer_manager",
    "sglang.srt.entrypoints.http_server": "app get_global_state",
    "sglang.srt.environ.Envs": (
        "SGLANG_DEEPGEMM_STANDARD_LAYOUT SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE SGLANG_HTTP_SERVER_APP_PATH "
        "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT"
    ),
    "sglang.srt.layers.deep_gemm_wrapper.compile_utils": "DeepGemmKernelType deep_gemm_execution_hook",
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE": (
        "dispatcher is_shared_fused_moe layer_id moe_ep_rank moe_ep_size num_fused_shared_experts num_local_experts "
        "quant_method top_k uses_expert_location"
    ),
    "sglang.srt.layers.moe.moe_runner.deep_gemm.DeepGemmMoeQuantInfo": "w13_scale w13_weight w2_scale w2_weight",
    "sglang.srt.layers.moe.moe_runner.deep_gemm.DeepGemmRunnerInput": "m_indices use_masked_gemm",
    "sglang.srt.layers.layernorm.RMSNorm": "has_weight weight",
    "sglang.srt.layers.moe.token_dispatcher.standard.StandardDispatchOutput": "hidden_states",
    "sglang.srt.layers.moe.token_dispatcher.standard.StandardDispatcher": "skip_local_expert_mapping",
    "sglang.srt.layers.moe.topk.TopK": "topk_config",
    "sglang.srt.layers.moe.topk.TopKConfig": (
        "correction_bias num_expert_group output_format runner_backend scoring_func topk_group use_grouped_topk"
    ),
    "sglang.srt.layers.moe.utils.MoeA2ABackend": "is_none",
    "sglang.srt.layers.moe.utils.MoeRunnerBackend": (
        "is_deep_gemm is_experimental_sgl_trtllm is_flashinfer_mxfp4 is_flashinfer_trtllm is_marlin is_triton is_triton_kernels"
    ),
    "sglang.srt.layers.n_gram_embedding.NgramEmbedding": "oe_embeder word_embeder",
    "sglang.srt.layers.quantization.base_config.FusedMoEMethodBase": (
        "apply create_weights get_moe_runner_backend process_weights_after_loading"
    ),
    "sglang.srt.layers.quantization.fp8.Fp8MoEMethod": "quant_config",
    "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod": "",
    "sglang.srt.managers.io_struct.SetInternalStateReq": "server_args",
    "sglang.srt.managers.io_struct.SetInternalStateReqOutput": "updated",
    "sglang.srt.managers.scheduler.Scheduler": "chunked_req max_total_num_tokens",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager": "get_internal_state set_internal_state",
    "sglang.srt.model_executor.cuda_graph_config": "Backend Phase",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": (
        "batch_size extend_seq_lens_cpu forward_mode global_num_tokens_cpu input_ids is_extend_in_batch positions rids "
        "seq_lens_cpu"
    ),
    "sglang.srt.model_executor.forward_batch_info.ForwardMode": "is_decode is_decode_or_idle is_idle is_target_verify",
    "sglang.srt.model_executor.model_runner.ModelRunner": (
        "decode_cuda_graph_capture_bs draft_model_idx is_draft_worker kv_cache_configurator layer_info memory_saver_adapter "
        "model model_config pre_model_load_memory sliding_window_size"
    ),
    "sglang.srt.plugins.hook_registry.HookRegistry": "_patched",
    "sglang.srt.plugins.hook_registry.HookType": "AFTER AROUND BEFORE REPLACE",
    "sglang.srt.utils.auth.AuthLevel": "ADMIN_OPTIONAL",
}
"""The attributes that this plugin reads, by module or class."""


def check() -> None:
    """For an untested version, raise ``FlagError`` with each hook point that changed, or warn if none did."""
    if found := problems():
        raise FlagError(found)
    if warning := untried():
        logger.warning("Expert offload: %s", warning)


def problems() -> list[str]:
    """Why this SGLang version is not supported: the tested versions, then each hook point that changed."""
    found = [] if untried() is None else moved()
    if not found:
        return []
    return [
        f"SGLang {sglang.__version__} is not supported (tested: {', '.join(TRIED)}); these hook points changed:",
        *found,
    ]


def untried() -> str | None:
    """A warning about an untested version with every hook point; None for a tested one."""
    if sglang.__version__ in TRIED:
        return None
    return f"untested with SGLang {sglang.__version__} (tested: {', '.join(TRIED)}); every hook point exists"


def moved() -> list[str]:
    """The SGLang names that are missing or whose parameters do not fit."""
    return [problem for name, problem in _differences() if SINCE.get(name, (0,)) <= VERSION]


def _differences() -> Iterator[tuple[str, str]]:
    """Each name that differs from the newest version, and how."""
    for target, parameters in {**HOOKED, **CALLED, **dict.fromkeys(WRITERS, "")}.items():
        found = _resolved(target)
        if found is None:
            yield target, f"{target} does not exist"
        elif not _takes(found, parameters, is_called=target in CALLED):
            yield target, f"{target}{inspect.signature(found)} does not take ({parameters})"
    for owner, names in ATTRIBUTES.items():
        found = _resolved(owner)
        if found is None:
            yield owner, f"{owner} does not exist"
        else:
            absent = [f"{owner}.{name}" for name in names.split() if not _has(found, name)]
            yield from ((name, f"{name} does not exist") for name in absent)


def _resolved(target: str) -> Any:
    """The object with this dotted name; None if it does not exist or its module cannot be imported."""
    try:
        return pkgutil.resolve_name(target)
    except Exception:  # noqa: BLE001 -- importing an SGLang module may raise any type; reported as missing
        return None


def _takes(function: Any, parameters: str, *, is_called: bool) -> bool:
    """Whether ``function`` starts with the parameters before ``*``, has those after ``*`` by name and, if this plugin calls it,
    requires no others."""
    first, _, named = (part.strip(" ,") for part in parameters.partition("*"))
    positional, by_name = _names(first), _names(named)
    own = inspect.signature(function).parameters
    if list(own)[: len(positional)] != positional or not set(by_name) <= set(own):
        return False
    needed = {name for name, p in own.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return not is_called or needed <= {*positional, *by_name}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _has(owner: Any, name: str) -> bool:
    """Whether a module or class has the name, declares it as a field, or uses it in a method, such as an ``__init__`` that
    sets it."""
    return hasattr(owner, name) or name in _mentioned(owner)


def _mentioned(owner: Any) -> set[str]:
    found: set[str] = set()
    for base in getattr(owner, "__mro__", ()):
        found |= set(vars(base).get("__annotations__", ()))
        for function in _functions(base):
            found |= set(function.__code__.co_names)
    return found


def _functions(base: type) -> Iterator[Any]:
    """The class's own functions, unwrapped if a plugin has wrapped them."""
    return (inspect.unwrap(member) for member in vars(base).values() if inspect.isfunction(member))
