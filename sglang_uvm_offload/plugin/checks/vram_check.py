"""Checks ``--expert-offload-num-resident N`` against the VRAM of every rank's GPU and against host RAM, before anything loads.

It refuses only what certainly does not fit: it compares the lower bounds of ``sizing/least_memory`` with what SGLang allows and
with what this machine has.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang_uvm_offload.config import AUTO, RequestedConfig
from sglang_uvm_offload.cuda.device import DriverError
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import expert_bytes
from sglang_uvm_offload.plugin.launch.planned_launch import Rank, free_by_gpu, planned_launch, ranks
from sglang_uvm_offload.sizing.draft_cost import draft_note
from sglang_uvm_offload.sizing.launch import NO_DRAFTS, Uncounted
from sglang_uvm_offload.sizing.least_memory import LeastMemory
from sglang_uvm_offload.sizing.ranks import shape_problems
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

_N = flag_name("num_resident")


def checked(config: RequestedConfig, server_args: Any) -> tuple[int | None, list[str]]:
    """How many stream buffers fit in addition to the KV cache that the launch asks for, None if that is not counted; and why N
    residents cannot fit: one line for the GPU that is shortest of VRAM, one for host RAM. Warns if N cannot be checked. On a
    CPU, which has no VRAM, host RAM alone is."""
    cfg = resolving_view(server_args)
    if cfg.device != "cuda":
        return None, expert_bytes.problems(_number(config), server_args)
    all_ranks = ranks(cfg)
    try:
        launch = planned_launch(config, server_args, at_least=True)
        free = free_by_gpu(all_ranks)
        case = dataclasses.replace(launch, free_vram_bytes=min(free.values())).case()
        if reasons := shape_problems(case):
            raise Uncounted(reasons)
    except (Uncounted, DriverError) as reason:
        logger.warning("%s %d is not checked against VRAM: %s", _N, config.num_resident, reason)
        return None, expert_bytes.problems(_number(config), server_args)
    if launch.speculative and not case.model.draft_layers:
        logger.warning("%s %d: %s", _N, config.num_resident, NO_DRAFTS)
    least = LeastMemory(case, cfg.page_size or 1)
    if least.share <= 0 or _rows(config) > case.model.num_experts:
        return None, []  # the headroom or the number is refused by a check of its own
    if case.workload.drafts and (note := draft_note(case, _rows(config))):
        logger.warning("%s %d: %s", _N, config.num_resident, note)
    buffers = case.stream(_rows(config)).buffers
    if config.stream_gb and not buffers and _number(config) < case.model.num_experts:
        one = size(max(map(case.stream_layer_bytes, range(case.parallel.pp))))
        return None, [f"{flag_name('stream_buffer_gb')} {config.stream_gb:g}: one buffer takes {one}; give that, auto, or 0"]
    vram = shortages(config, least, all_ranks, free)
    host = _host_shortage(config, server_args, least, all_ranks, free)
    # If GPU and host share one memory, fewer residents free nothing: the line for host RAM says so.
    return buffers, host or vram if case.machine.one_memory else [*vram, *host]


def _host_shortage(
    config: RequestedConfig, server_args: Any, least: LeastMemory, ranks: list[Rank], free: dict[int, int]
) -> list[str]:
    """The refusal for lack of host RAM, or of what the GPUs leave of it if they share one memory."""
    rows, machine = _rows(config), least.case.machine
    need = least.host([rank.stage for rank in ranks], rows)
    if expert_bytes.is_more_than_planned(server_args):
        need = dataclasses.replace(
            need, experts=max(need.experts, expert_bytes.host_need(_number(config), server_args).experts)
        )
    if not machine.one_memory:
        return expert_bytes.shortage(_number(config), need, machine.host_bytes)
    taken = sum(least.needed(rank.stage, rows) for rank in ranks)
    # SGLang takes its share of the available memory, so experts outside VRAM also count against it.
    granted = sum(least.granted(nbytes, min(free.values())) for nbytes in free.values())
    room = machine.host_bytes if need.cache else min(granted, machine.host_bytes)
    return expert_bytes.shortage(_number(config), need, max(0, room - taken), taken)


def shortages(config: RequestedConfig, least: LeastMemory, ranks: list[Rank], free: dict[int, int]) -> list[str]:
    """The refusal for the rank that is shortest of VRAM, if any. ``free``: bytes by GPU."""
    short = []
    for rank in ranks:
        least_free = min(free[other.gpu] for other in ranks if other.replica == rank.replica)
        granted = least.granted(free[rank.gpu], least_free)
        short.append((granted - least.needed(rank.stage, _rows(config)), granted, rank))
    spare, granted, rank = min(short)
    return [_refusal(config, least, rank, granted, free[rank.gpu])] if spare < 0 else []


def _refusal(config: RequestedConfig, least: LeastMemory, rank: Rank, granted: int, free: int) -> str:
    case, n = least.case, _rows(config)
    most = least.most()
    buffers = least.stream(rank.stage, n)
    stream = (
        f"{size(buffers)} for stream buffers ({flag_name('stream_buffer_gb')} {case.reserve.stream_gb:g}), " if buffers else ""
    )
    remedy = "no number fits: use more or larger GPUs" if most is None else f"give at most {most}, or {AUTO}"
    remedy += " (residents and slots together)" if config.slots and most is not None else ""
    return (
        f"{_given(config)}: does not fit on GPU {rank.gpu} "
        f"({_name_of(rank, case.parallel.pp, case.parallel.replicas)}): at least {size(least.needed(rank.stage, n))} are "
        f"needed ({size(least.experts(rank.stage, n))} for {n} of "
        f"{case.model.num_experts} experts a layer, {size(least.weights(rank.stage))} for other weights, {stream}"
        f"{size(least.cache(rank.stage))} for a KV cache of {least.tokens} tokens, without which SGLang does not start), and "
        f"{size(granted)} of {size(free)} free VRAM are available, by --mem-fraction-static {case.fraction:g} minus "
        f"{flag_name('headroom_gb')} {case.reserve.headroom_gb:g}; {remedy}"
    )


def _rows(config: RequestedConfig) -> int:
    """Residents and slots of a layer, all in VRAM."""
    return _number(config) + (config.slots or 0)


def _number(config: RequestedConfig) -> int:
    assert config.num_resident is not None, "auto chooses a number that fits"
    return config.num_resident


def _given(config: RequestedConfig) -> str:
    slots = f" and {flag_name('slots')} {config.slots}" if config.slots else ""
    return f"{_N} {config.num_resident}{slots}"


def _name_of(rank: Rank, stages: int, replicas: int) -> str:
    out = f"rank {rank.tp_rank}"
    out += f" of pipeline stage {rank.stage}" if stages > 1 else ""
    return out + (f" of replica {rank.replica}" if replicas > 1 else "")
