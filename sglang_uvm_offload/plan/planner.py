"""Plans whether a model fits a machine, with how many residents, and how fast. A pure function of shapes and a machine.

``residency.budget`` divides VRAM, as in a launch.
"""

from __future__ import annotations

import dataclasses

from sglang_uvm_offload.config import AUTO
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.draft_cost import draft_note, draft_speeds
from sglang_uvm_offload.plan.kv_cache import DTYPE_BYTES, FP8
from sglang_uvm_offload.plan.launch_flags import environment, flags, offloads
from sglang_uvm_offload.plan.lookup_tables import MANAGED, table_note
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.outcome import Plain, Plan, Speed
from sglang_uvm_offload.plan.plain import plain_case
from sglang_uvm_offload.plan.plan_report import render
from sglang_uvm_offload.plan.ranks import other_ranks, shape_problems
from sglang_uvm_offload.plan.remedies import remedies
from sglang_uvm_offload.plan.verdict import useless_on_a_slow_link, uselessness
from sglang_uvm_offload.residency.budget import Division
from sglang_uvm_offload.units import size

__all__ = ["plan", "render"]

_SLOTS = flag_name("slots")
_STREAM_GB = flag_name("stream_buffer_gb")


def plan(case: Case, hit_rate: float | None = None) -> Plan:
    """The plan for a case. ``hit_rate``: the measured share of routing that residents and slots serve; None if unknown. It has
    no speeds if the machine's rates are unknown (0)."""
    model = case.model
    blank = Plan(
        model=model.name,
        machine=case.machine,
        workload=case.workload,
        parallel=case.parallel,
        num_resident=None,
        num_experts=model.num_experts,
        top_k=model.top_k,
        moe_layers=len(model.moe_layers),
        weights_bytes=model.total_bytes,
        expert_bytes=model.expert_bytes,
        total_parameters=model.total_parameters - model.draft_parameters,
        active_parameters=model.active_parameters,
        quantization=model.quantization,
        assumptions=case.assumed,
    )
    if misshapen := shape_problems(case):
        return dataclasses.replace(blank, problems=tuple(misshapen), needs=tuple(other_ranks(case)))
    if misnumbered := case.number_problems():
        return dataclasses.replace(blank, problems=tuple(misnumbered))
    try:
        division, problems = case.division, list[str]()
    except FlagError as error:
        division, problems = Division(0, 0, 0), error.problems
    sized = dataclasses.replace(
        blank,
        mem_fraction_static=case.fraction,
        headroom_gb=case.reserve.headroom_gb,
        stream_tokens=case.stream(division).tokens,
        chunked_prefill_size=case.defaults.chunked_prefill_size,
        kv_tokens=case.kv_tokens,
        kv_token_bytes=max(map(case.kv_token_bytes, range(case.parallel.pp))),
        ranks=tuple(case.rank(stage, division) for stage in range(case.parallel.pp)),
        vram=case.vram,
        table_bytes=sum(table.nbytes for table in model.tables),
        tables_in=case.tables_in if model.tables else "",
        tables_host=case.table_host_bytes,
        host_needed=case.host_need(division).total,
        notes=tuple(_notes(case)),
        problems=tuple(problems),
        plain=(plain := _plain(case)),
        plain_fp8=None if plain else _plain_fp8(case),
    )
    if problems:
        mended = case.num_resident is None and not case.machine.one_memory  # a number is answered with one that fits
        return dataclasses.replace(sized, needs=tuple(remedies(case)) if mended else ())
    drafts = draft_note(case, division) if case.workload.drafts else ""
    served = dataclasses.replace(
        sized,
        num_resident=division.num_resident,
        slots=division.slots,
        notes=(*sized.notes, *_notes_of(case, division), *filter(None, [drafts])),
        draft_note=drafts,
        flags=flags(case, division),
        environment=environment(case),
        offloads=offloads(case, division),
    )
    if case.machine.link_gbps:
        machine = case.machine
        served = dataclasses.replace(
            served,
            speeds=_speeds(case, division, hit_rate),
            draft_speeds=draft_speeds(case, division, hit_rate) if case.workload.drafts else (),
            hiding_chunk=_hiding_chunk(case, division, machine),
            slowest_hiding_chunk=_hiding_chunk(case, division, machine.slowest or machine),
        )
    notes = (*served.notes, *filter(None, [useless_on_a_slow_link(served)]))
    return dataclasses.replace(served, useless=uselessness(served), notes=notes)


