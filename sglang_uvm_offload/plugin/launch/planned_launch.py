"""Turns this launch into the planner's input: its ranks and their GPUs, its flags, its checkpoint, and what it cannot count."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sglang.srt.utils import get_device_memory_capacity

from sglang_uvm_offload.config import NEVER, RequestedConfig
from sglang_uvm_offload.cuda.device import free_vram, integrated, visible_gpus
from sglang_uvm_offload.cuda.kept_link import kept_link
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.memory.kept_links import KeptLink
from sglang_uvm_offload.plugin.compat import (
    as_given,
    has_contexts,
    mm_runtime_reservation_gb,
    model_config_of,
    post_capture_kv_sizing_planned,
    resolving_view,
)
from sglang_uvm_offload.plugin.launch import draft_source, linear_attention
from sglang_uvm_offload.plugin.launch.lookup_tables import keeps_tables_by_group, tables_in
from sglang_uvm_offload.plugin.launch.pipeline import stages
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel
from sglang_uvm_offload.sizing.kv_cache import DTYPE_BYTES, WINDOW_RATIO
from sglang_uvm_offload.sizing.launch import Launch, Uncounted
from sglang_uvm_offload.sizing.least_memory import LEAST_TOKENS
from sglang_uvm_offload.sizing.machine import Machine, MachineError, of_gpus
from sglang_uvm_offload.sizing.measured_link import with_measured_link
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.rates import StreamRates, stream_rates
from sglang_uvm_offload.sizing.server_pools import ServerPools
from sglang_uvm_offload.sizing.slots import Slots

logger = logging.getLogger(__name__)


class Rank(NamedTuple):
    """One rank of this machine. ``replica`` counts independent copies of the model."""

    replica: int
    stage: int
    tp_rank: int
    gpu: int


def ranks(cfg: Any) -> list[Rank]:
    """The ranks on this machine, with the GPUs that SGLang assigns to them. Each of several machines has an equal part of the
    pipeline stages (``engine._calculate_rank_ranges``), or of the ranks of each stage, which are numbered from 0 here."""
    sharing = max(cfg.nnodes // cfg.pp_size, 1)
    tp, pp = cfg.tp_size // sharing, max(cfg.pp_size // cfg.nnodes, 1)
    first, group = cfg.node_rank // sharing * pp, tp * pp * cfg.gpu_id_step
    return [
        Rank(replica, first + stage, rank, cfg.base_gpu_id + replica * group + stage * tp + rank * cfg.gpu_id_step)
        for replica in range(cfg.dp_size)
        for stage in range(pp)
        for rank in range(tp)
    ]


def free_by_gpu(ranks: Sequence[Rank]) -> dict[int, int]:
    """Bytes of free VRAM of each GPU that has a rank. Raises ``DriverError``. For a GPU that shares the host's memory, SGLang
    takes the host's available memory as free (``get_available_gpu_memory``), because the driver ignores the file cache."""
    gpus = sorted({rank.gpu for rank in ranks})
    if has_one_memory():
        return dict.fromkeys(gpus, host_available())
    return dict(zip(gpus, free_vram(gpus), strict=True))


def planned_launch(config: RequestedConfig, server_args: Any, *, at_least: bool = False) -> Launch:
    """The planner's input, with the VRAM of an empty GPU as free. Raises ``Uncounted``. ``at_least``: for a lower bound of the
    launch's memory, which may omit what the planner cannot count."""
    cfg, model = resolving_view(server_args), model_config_of(server_args)
    reasons = [] if at_least else _beside(server_args, cfg)
    launch = replace(_launch(config, cfg, model, as_given(server_args)), at_least=at_least)
    if at_least and post_capture_kv_sizing_planned(server_args):  # the KV cache then takes all that the graphs leave
        launch = replace(launch, mem_fraction_static=1.0)
    pools = _pools(server_args, launch)
    if isinstance(pools, ServerPools):
        counted = replace(launch, pools=pools)
    else:
        reasons += [] if at_least else _unasked(cfg, model, pools)
        counted = replace(launch, linear=linear_attention.state(cfg, model))
    if reasons:
        raise Uncounted(reasons)
    return counted


