"""The SGLang version from which on a hook point exists, where ``compat`` does without it in older ones."""

from __future__ import annotations

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

SINCE = {
    "sglang.srt.mem_cache.kv_cache_configurator.mm_runtime_reservation_gb": (0, 5, 18),
    "sglang.srt.model_executor.model_runner.ModelRunner.finalize_startup_weight_load": (0, 5, 18),
    "sglang.srt.server_args.ServerArgs.speculative_draft_kv_cache_dtype": (0, 5, 18),
    "sglang.srt.environ.Envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT": (0, 5, 18),
    "sglang.srt.arg_groups.overrides.declare_resolution": (0, 5, 19),
    "sglang.srt.arg_groups.overrides.model_config_of": (0, 5, 19),
    "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned": (0, 5, 19),
    "sglang.srt.arg_groups.overrides.resolving_view": (0, 5, 19),
    "sglang.srt.runtime_context.get_platform": (0, 5, 19),
    "sglang.srt.server_args.ServerArgs.resolve_once": (0, 5, 19),
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook": (0, 5, 20),
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.uses_expert_location": (0, 5, 23),
    f"{_UPDATER}.begin_weight_update": (0, 5, 21),
    f"{_UPDATER}.end_weight_update": (0, 5, 21),
    f"{_UPDATER}.load_weights_from_distributed": (0, 5, 21),
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.end_weight_update": (0, 5, 21),
    "sglang.srt.model_executor.model_runner.ModelRunner.decode_cuda_graph_capture_bs": (0, 5, 21),
    **{
        f"sglang.srt.arg_groups.fields.parallel.Parallel{name}": (0, 5, 22)
        for name in ("", ".attn_dp_enabled", ".dp_rank", ".pp_rank", ".tp_rank")
    },
    "sglang.srt.server_args.ServerArgs.attn_dp_size": (0, 5, 22),
    "sglang.srt.server_args.ServerArgs.enable_nvidia_megakernel": (0, 5, 23),
    "sglang.srt.server_args.ServerArgs.enable_paged_experts": (0, 5, 23),
    "sglang.srt.server_args.ServerArgs.gated_launch_port": (0, 5, 23),
    "sglang.srt.server_args.ServerArgs.ple_offload_backend": (0, 5, 23),
    "sglang.srt.server_args.ServerArgs.ple_offload_embedding": (0, 5, 23),
    "sglang.srt.environ.Envs.SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": (0, 5, 23),
    "sglang.srt.environ.Envs.SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": (0, 5, 23),
    "sglang.srt.environ.Envs.SGLANG_USE_ATTN_TP_NGRAM": (0, 5, 23),
    "sglang.srt.environ.Envs.SGLANG_HTTP_SERVER_APP_PATH": (0, 5, 23),
    "sglang.srt.environ.Envs.SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT": (0, 5, 23),
    "sglang.srt.layers.quantization.base_config.FusedMoEMethodBase.get_moe_runner_backend": (0, 5, 23),
    # In older versions, a wrapper hid the same parameters.
    "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe.fused_marlin_moe": (0, 5, 23),
}
