"""Whether a model fits, with how many residents, and how fast: shapes and a machine in, a plan out. Pure, except for reading
headers.

A plan has the most *rows* (residents and slots of a layer) with which every rank holds its weights, the rows and the KV cache
within SGLang's budget, and the machine's host RAM holds the experts that are not resident.
"""

from __future__ import annotations

import dataclasses
import shlex

from sglang_uvm_offload.config import AUTO, slot_problems
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape
from sglang_uvm_offload.sizing.draft_cost import draft_note, draft_speeds
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.lookup_tables import MANAGED, table_flags, table_note
from sglang_uvm_offload.sizing.machine import Machine
from sglang_uvm_offload.sizing.plan import Alternative, Plan, Speed
from sglang_uvm_offload.sizing.plan_report import render
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.ranks import dividing, named, ranks_that_fit, shape_problems
from sglang_uvm_offload.sizing.remedies import refusals, remedies, shortages
from sglang_uvm_offload.sizing.routing_curves import OTHER
from sglang_uvm_offload.sizing.slots import NO_SLOTS, Slots
from sglang_uvm_offload.sizing.speed import hiding_chunk, predict
from sglang_uvm_offload.sizing.verdict import ONE_MEMORY, useless_on_a_slow_link, uselessness
from sglang_uvm_offload.units import size

__all__ = ["plan", "render"]

MORE_RESIDENTS = ({"chunked_prefill_size": 1024}, {"mem_fraction_static": 0.9})
"""Values of SGLang's flags that leave less memory for activations and CUDA graphs, and so more for residents."""

_N = flag_name("num_resident")
_SLOTS = flag_name("slots")
_FIXED = f"{flag_name('resident_selection')} first_n"
_STREAM_GB = flag_name("stream_buffer_gb")


def plan(
    model: CheckpointShape,
    machine: Machine,
    workload: Workload,
    parallel: Parallel,
    reserve: Reserve | None = None,
    assumed: Assumptions | None = None,
    hit_rate: float | None = None,
    num_resident: int | None = None,
    slots: Slots = NO_SLOTS,
) -> Plan:
    """The plan for serving ``model``. ``hit_rate``: the measured share of routing that residents and slots serve, None if
    unknown. ``num_resident``: the residents of a layer to plan with, None for the most that fit with ``slots``."""
    case = Case(model, machine, workload, parallel, reserve or Reserve(), assumed or Assumptions(), slots=slots)
    return plan_case(case, hit_rate, num_resident)


def plan_case(case: Case, hit_rate: float | None = None, num_resident: int | None = None) -> Plan:
    """``plan`` for a case; without speeds where the machine's rates are unknown (0)."""
    model, parallel = case.model, case.parallel
    misshapen, misnumbered = shape_problems(case), _number_problems(case, num_resident)
    problems = misshapen + misnumbered
    blank = Plan(
        model=model.name,
        machine=case.machine,
        workload=case.workload,
        parallel=parallel,
        num_resident=None,
        num_experts=model.num_experts,
        top_k=model.top_k,
        moe_layers=len(model.moe_layers),
        weights_bytes=model.total_bytes,
        expert_bytes=model.expert_bytes,
        total_parameters=model.total_parameters - model.draft_parameters,
        active_parameters=model.active_parameters,
        shared_parameters=model.shared_parameters,
        draft_parameters=model.draft_parameters,
        quantization=model.quantization,
        quantization_from=model.quantization_from,
        problems=tuple(problems),
        assumptions=case.assumed,
    )
    if problems:
        others = dividing(case) if misshapen else []
        needs = ranks_that_fit(others)
        # Other ranks alone do not help: what these are short of is a problem too.
        short = shortages(others[0]) if others and not needs else []
        problems += [f"with {named(others[0])}, which divides the model: {shortage}" for shortage in short]
        return dataclasses.replace(blank, problems=tuple(problems), needs=tuple(needs))
    asked = case.slots
    case = case.with_slots_that_fit()
    most = case.most_in_vram()
    slots = case.slots.asked or 0
    wanted = case.preferred() if num_resident is None else min(num_resident + slots, model.num_experts)
    if num_resident is None and wanted is not None and wanted < min(slots, model.num_experts):
        few = f"{_SLOTS} {slots}: {wanted} rows a layer fit in VRAM; give at most as many, or {AUTO}"
        return dataclasses.replace(blank, problems=(few,))
    fits = wanted is not None and case.in_vram(wanted) and case.in_host(wanted)
    chosen = wanted if fits else None
    shown = wanted or 0
    drafts = "" if chosen is None or not case.workload.drafts else draft_note(case, chosen)
    sized = dataclasses.replace(
        blank,
        num_resident=None if chosen is None else case.residents_of(chosen),
        slots=0 if chosen is None else case.slots_of(chosen),
        mem_fraction_static=case.fraction,
        headroom_gb=case.reserve.headroom_gb,
        stream_tokens=case.stream_tokens(shown),
        chunked_prefill_size=case.defaults.chunked_prefill_size,
        kv_tokens=case.kv_tokens,
        kv_token_bytes=max(case.kv_token_bytes(stage) for stage in range(parallel.pp)),
        ranks=tuple(case.rank(stage, shown) for stage in range(parallel.pp)),
        vram=case.vram,
        table_bytes=sum(table.nbytes for table in model.tables),
        tables_in=case.tables_in if model.tables else "",
        tables_host=case.table_host_bytes,
        host_needed=case.host(shown, after_moves=False),
        host_needed_after_moves=case.host(shown, after_moves=True),
        notes=(*model.notes, *_notes(case, chosen, asked), *filter(None, [drafts])),
        draft_note=drafts,
    )
    if chosen is None and num_resident is not None and most is not None:
        return dataclasses.replace(sized, problems=tuple(refusals(case, shown, most)))
    if chosen is None and case.machine.one_memory:
        return dataclasses.replace(sized, problems=(_one_memory_shortage(case),))
    if chosen is None:
        return dataclasses.replace(sized, problems=tuple(shortages(case)), needs=tuple(remedies(case)))
    served = dataclasses.replace(sized, flags=_flags(case, chosen))
    if case.machine.link_gbps:
        machine = case.machine
        served = dataclasses.replace(
            served,
            speeds=_speeds(case, chosen, hit_rate),
            draft_speeds=draft_speeds(case, chosen, hit_rate) if case.workload.drafts else (),
            hiding_chunk=_hiding_chunk(case, chosen, machine),
            slowest_hiding_chunk=_hiding_chunk(case, chosen, machine.slowest or machine),
        )
    notes = (*served.notes, *filter(None, [useless_on_a_slow_link(served)]))
    return dataclasses.replace(served, useless=uselessness(served), notes=notes)