def _pools(server_args: Any, launch: Launch) -> ServerPools | str:
    """SGLang's pools for what the launch asks for, for twice that, and for the minimum. If SGLang cannot size them, its error;
    "" if this version has no way to ask."""
    if not has_contexts():
        return ""
    from sglang_uvm_offload.plugin.launch.server_pools import server_pools

    work, parallel = launch.workload, launch.parallel
    tokens, requests = work.tokens_of_rank(parallel), work.requests_of_rank(parallel)
    asked = {LEAST_TOKENS: 1, work.page_tokens: 1, tokens: requests, 2 * tokens: requests}
    try:
        return server_pools(server_args, parallel, asked)
    except Exception as error:  # noqa: BLE001 -- of any type, from SGLang's code; the planner has its own rules
        logger.debug("Expert offload: SGLang cannot size its pools before it starts: %s: %s", type(error).__name__, error)
        return f"{type(error).__name__}: {error}"


def _launch(config: RequestedConfig, cfg: Any, model: Any, given: Any) -> Launch:
    """``given``: the arguments before SGLang resolved them. With speculation, SGLang fills in its own number of requests."""
    grouped = cfg.attn_dp_size > 1
    # Each replica takes as many requests as the flag names; the attention groups of one replica share them.
    requests = given.max_running_requests  # SGLang takes 0 or less as 1
    requests = None if requests is None else max(1, requests) * (1 if grouped else cfg.dp_size)
    vram = int((get_device_memory_capacity(cfg.device) or 0) * (1 << 20))
    if not vram:
        raise Uncounted(["SGLang does not know the size of this GPU"])
    return Launch(
        model_files(cfg),
        parallel=_parallel(cfg),
        vram_bytes=vram,
        free_vram_bytes=vram,
        host_bytes=host_available(),
        mem_fraction_static=cfg.mem_fraction_static,
        headroom_gb=config.headroom_gb,
        model_context=model.context_len,
        context_length=given.context_length,
        max_running_requests=requests,
        max_total_tokens=cfg.max_total_tokens,
        kv_cache_dtype=_kv_dtype(cfg, model),
        page_tokens=max(64, cfg.page_size or 1),
        speculative=draft_source.from_the_checkpoint(cfg),
        draft_num_resident=config.draft_num_resident,
        draft=draft_source.separate(cfg),
        draft_tokens=draft_source.tokens_verified(cfg),
        dtype=_name(model.dtype),
        quantization=model.quantization,
        image_bytes=_image_bytes(cfg, model),
        **hicache(cfg, given),
        chunked_prefill_size=longest_step(cfg, model),
        stream_gb=0.0 if config.stream_tokens == NEVER else config.stream_gb,
        stream_tokens=config.stream_tokens,
        slots=Slots(config.slots),
        stages=stages(cfg, model),
        notes=_notes(config, cfg, given),
        rates=_rates(),
        measured=measured_link(cfg),
        one_memory=has_one_memory(),
        load_format=cfg.load_format,
        tables_in=tables_in(cfg, model, config.tables_in_host),
    )


def _parallel(cfg: Any) -> Parallel:
    grouped = cfg.attn_dp_size > 1
    return Parallel(
        *(cfg.tp_size, cfg.ep_size, cfg.pp_size, cfg.attn_dp_size if grouped else cfg.dp_size, grouped),
        shared_whole=cfg.moe_a2a_backend != "none",
        dp_lm_head=cfg.enable_dp_lm_head,
    )


def longest_step(cfg: Any, model: Any) -> int:
    """Tokens. Without chunks a prompt is one step, and several short ones are."""
    chunk = cfg.chunked_prefill_size or 0
    return (chunk if chunk > 0 else max(cfg.max_prefill_tokens, model.context_len)) * cfg.attn_dp_size


def rates_of_streams(cfg: Any) -> StreamRates | None:
    """Of this launch's ranks, as the planner takes them; None where it knows nothing of their GPUs."""
    machine = Machine("this machine", len(ranks(cfg)), 0, 0, *_rates(), source="")
    return stream_rates(with_measured_link(machine, measured_link(cfg)), _parallel(cfg), Assumptions())


def model_files(cfg: Any) -> ModelFiles:
    """The files of the target model."""
    return ModelFiles(cfg.model_path, cfg.revision, cfg.download_dir, cfg.json_model_override_args or "")


