"""The launch at hand as the planner's input: its ranks and their GPUs, its flags, its checkpoint, and what it cannot count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.utils import get_device_memory_capacity

from sglang_uvm_offload.config import NEVER, OffloadConfig
from sglang_uvm_offload.cuda.device import free_vram, visible_gpus
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.plugin import launch_drafts, linear_attention
from sglang_uvm_offload.plugin.compat import (
    as_given,
    mm_runtime_reservation_gb,
    model_config_of,
    post_capture_kv_sizing_planned,
    resolving_view,
)
from sglang_uvm_offload.plugin.local_checkpoint import local_folder
from sglang_uvm_offload.sizing.kv_cache import WINDOW_RATIO
from sglang_uvm_offload.sizing.launch import Launch, Uncounted
from sglang_uvm_offload.sizing.machine import MachineError, of_gpus
from sglang_uvm_offload.sizing.plan import Parallel
from sglang_uvm_offload.sizing.slots import Slots

_LOAD_FORMATS = ("auto", "safetensors", "dummy")


class Rank(NamedTuple):
    """One rank of this machine. ``replica`` counts independent copies of the model."""

    replica: int
    stage: int
    tp_rank: int
    gpu: int


def ranks(cfg: Any) -> list[Rank]:
    """The ranks on this machine, with the GPUs that SGLang assigns to them. Each of several machines has an equal part of the
    pipeline's stages, or of the ranks of each stage; their numbers here count from 0."""
    tp, pp = cfg.tp_size // max(cfg.nnodes // cfg.pp_size, 1), max(cfg.pp_size // cfg.nnodes, 1)
    group = tp * pp * cfg.gpu_id_step
    return [
        Rank(replica, stage, rank, cfg.base_gpu_id + replica * group + stage * tp + rank * cfg.gpu_id_step)
        for replica in range(cfg.dp_size)
        for stage in range(pp)
        for rank in range(tp)
    ]


def free_by_gpu(ranks: Sequence[Rank]) -> dict[int, int]:
    """Bytes of free VRAM of each GPU that has a rank. Raises ``DriverError``."""
    gpus = sorted({rank.gpu for rank in ranks})
    return dict(zip(gpus, free_vram(gpus), strict=True))


def planned_launch(config: OffloadConfig, server_args: Any) -> Launch:
    """The planner's input, with the VRAM of an empty GPU as free. Raises ``Uncounted``."""
    cfg, model = resolving_view(server_args), model_config_of(server_args)
    if reasons := _uncounted(server_args, cfg, model):
        raise Uncounted(reasons)
    return _launch(config, cfg, model, as_given(server_args))


def _launch(config: OffloadConfig, cfg: Any, model: Any, given: Any) -> Launch:
    """``given``: the arguments before SGLang resolved them. It fills in a number of requests of its own with speculation."""
    grouped = cfg.attn_dp_size > 1
    # Each replica takes as many requests as the flag names; the attention groups of one replica share them.
    requests = given.max_running_requests and given.max_running_requests * (1 if grouped else cfg.dp_size)
    vram = int((get_device_memory_capacity(cfg.device) or 0) * (1 << 20))
    if not vram:
        raise Uncounted(["SGLang does not know the size of this GPU"])
    return Launch(
        local_folder("--model-path", cfg.model_path, cfg.revision, cfg),
        parallel=Parallel(
            *(cfg.tp_size, cfg.ep_size, cfg.pp_size, cfg.attn_dp_size if grouped else cfg.dp_size, grouped),
            shared_whole=cfg.moe_a2a_backend != "none",
        ),
        vram_bytes=vram,
        free_vram_bytes=vram,
        host_bytes=host_available(),
        mem_fraction_static=cfg.mem_fraction_static,
        headroom_gb=config.headroom_gb,
        model_context=model.context_len,
        context_length=given.context_length,
        max_running_requests=requests,
        max_total_tokens=cfg.max_total_tokens,
        kv_cache_dtype=_name(model.dtype) if cfg.kv_cache_dtype == "auto" else cfg.kv_cache_dtype,
        page_tokens=max(64, cfg.page_size or 1),
        speculative=launch_drafts.from_the_checkpoint(cfg),
        draft_num_resident=config.draft_num_resident,
        draft_path=launch_drafts.separate_folder(cfg),
        draft_tokens=launch_drafts.tokens_verified(cfg),
        dtype=_name(model.dtype),
        quantization=model.quantization,
        image_bytes=_image_bytes(cfg, model),
        **_hicache(cfg, given),
        stream_gb=0.0 if config.stream_tokens == NEVER else config.stream_gb,
        linear=linear_attention.state(cfg, model),
        slots=Slots(config.slots),
        notes=_notes(config, cfg, given),
        rates=_rates(),
    )