def _plain(case: Case) -> Plain | None:
    """SGLang without offloading, None if VRAM does not hold the model."""
    whole = plain_case(case)
    if whole is None:
        return None
    every, requests = Division(case.model.num_experts, 0, 0), case.workload.requests
    known = case.machine.link_gbps > 0
    rate = _speed(whole, every, requests, "all in VRAM", 1.0).decode_tokens_s if known else 0.0
    return Plain(whole.fraction, rate, flags(whole, every), environment(whole))


def _plain_fp8(case: Case) -> Plain | None:
    """The same with half the KV cache, if the workload has 16 bits; None if that does not make it fit."""
    work = dataclasses.replace(case.workload, kv_cache_dtype=FP8)
    return _plain(dataclasses.replace(case, workload=work)) if DTYPE_BYTES[case.workload.kv_cache_dtype] == 2 else None


def _notes(case: Case) -> list[str]:
    """Notes that hold for any division of VRAM."""
    out = [note] if (note := table_note(case.model.tables, case.tables_in, case.machine.one_memory)) else []
    if case.parallel.ranks < case.machine.gpus:
        p, gpus = case.parallel, case.machine.gpus
        ranks = f"tensor parallelism over {p.tp}" + (f", {p.pp} pipeline stages" if p.pp > 1 else "")
        ranks += f", {p.replicas} replicas" if p.replicas > 1 else ""
        out.append(f"{p.ranks} of {gpus} GPUs are used ({ranks}); the others stay idle")
    return out


def _notes_of(case: Case, division: Division) -> list[str]:
    out, experts = [], case.model.num_experts
    if division.num_resident == experts:
        slots = f", and {_SLOTS} has no effect" if case.slots.asked else ""
        others = [
            *(["draft layers"] if case.offloads_drafts else []),
            *(["lookup tables"] if case.tables_in == MANAGED else []),
        ]
        needed = f"is needed for {' and '.join(others)} only" if others else "is not needed"
        out.append(f"every expert fits in VRAM: offloading {needed}{slots}")
    elif case.reserve.stream_gb and not division.buffers and not case.streams_into_slots(division):
        one = size(max(map(case.stream_layer_bytes, range(case.parallel.pp))))
        out.append(
            f"{_STREAM_GB} {case.reserve.stream_gb:g} is less than one stream buffer, which takes {one}: nothing streams"
        )
    wanted = case.asked.slots.of(division.num_resident + division.slots, experts)
    if division.slots < wanted:
        out.append(f"{_SLOTS} {AUTO}: {division.slots} of {wanted} slots, because host RAM has no room for more experts")
    if division.slots:
        out.append(
            "slots need SGLang's Triton, Marlin or DeepGEMM MoE runner (--moe-runner-backend); the launch says if the model "
            "gets another one"
        )
    most, available = case.host_need(division, after_moves=True).total, case.machine.host_bytes
    if most > available and not case.machine.one_memory:
        out.append(
            f"host RAM use would grow to {size(most)} as residents change, because promoted experts keep their host pages, but "
            f"{size(available)} are available. Moves stop before that. Residents that a {flag_name('profile')} chooses at the "
            "start need no moves"
        )
    return out


def _speeds(case: Case, division: Division, hit_rate: float | None) -> tuple[Speed, ...]:
    """Speeds for one request and for all, at the given hit rate or at those of measured routing."""
    batches = sorted({1, case.workload.requests})
    if division.num_resident == case.model.num_experts:
        return tuple(_speed(case, division, requests, "all in VRAM", 1.0) for requests in batches)
    if hit_rate is not None:
        return tuple(_speed(case, division, requests, "hit rate as given", hit_rate) for requests in batches)
    return tuple(
        dataclasses.replace(_speed(case, division, requests, name, found.rate), measured_on=found)
        for requests in batches
        for name, found in case.measured_hit_rates(division, requests).named().items()
    )


def _speed(case: Case, division: Division, requests: int, name: str, hit_rate: float) -> Speed:
    def over(machine: Machine) -> Speed:
        return case.speed_model(machine).predict(
            *(name, hit_rate, division.num_resident, case.workload, requests, case.defaults.chunked_prefill_size),
            *(case.stream(division), division.slots),
        )

    reads_link = division.num_resident < case.model.num_experts or case.offloads_drafts
    slowest = case.machine.slowest if reads_link else None
    return dataclasses.replace(over(case.machine), slowest=None if slowest is None else over(slowest))


def _hiding_chunk(case: Case, division: Division, machine: Machine) -> int:
    return case.speed_model(machine).hiding_chunk(division.num_resident + division.slots, case.stream(division))