def _beside(server_args: Any, cfg: Any) -> list[str]:
    """Settings whose memory the planner does not count, so that a plan would promise memory that is not free."""
    names = {
        f"--nnodes {cfg.nnodes}, where each machine would choose its own number": cfg.nnodes > 1,
        f"--moe-dp-size {cfg.moe_dp_size}": cfg.moe_dp_size > 1,
        f"--attn-cp-size {cfg.attn_cp_size}": cfg.attn_cp_size > 1,
        f"--dcp-size {cfg.dcp_size}": cfg.dcp_size > 1,
        f"--moe-dense-tp-size {cfg.moe_dense_tp_size}": cfg.moe_dense_tp_size is not None,
        f"the buffers of --moe-a2a-backend {cfg.moe_a2a_backend}, for which SGLang reserves nothing": cfg.moe_a2a_backend
        not in ("none", "deepep"),
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": post_capture_kv_sizing_planned(server_args),
        "SGLANG_USE_ATTN_TP_NGRAM, which keeps an n-gram table for each attention group": keeps_tables_by_group(cfg),
        "--enable-symm-mem": cfg.enable_symm_mem,
        "the adapters of --enable-lora": cfg.enable_lora,
        f"--ep-num-redundant-experts {cfg.ep_num_redundant_experts}": cfg.ep_num_redundant_experts,
        "--enable-eplb, which copies a layer's experts to VRAM to rearrange them": cfg.enable_eplb,
    }
    return [f"does not count {name}" for name, enabled in names.items() if enabled] + draft_source.uncounted(cfg)


def _unasked(cfg: Any, model: Any, error: str) -> list[str]:
    """What only SGLang can count, if it was not asked or failed with ``error``."""
    if error and linear_attention.has_states(model):
        return [f"does not count the states of this model's layers, and SGLang cannot either: {error}"]
    ratio = cfg.swa_full_tokens_ratio
    beside = {
        f"a sliding window's cache of {ratio} of the full one": ratio not in (None, WINDOW_RATIO),
        "--disable-hybrid-swa-memory": cfg.disable_hybrid_swa_memory,
    }
    return [f"does not count {name}" for name, enabled in beside.items() if enabled] + linear_attention.uncounted(cfg, model)


def _kv_dtype(cfg: Any, model: Any) -> str:
    """The type for predicting speed, and bytes if SGLang is not asked. Smaller types than these count as one byte."""
    name = _name(model.dtype) if cfg.kv_cache_dtype == "auto" else cfg.kv_cache_dtype
    return name if name in DTYPE_BYTES else "fp8_e4m3"


def _image_bytes(cfg: Any, model: Any) -> int:
    if not model.is_multimodal:
        return 0
    return int(mm_runtime_reservation_gb(cfg) * (1 << 30))


def hicache(cfg: Any, given: Any) -> dict[str, Any]:
    """The host RAM of the hierarchical cache. Without a size or ratio from the user, SGLang shrinks it to what is free."""
    if not cfg.enable_hierarchical_cache:
        return {}
    if given.hicache_size:
        return {"hicache_bytes": int(given.hicache_size * 1e9)}
    return {"hicache_ratio": given.hicache_ratio or 0.0}


def _notes(config: RequestedConfig, cfg: Any, given: Any) -> tuple[str, ...]:
    out = []
    if config.draft_num_resident is not None and not draft_source.from_the_checkpoint(cfg):
        out.append("the plan counts all experts of the draft model as if they were in VRAM")
    if cfg.enable_hierarchical_cache and not (given.hicache_size or given.hicache_ratio):
        out.append("the hierarchical cache takes the remaining host RAM (the plan counts --hicache-size or --hicache-ratio)")
    if cfg.moe_a2a_backend == "deepep":
        out.append("DeepEP's buffers come from the VRAM that --mem-fraction-static leaves; SGLang's default allows for them")
    return tuple(out)


def _machine() -> Machine | None:
    """This machine, None if it has no GPU."""
    try:
        return of_gpus(visible_gpus(), integrated())
    except MachineError:
        return None


def has_one_memory() -> bool:
    """Whether this machine's GPUs share the host's memory."""
    machine = _machine()
    return machine is not None and machine.one_memory


def _rates() -> tuple[float, float, float]:
    """The rates of this machine's GPUs, zeros if they are unknown."""
    machine = _machine()
    return (0.0, 0.0, 0.0) if machine is None else (machine.link_gbps, machine.hbm_gbps, machine.tflops)


def measured_link(cfg: Any) -> KeptLink | None:
    """What earlier servers measured of the link of this launch's GPUs, None if nothing is kept."""
    return kept_link(len(ranks(cfg))) if cfg.device == "cuda" else None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
