"""The planner's estimate of a launch on this machine, for ``doctor``. The ranks themselves decide from measurements."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.utils import get_device_memory_capacity

from sglang_uvm_offload.config import AUTO, RequestedConfig
from sglang_uvm_offload.cuda.device import DriverError
from sglang_uvm_offload.flags import NEVER, FlagError, flag_name
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Assumptions, Reserve, Workload
from sglang_uvm_offload.plan.kv_cache import DTYPE_BYTES
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.measured_link import with_measured_link
from sglang_uvm_offload.plan.model_files import ModelFiles
from sglang_uvm_offload.plan.outcome import Plan
from sglang_uvm_offload.plan.planner import plan as planned
from sglang_uvm_offload.plan.safetensors_header import CheckpointError
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import draft_source
from sglang_uvm_offload.plugin.launch.demand import demand_of
from sglang_uvm_offload.plugin.launch.lookup_tables import tables_in
from sglang_uvm_offload.plugin.launch.profiles import load_profiles
from sglang_uvm_offload.plugin.launch.ranks import (
    free_by_gpu,
    has_one_memory,
    hicache,
    longest_step,
    measured_link,
    parallel_sizes,
    ranks,
    rates,
)
from sglang_uvm_offload.plugin.launch.requested_slots import requested_slots
from sglang_uvm_offload.residency.budget import divide
from sglang_uvm_offload.residency.demand import Demand
from sglang_uvm_offload.units import size

_N = flag_name("num_resident")
_DECIDED = "each rank measures before it decides"


class Estimate(NamedTuple):
    facts: list[str]
    doubts: list[str]
    """Why the launch may fail to start, or why there is no estimate."""
    offloaded_bytes: int = 0
    """Host RAM of offloaded experts on this machine, 0 if unknown."""


def estimate(config: RequestedConfig, server_args: Any) -> Estimate:
    """Estimate a launch on GPUs."""
    given = f"{_N} {AUTO if config.num_resident is None else config.num_resident}"
    cfg, model = resolving_view(server_args), model_config_of(server_args)
    demand = demand_of(cfg, server_args, model)
    try:
        case = _case(config, cfg, model, server_args, demand)
        # Redundant experts add places that the planner does not know.
        number = None if config.num_resident is None else min(config.num_resident, case.model.num_experts)
        case = dataclasses.replace(case, num_resident=number)
        plan = planned(case)
    except (CheckpointError, DriverError, FlagError) as error:
        return Estimate([], [f"{given}: cannot be estimated: {error}"])
    if plan.num_resident is None:
        needs = [f"remedy: {need}" for need in plan.needs]
        facts = (
            [f"estimated: {number} of {plan.num_experts} experts a layer in VRAM; {_DECIDED}"] if _starts(case, plan) else []
        )
        return Estimate(facts, [f"estimated: {line}" for line in (*plan.problems, *needs)])
    notes = [note for note in plan.notes if note != plan.draft_note]
    offloaded = sum(rank.host_bytes for rank in plan.ranks) * len(ranks(cfg)) // len(plan.ranks)
    stream = f"{flag_name('stream_tokens')} {plan.stream_tokens}: estimated: steps with this many tokens or more stream"
    facts = [_fact(plan, demand), *([stream] if plan.stream_buffers or plan.streams_into_slots else []), *notes]
    return Estimate(facts, [plan.draft_note] if plan.draft_note else [], offloaded)


def _starts(case: Case, plan: Plan) -> bool:
    """Whether the ranks would serve with the given number, with less KV cache than requested."""
    if case.num_resident is None or not plan.ranks:
        return False
    try:
        divide(case.asked, case.ranks)
    except FlagError:
        return False
    return True


def _fact(plan: Plan, demand: Demand) -> str:
    most = max(plan.ranks, key=lambda rank: rank.used_bytes)
    slots = f" and {plan.slots} slots" if plan.slots else ""
    return (
        f"estimated: {plan.num_resident} of {plan.num_experts} experts a layer{slots} in VRAM, "
        f"{size(most.resident_bytes + most.slot_bytes)} per rank, plus {size(most.plain_weights)} of other weights and "
        f"{size(most.kv_bytes)} of KV cache for {plan.kv_tokens} tokens ({demand}); {size(most.host_bytes)} in host RAM; "
        f"{_DECIDED}"
    )


def _case(config: RequestedConfig, cfg: Any, model: Any, given: Any, demand: Demand) -> Case:
    """Raises ``CheckpointError``, ``DriverError`` or ``FlagError``."""
    parallel, profile = parallel_sizes(cfg), load_profiles(config, model).merged
    shape = shape_of(
        ModelFiles(cfg.model_path, cfg.revision, cfg.download_dir).config,
        cfg.model_path,
        quantization=cfg.quantization,
        dtype=_name(model.dtype),
        model_override_args=cfg.json_model_override_args,
    )
    shape = dataclasses.replace(shape, context_length=max(shape.context_length, model.context_len))
    host, vram = host_available(), int((get_device_memory_capacity(cfg.device) or 0) * (1 << 20))
    machine = Machine(
        *("this machine", parallel.ranks, vram, host, *rates()),
        source="this machine",
        one_memory=has_one_memory(),
        available_bytes=host if has_one_memory() else 0,
    )
    speculative = draft_source.from_the_checkpoint(cfg) and bool(shape.draft_layers)
    drafts = draft_source.tokens_verified(cfg)
    workload = Workload(
        demand.context,
        demand.max_running_requests or 1,
        max_total_tokens=demand.kv_tokens,
        page_tokens=demand.page_tokens,
        kv_cache_dtype=_kv_dtype(cfg, model),
        speculative=speculative,
        draft_num_resident=config.draft_num_resident if speculative else None,
        draft_tokens=drafts or Workload.draft_tokens,
        other_drafts=bool(drafts) and not speculative,
        cache_for=str(demand),
    )
    reserve = Reserve(
        # The launch checks have already subtracted the headroom.
        cfg.mem_fraction_static + (config.headroom_gb * (1 << 30) / vram if vram else 0.0),
        config.headroom_gb,
        free_vram_bytes=min(free_by_gpu(ranks(cfg)).values()),
        **hicache(cfg, given),
        chunked_prefill_size=longest_step(cfg, model),
        stream_gb=0.0 if config.stream_tokens == NEVER else config.stream_gb,
        stream_tokens=config.stream_tokens,
    )
    assumed = Assumptions(accepted_tokens=min(Assumptions.accepted_tokens, workload.draft_tokens))
    return Case(
        *(shape, with_measured_link(machine, measured_link(cfg)) if all(rates()) else machine, workload, parallel, reserve),
        assumed,
        slots=requested_slots(config, config.slots, profile),
        tables_in=tables_in(cfg, model, config.tables_in_host),
    )


def _kv_dtype(cfg: Any, model: Any) -> str:
    """The KV cache's dtype for the planner, which counts smaller types as one byte."""
    name = _name(model.dtype) if cfg.kv_cache_dtype == "auto" else cfg.kv_cache_dtype
    return name if name in DTYPE_BYTES else "fp8_e4m3"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
