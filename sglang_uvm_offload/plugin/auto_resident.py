"""``--expert-offload-num-resident auto``: runs the planner for this launch on this machine."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view

from sglang_uvm_offload.config import AUTO, OffloadConfig
from sglang_uvm_offload.cuda.device import DriverError
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plugin.planned_launch import free_by_gpu, planned_launch, ranks
from sglang_uvm_offload.sizing.launch import Launch, Uncounted
from sglang_uvm_offload.sizing.plan import Plan
from sglang_uvm_offload.sizing.planner import choose_num_resident
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

_AUTO = f"{flag_name('num_resident')} {AUTO}"


def resolved(config: OffloadConfig, server_args: Any) -> OffloadConfig:
    """``config`` with a number for ``auto``, which is logged with its reasons. Raises ``FlagError`` if none fits."""
    if not config.auto:
        return config
    cfg = resolving_view(server_args)
    if cfg.device != "cuda":
        raise FlagError([f"{_AUTO}: with --device {cfg.device} there is no VRAM to fit experts in; give a number"])
    launch = _launch(config, server_args, cfg)
    plan = choose_num_resident(launch)
    assert plan.num_resident is not None
    logger.info("%s", _why(plan, launch))
    if plan.draft_note:
        logger.warning("%s: %s", _AUTO, plan.draft_note)
    return dataclasses.replace(config, num_resident=plan.num_resident, stream_buffers=plan.stream_buffers)


def _launch(config: OffloadConfig, server_args: Any, cfg: Any) -> Launch:
    try:
        launch = planned_launch(config, server_args)
        free = free_by_gpu(ranks(cfg))
    except Uncounted as error:
        raise FlagError([f"{_AUTO}: {reason}; give a number" for reason in error.reasons]) from error
    except DriverError as refusal:
        raise FlagError([f"{_AUTO}: cannot query free VRAM: {refusal}"]) from refusal
    return dataclasses.replace(launch, free_vram_bytes=min(free.values()))


def _why(plan: Plan, launch: Launch) -> str:
    """One line: the number, the VRAM it takes, and the room it leaves."""
    most = max(plan.ranks, key=lambda rank: rank.used_bytes)
    notes = "".join(f"; {note}" for note in (*plan.notes, *launch.notes) if note != plan.draft_note)
    stream = f", {size(most.stream_bytes)} of stream buffers" if most.stream_buffers else ""
    return (
        f"{_AUTO}: {plan.num_resident} of {plan.num_experts} experts a layer fit in VRAM: {size(most.resident_bytes)} on a "
        f"rank, beside {size(most.plain_weights)} of other weights{stream} and {size(most.kv_bytes)} of KV cache for "
        f"{plan.kv_tokens} tokens on each rank ({launch.demand}){notes}"
    )