def _uncounted(server_args: Any, cfg: Any, model: Any) -> list[str]:
    """Settings of this launch whose bytes no plan counts, so that a plan would promise memory that is not free."""
    beside = {
        f"--nnodes {cfg.nnodes}, where each machine would choose its own number": cfg.nnodes > 1,
        f"--moe-dp-size {cfg.moe_dp_size}": cfg.moe_dp_size > 1,
        f"--attn-cp-size {cfg.attn_cp_size}": cfg.attn_cp_size > 1,
        f"--dcp-size {cfg.dcp_size}": cfg.dcp_size > 1,
        f"--moe-dense-tp-size {cfg.moe_dense_tp_size}": cfg.moe_dense_tp_size is not None,
        f"the buffers of --moe-a2a-backend {cfg.moe_a2a_backend}, for which SGLang reserves nothing": cfg.moe_a2a_backend
        not in ("none", "deepep"),
        "--enable-symm-mem": cfg.enable_symm_mem,
        "the adapters of --enable-lora": cfg.enable_lora,
        f"--ep-num-redundant-experts {cfg.ep_num_redundant_experts}": cfg.ep_num_redundant_experts,
        "--enable-eplb, which copies a layer's experts to VRAM to rearrange them": cfg.enable_eplb,
        f"--swa-full-tokens-ratio {cfg.swa_full_tokens_ratio}": cfg.swa_full_tokens_ratio not in (None, WINDOW_RATIO),
        "--disable-hybrid-swa-memory": cfg.disable_hybrid_swa_memory,
        "--json-model-override-args": cfg.json_model_override_args not in (None, "", "{}"),
        f"--load-format {cfg.load_format}": cfg.load_format not in _LOAD_FORMATS,
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": post_capture_kv_sizing_planned(server_args),
    }
    out = [f"does not count {name}" for name, enabled in beside.items() if enabled]
    return out + launch_drafts.uncounted(cfg) + linear_attention.uncounted(cfg, model)


def _image_bytes(cfg: Any, model: Any) -> int:
    if not model.is_multimodal:
        return 0
    return int(mm_runtime_reservation_gb(cfg) * (1 << 30))


def _hicache(cfg: Any, given: Any) -> dict[str, Any]:
    """The host RAM of the hierarchical cache. Without a size or ratio from the user, SGLang shrinks it to what is left."""
    if not cfg.enable_hierarchical_cache:
        return {}
    if given.hicache_size:
        return {"hicache_bytes": int(given.hicache_size * 1e9)}
    return {"hicache_ratio": given.hicache_ratio or 0.0}


def _notes(config: OffloadConfig, cfg: Any, given: Any) -> tuple[str, ...]:
    out = []
    if config.draft_num_resident is not None and not launch_drafts.from_the_checkpoint(cfg):
        out.append("the draft model is counted as if all its experts were in VRAM")
    if cfg.enable_hierarchical_cache and not (given.hicache_size or given.hicache_ratio):
        out.append("the hierarchical cache takes what host RAM is left (--hicache-size or --hicache-ratio would be counted)")
    if cfg.moe_a2a_backend == "deepep":
        out.append("DeepEP's buffers come out of what --mem-fraction-static leaves, of which SGLang's default is aware")
    return tuple(out)


def _rates() -> tuple[float, float, float]:
    """The rates of this machine's GPUs, zeros where they are not known."""
    try:
        machine = of_gpus(visible_gpus())
    except MachineError:
        return 0.0, 0.0, 0.0
    return machine.link_gbps, machine.hbm_gbps, machine.tflops


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
