"""``--expert-offload-num-resident auto``: runs the planner for this launch on this machine."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang_uvm_offload.config import AUTO, RequestedConfig
from sglang_uvm_offload.cuda.device import DriverError
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import expert_bytes
from sglang_uvm_offload.plugin.launch.planned_launch import free_by_gpu, planned_launch, ranks
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.sizing.launch import Launch, Uncounted
from sglang_uvm_offload.sizing.plan import Plan
from sglang_uvm_offload.sizing.planner import choose_num_resident
from sglang_uvm_offload.sizing.slots import Slots
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

_AUTO, _SLOTS = f"{flag_name('num_resident')} {AUTO}", flag_name("slots")


def fitting(config: RequestedConfig, server_args: Any, profile: Profile | None = None) -> Plan:
    """The plan with the numbers for ``auto``, of residents and of slots, which are logged with their reasons. Raises
    ``FlagError`` if none fits. ``profile``: the one to start from."""
    cfg = resolving_view(server_args)
    if cfg.device != "cuda":
        raise FlagError([f"{_AUTO}: with --device {cfg.device} there is no VRAM to size for; give a number"])
    slots = Slots(config.slots, profile.slot_shares if profile is not None else {})
    launch = dataclasses.replace(_launch(config, server_args, cfg), slots=slots)
    plan = choose_num_resident(launch)
    assert plan.num_resident is not None
    more = not launch.one_memory and expert_bytes.is_more_than_planned(server_args)
    if more and (short := expert_bytes.problems(plan.num_resident, server_args)):
        raise FlagError(short)
    logger.info("%s", _why(plan, launch))
    if plan.slots:
        logger.info("%s", _division(plan, slots))
    if plan.draft_note:
        logger.warning("%s: %s", _AUTO, plan.draft_note)
    return plan


def _launch(config: RequestedConfig, server_args: Any, cfg: Any) -> Launch:
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
    tables = f", {size(most.table_bytes)} of lookup tables" if most.table_bytes else ""
    taken = size(most.resident_bytes + most.slot_bytes)
    return (
        f"{_AUTO}: {plan.rows} of {plan.num_experts} experts a layer fit in VRAM: {taken} on a "
        f"rank, next to {size(most.plain_weights)} of other weights{tables}{stream} and {size(most.kv_bytes)} of KV cache for "
        f"{plan.kv_tokens} tokens on each rank ({launch.demand}){notes}"
    )


def _division(plan: Plan, slots: Slots) -> str:
    """One line: how residents and slots share the VRAM, and what decided it."""
    divided = f"of {plan.rows} rows a layer in VRAM, {plan.slots} are slots and {plan.num_resident} residents"
    fewer = "; reduced to what fits" if plan.slots < slots.of(plan.rows, plan.num_experts) else ""
    return f"{_SLOTS}: {divided} ({slots.origin(plan.rows, plan.num_experts)}{fewer})"
