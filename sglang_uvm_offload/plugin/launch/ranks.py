"""The ranks of a launch on this machine, their GPUs, and the memory that SGLang's arguments assign to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_uvm_offload.cuda.device import free_vram, integrated, visible_gpus
from sglang_uvm_offload.cuda.kept_link import kept_link
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.memory.kept_links import KeptLink
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel
from sglang_uvm_offload.plan.machine import Machine, MachineError, of_gpus
from sglang_uvm_offload.plan.measured_link import with_measured_link
from sglang_uvm_offload.plan.rates import StreamRates, stream_rates


class Rank(NamedTuple):
    """One rank of this machine. ``replica`` counts independent copies of the model."""

    replica: int
    stage: int
    tp_rank: int
    gpu: int


def ranks(cfg: Any) -> list[Rank]:
    """The ranks on this machine, with the GPUs that SGLang assigns to them. Multiple machines split the pipeline stages evenly
    (``engine._calculate_rank_ranges``), or the ranks of each stage. ``tp_rank`` counts from 0 on each machine."""
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
    """Bytes of free VRAM of each GPU that has a rank. Raises ``DriverError``. For a GPU that shares the host's memory, this is
    the host's available memory, as in SGLang (``get_available_gpu_memory``): the driver ignores the page cache."""
    gpus = sorted({rank.gpu for rank in ranks})
    if has_one_memory():
        return dict.fromkeys(gpus, host_available())
    return dict(zip(gpus, free_vram(gpus), strict=True))


def parallel_sizes(cfg: Any) -> Parallel:
    grouped = cfg.attn_dp_size > 1
    return Parallel(
        *(cfg.tp_size, cfg.ep_size, cfg.pp_size, cfg.attn_dp_size if grouped else cfg.dp_size, grouped),
        shared_whole=cfg.moe_a2a_backend != "none",
        dp_lm_head=cfg.enable_dp_lm_head,
    )


def chooses_runners_by_layer(cfg: Any, quantization: str | None) -> bool:
    """Whether SGLang resolves the MoE runner ``auto`` layer by layer: to flashinfer_trtllm on Blackwell, to Marlin on older
    GPUs."""
    return cfg.moe_runner_backend == "auto" and quantization in ("modelopt_fp4", "modelopt_mixed")


def longest_step(cfg: Any, model: Any) -> int:
    """The most tokens of a step. Without chunked prefill, a whole prompt or several short ones form one step."""
    chunk = cfg.chunked_prefill_size or 0
    return (chunk if chunk > 0 else max(cfg.max_prefill_tokens, model.context_len)) * cfg.attn_dp_size


def rates_of_streams(cfg: Any) -> StreamRates | None:
    """The streaming rates of this launch's ranks for the planner; None if their GPUs are unknown to it."""
    machine = Machine("this machine", len(ranks(cfg)), 0, 0, *rates(), source="")
    return stream_rates(with_measured_link(machine, measured_link(cfg)), parallel_sizes(cfg), Assumptions())


def hicache(cfg: Any, given: Any) -> dict[str, Any]:
    """The host RAM of a rank's hierarchical cache. Without a size or ratio from the user, SGLang shrinks it to the free RAM."""
    if not cfg.enable_hierarchical_cache:
        return {}
    if given.hicache_size:
        return {"hicache_bytes": int(given.hicache_size * 1e9)}
    return {"hicache_ratio": given.hicache_ratio or 0.0}


def has_one_memory() -> bool:
    """Whether this machine's GPUs share the host's memory."""
    machine = _machine()
    return machine is not None and machine.one_memory


def rates() -> tuple[float, float, float]:
    """Link bandwidth and VRAM bandwidth of this machine's GPUs in 1e9 bytes/s, and their TFLOPS; zeros if unknown."""
    machine = _machine()
    return (0.0, 0.0, 0.0) if machine is None else (machine.link_gbps, machine.hbm_gbps, machine.tflops)


def measured_link(cfg: Any) -> KeptLink | None:
    """The link measurements that earlier servers saved for this launch's GPUs, or None."""
    return kept_link(len(ranks(cfg))) if cfg.device == "cuda" else None


def _machine() -> Machine | None:
    """This machine, None if it has no GPU."""
    try:
        return of_gpus(visible_gpus(), integrated())
    except MachineError:
        return None