def _one_memory_shortage(case: Case) -> str:
    needed = case.gpus_take(0) + case.host(0, after_moves=False)
    return (
        f"{ONE_MEMORY}; all experts need {size(case.host_need(0).experts)}, the launch {size(needed)}, and "
        f"{size(case.machine.pool_bytes)} are available"
    )


def alternatives(case: Case, planned: Plan, hit_rate: float | None = None) -> tuple[Alternative, ...]:
    """The plans with ``MORE_RESIDENTS``, of flags that were not given, that have more of them than ``planned``, the plan for
    ``case`` with the most residents."""
    if planned.num_resident in (None, planned.num_experts):
        return ()
    out = []
    for change in MORE_RESIDENTS:
        ((field, value),) = change.items()
        if getattr(case.reserve, field) is not None:
            continue
        other = plan_case(dataclasses.replace(case, reserve=dataclasses.replace(case.reserve, **change)), hit_rate)
        if other.rows > planned.rows and other.num_resident is not None:
            flag = f"--{field.replace('_', '-')} {value}"
            out.append(Alternative(flag, other.num_resident, other.slots, other.vram.sglang, other.speeds))
    return tuple(out)


def _number_problems(case: Case, num_resident: int | None) -> list[str]:
    """Why the model cannot have the given residents, or slots with them."""
    experts, slots = case.model.num_experts, case.slots.asked
    if num_resident is None:
        return []
    if not 0 <= num_resident <= experts:
        return [f"--num-resident {num_resident}: the model has {experts} experts a layer"]
    if slots is None:
        return [f"{_SLOTS} {AUTO}: divides what fits; give a number with --num-resident {num_resident}"]
    return slot_problems(slots, num_resident, experts)


def _notes(case: Case, chosen: int | None, asked: Slots) -> list[str]:
    """``chosen`` rows of VRAM, and the slots that were ``asked`` for."""
    out = [note] if (note := table_note(case.model.tables, case.tables_in, case.machine.one_memory)) else []
    states = len(case.model.kv.state_layers)
    if states:
        out.append(f"{states} layers have linear attention or Mamba: the state that they keep of each request is not counted")
    if case.parallel.ranks < case.machine.gpus:
        p, gpus = case.parallel, case.machine.gpus
        ranks = f"tensor parallelism over {p.tp}" + (f", {p.pp} pipeline stages" if p.pp > 1 else "")
        ranks += f", {p.replicas} replicas" if p.replicas > 1 else ""
        out.append(f"{p.ranks} of {gpus} GPUs are used ({ranks}); the others stay idle")
    if not case.model.from_headers:
        out.append("bytes are derived from the config; give the checkpoint's folder to read them from its headers")
    if chosen is None:
        return out
    if chosen == case.model.num_experts:
        slots = f", and {_SLOTS} is of no use" if asked.asked != 0 else ""
        others = [
            *(["draft layers"] if case.offloads_drafts else []),
            *(["lookup tables"] if case.tables_in == MANAGED else []),
        ]
        needed = f"is needed for {' and '.join(others)} only" if others else "is not needed"
        out.append(f"every expert fits in VRAM: offloading {needed}{slots}")
    elif case.reserve.stream_gb and not case.stream(chosen).buffers:
        one = size(max(case.stream_layer_bytes(stage) for stage in range(case.parallel.pp)))
        out.append(
            f"{_STREAM_GB} {case.reserve.stream_gb:g} is less than one stream buffer, which takes {one}: nothing streams"
        )
    if case.slots_of(chosen) < asked.of(chosen, case.model.num_experts):
        fewer = f"{case.slots_of(chosen)} slots, not {asked.of(chosen, case.model.num_experts)}"
        out.append(f"{_SLOTS} {AUTO}: {fewer}, because more do not fit in VRAM, or their experts not in host RAM")
    if case.slots_of(chosen):
        out.append(
            "slots need SGLang's Triton, Marlin or DeepGEMM MoE runner (--moe-runner-backend); whether one of these serves the "
            "model is not known here"
        )
    if not _may_move(case, chosen):
        most = size(case.host(chosen, after_moves=True))
        out.append(
            f"host RAM use may grow to {most} as residents change, because promoted experts keep their host pages, and "
            f"{size(case.host_room(chosen))} are available: use fixed residents, {_FIXED}, or better ones by "
            f"{flag_name('profile')} with {flag_name('adapt')} off"
        )
    return out


def _may_move(case: Case, rows: int) -> bool:
    """Whether host RAM also holds the pages that promoted experts keep."""
    return case.host(rows, after_moves=True) <= case.host_room(rows)


def _flags(case: Case, chosen: int) -> tuple[str, ...]:
    p, w = case.parallel, case.workload
    out = [f"--model-path {shlex.quote(case.model.name)}", f"--tp-size {p.tp}"]
    out += [f"--ep-size {p.ep}"] if p.ep > 1 else []
    out += [f"--pp-size {p.pp}"] if p.pp > 1 else []
    out += [f"--dp-size {p.dp}"] if p.dp > 1 else []
    out += ["--enable-dp-attention"] if p.dp_attention else []
    out += [f"--mem-fraction-static {case.fraction}", f"--chunked-prefill-size {case.defaults.chunked_prefill_size}"]
    out += [f"--context-length {w.context_length}", f"--max-running-requests {w.requests}"]
    out += [f"--max-total-tokens {w.max_total_tokens}"] if w.max_total_tokens is not None else []
    out += [f"--kv-cache-dtype {w.kv_cache_dtype}"] if w.kv_cache_dtype != "bfloat16" else []
    out += ["--speculative-algorithm NEXTN"] if w.speculative else []
    out += table_flags(case.model.tables, case.tables_in)
    out += [f"{flag_name('draft_num_resident')} {case.draft_residents}"] if case.offloads_drafts else []
    if chosen < case.model.num_experts or case.offloads_drafts or case.tables_in == MANAGED:
        out += [f"{_N} {case.residents_of(chosen)}", f"{flag_name('headroom_gb')} {case.reserve.headroom_gb}"]
        out += [] if _may_move(case, chosen) else [_FIXED]
        out += [f"{_SLOTS} {case.slots_of(chosen)}"] if case.slots_of(chosen) else []
        out += [f"{_STREAM_GB} {case.reserve.stream_gb:g}"] if case.reserve.stream_gb is not None else []
    return tuple(out)


def _speeds(case: Case, chosen: int, hit_rate: float | None) -> tuple[Speed, ...]:
    """For one request and for all, at the given hit rate or at those of measured routing. Fixed residents serve as if by chance
    without a profile, and with one what residents chosen on other traffic serve."""
    batches, experts = sorted({1, case.workload.requests}), case.model.num_experts
    if chosen == experts:
        return tuple(_speed(case, chosen, requests, "all in VRAM", 1.0) for requests in batches)
    if hit_rate is not None:
        return tuple(_speed(case, chosen, requests, "hit rate as given", hit_rate) for requests in batches)
    moving, out = _may_move(case, chosen), []
    for requests in batches:
        if not moving:
            out.append(_speed(case, chosen, requests, "first_n, by chance", chosen / experts))
        measured = case.measured_hit_rates(chosen, requests).named()
        for name, found in measured.items() if moving else [(OTHER, measured[OTHER])]:
            out.append(dataclasses.replace(_speed(case, chosen, requests, name, found.rate), measured_on=found))
    return tuple(out)


def _speed(case: Case, chosen: int, requests: int, name: str, hit_rate: float) -> Speed:
    stages = [case.cost(stage) for stage in range(case.parallel.pp)]

    def over(machine: Machine) -> Speed:
        return predict(
            *(name, hit_rate, case.residents_of(chosen), case.model.num_experts, case.model.top_k, stages, machine),
            *(case.workload, case.parallel, requests, case.defaults.chunked_prefill_size, case.assumed, case.stream(chosen)),
            slots=case.slots_of(chosen),
        )

    slowest = case.machine.slowest if chosen < case.model.num_experts or case.offloads_drafts else None
    return dataclasses.replace(over(case.machine), slowest=None if slowest is None else over(slowest))


def _hiding_chunk(case: Case, chosen: int, machine: Machine) -> int:
    stages = [case.cost(stage) for stage in range(case.parallel.pp)]
    return hiding_chunk(
        *(chosen, case.model.num_experts, case.model.top_k, stages, machine, case.parallel, case.assumed),
        case.stream(chosen),
    )
