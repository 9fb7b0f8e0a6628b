"""Whether a model fits, with how many residents, and how fast: shapes and a machine in, a plan out. Pure, except for reading
headers.

A plan has the most *rows* (residents and slots of a layer) with which every rank holds its weights, the rows and the KV cache
within SGLang's budget, and the machine's host RAM holds the experts that are not resident.
"""

from __future__ import annotations

import dataclasses

from sglang_uvm_offload.config import AUTO, UNRESOLVED, slot_problems
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.sizing.checkpoint import CheckpointShape
from sglang_uvm_offload.sizing.draft_cost import draft_note
from sglang_uvm_offload.sizing.kv_cache import DTYPE_BYTES
from sglang_uvm_offload.sizing.launch import NO_DRAFTS, Launch, Uncounted
from sglang_uvm_offload.sizing.machine import GIB, Machine
from sglang_uvm_offload.sizing.plan import Assumptions, Parallel, Plan, RankMemory, Reserve, Speed, Workload
from sglang_uvm_offload.sizing.plan_report import render
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.slots import NO_SLOTS, Slots
from sglang_uvm_offload.sizing.speed import hiding_chunk, predict
from sglang_uvm_offload.sizing.streaming import break_even_tokens
from sglang_uvm_offload.sizing.verdict import ONE_MEMORY, uselessness
from sglang_uvm_offload.units import size

__all__ = ["choose_num_resident", "plan", "render"]

MAX_VRAM_GIB = 1024
VRAM_STEP_GIB = 8
"""The limit and the step of the search for a large enough GPU."""

_N = flag_name("num_resident")
_SLOTS = flag_name("slots")
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
    unknown. ``num_resident``: the residents of a layer to plan with, None for the most that fit beside ``slots``."""
    case = Case(model, machine, workload, parallel, reserve or Reserve(), assumed or Assumptions(), slots=slots)
    return plan_case(case, hit_rate, num_resident)


def plan_case(case: Case, hit_rate: float | None = None, num_resident: int | None = None) -> Plan:
    """``plan`` for a case; without speeds where the machine's rates are unknown (0)."""
    model, parallel = case.model, case.parallel
    problems = shape_problems(case) + _number_problems(case, num_resident)
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
        problems=tuple(problems),
        assumptions=case.assumed,
    )
    if problems:
        return blank
    asked = case.slots
    case = case.with_slots_that_fit()
    most = case.most_in_vram()
    wanted = case.preferred() if num_resident is None else min(num_resident + case.slots.asked, model.num_experts)
    if num_resident is None and wanted is not None and wanted < min(case.slots.asked, model.num_experts):
        few = f"{_SLOTS} {case.slots.asked}: {wanted} rows a layer fit in VRAM; give at most as many, or {AUTO}"
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
        stream_tokens=break_even_tokens(model.num_experts, model.top_k),
        chunked_prefill_size=case.defaults.chunked_prefill_size,
        kv_tokens=case.kv_tokens,
        kv_token_bytes=max(case.kv_token_bytes(stage) for stage in range(parallel.pp)),
        ranks=tuple(case.rank(stage, shown) for stage in range(parallel.pp)),
        host_needed=case.host(shown, after_moves=False),
        host_needed_after_moves=case.host(shown, after_moves=True),
        notes=(*_notes(case, chosen, asked), *filter(None, [drafts])),
        draft_note=drafts,
    )
    if chosen is None and num_resident is not None and most is not None:
        return dataclasses.replace(sized, problems=tuple(_refusals(case, shown, most)))
    if chosen is None and case.machine.one_memory:
        return dataclasses.replace(sized, problems=(f"{ONE_MEMORY}; all experts need {size(case.host(0, after_moves=False))}",))
    if chosen is None:
        return dataclasses.replace(sized, problems=tuple(_shortages(case)), needs=tuple(_remedies(case)))
    served = dataclasses.replace(sized, flags=_flags(case, chosen))
    if case.machine.link_gbps:
        speeds, chunk = _speeds(case, chosen, hit_rate), _hiding_chunk(case, chosen)
        served = dataclasses.replace(served, speeds=speeds, hiding_chunk=chunk)
    return dataclasses.replace(served, useless=uselessness(served))


def choose_num_resident(launch: Launch) -> Plan:
    """The plan behind ``--expert-offload-num-resident auto``: the most residents and slots beside the KV cache that ``launch``
    asks for. Raises ``FlagError`` with the shortages and the remedies."""
    auto = f"{_N} auto"
    try:
        case = launch.case()
    except Uncounted as error:
        raise FlagError([f"{auto}: {reason}; give a number" for reason in error.reasons]) from error
    result = plan_case(case)
    if result.num_resident is None:
        needs = [f"remedy: {need}" for need in result.needs]
        raise FlagError([f"{auto}: {line}" for line in (*result.problems, *needs)])
    return result


def shape_problems(case: Case) -> list[str]:
    """Why these ranks cannot divide this model, or it cannot serve this workload, whatever the memory."""
    m, p, out = case.model, case.parallel, []
    if min(p.tp, p.ep, p.pp, p.dp) < 1:
        return ["--tp-size, --ep-size, --pp-size and --dp-size must be 1 or more"]
    if p.ranks > case.machine.gpus:
        out.append(f"{p.ranks} ranks need {p.ranks} GPUs, and the machine has {case.machine.gpus}")
    if p.tp % p.ep:
        out.append(f"--ep-size {p.ep}: must divide --tp-size {p.tp}")
    if p.dp_attention and p.tp % p.dp:
        out.append(f"--dp-size {p.dp} with --enable-dp-attention: must divide --tp-size {p.tp}")
    if out:
        return out
    if m.num_experts % p.ep:
        out.append(f"--ep-size {p.ep}: does not divide the model's {m.num_experts} experts")
    if m.heads % p.attn_tp:
        out.append(f"--tp-size {p.tp}: its {p.attn_tp} attention ranks do not divide the model's {m.heads} heads")
    if p.pp > m.num_layers:
        out.append(f"--pp-size {p.pp}: the model has {m.num_layers} layers")
    if m.quantization != "mxfp4" and m.expert_size % (p.moe_tp * m.scale_block):
        cut = f"{p.moe_tp} ranks do not divide an expert's {m.expert_size} hidden units"
        blocks = f" into blocks of {m.scale_block} that share a scale" if m.scale_block > 1 else ""
        out.append(f"--tp-size {p.tp} with --ep-size {p.ep}: {cut}{blocks}; raise --ep-size")
    if case.workload.context_length > m.context_length:
        out.append(f"--context-length {case.workload.context_length}: the model allows {m.context_length}")
    if case.workload.kv_cache_dtype not in DTYPE_BYTES:
        out.append(f"--kv-cache-dtype {case.workload.kv_cache_dtype}: must be one of {', '.join(DTYPE_BYTES)}")
    if case.workload.speculative and not m.draft_layers:
        out.append(NO_DRAFTS)
    accepted, drafts = case.assumed.accepted_tokens, case.workload.draft_tokens
    if case.workload.speculative and not 1 <= accepted <= drafts:
        out.append(
            f"--accepted-tokens {accepted:g}: a step with --speculative-num-draft-tokens {drafts} yields 1 to {drafts} tokens"
        )
    return out


def _number_problems(case: Case, num_resident: int | None) -> list[str]:
    """Why the given residents cannot be of this model, or its slots cannot be beside them."""
    experts, slots = case.model.num_experts, case.slots.asked
    if num_resident is None:
        return []
    if not 0 <= num_resident <= experts:
        return [f"--num-resident {num_resident}: the model has {experts} experts a layer"]
    if slots == UNRESOLVED:
        return [f"{_SLOTS} {AUTO}: divides what fits; give a number beside --num-resident {num_resident}"]
    return slot_problems(slots, num_resident, experts)


def _shortages(case: Case) -> list[str]:
    """Which memory is short, and what uses it."""
    if not case.budget:
        return [_nothing_granted(case)]
    worst = _tightest(case, 0)
    if worst.spare_bytes < 0:
        return [
            f"VRAM: with no expert resident{_beside_buffers(worst)} a rank needs {size(worst.used_bytes)} "
            f"({size(worst.plain_weights)} of weights beside experts, {size(worst.kv_bytes)} of KV cache for {case.kv_tokens} "
            f"tokens), and its budget is {size(case.budget)} of {size(case.machine.vram_bytes)}"
        ]
    most = case.most_in_vram() or 0
    cache = case.host_cache(most)
    beside = f" ({size(cache)} of it for the hierarchical cache and what SGLang leaves free beside it)" if cache else ""
    return [
        f"host RAM: with {_in_vram(case, most)}, the most that VRAM holds, "
        f"{size(case.host(most, after_moves=False))} are needed{beside}, and {size(case.machine.host_bytes)} are available"
    ]


def _in_vram(case: Case, rows: int) -> str:
    slots = f" and {case.slots_of(rows)} slots" if case.slots_of(rows) else ""
    return f"{case.residents_of(rows)} of {case.model.num_experts} experts a layer resident{slots}"


def _tightest(case: Case, rows: int) -> RankMemory:
    return min((case.rank(stage, rows) for stage in range(case.parallel.pp)), key=lambda rank: rank.spare_bytes)


def _beside_buffers(rank: RankMemory) -> str:
    return f" beside {size(rank.stream_bytes)} of stream buffers" if rank.stream_buffers else ""


def _refusals(case: Case, rows: int, most: int) -> list[str]:
    """Why a machine whose VRAM holds ``most`` rows does not hold ``rows``, or its host RAM not the other experts."""
    if not case.in_vram(rows):
        beside, slots = _beside_buffers(_tightest(case, rows)), case.slots_of(rows)
        what = f"{rows - slots} residents and {slots} slots for the {case.model.num_experts} experts of a layer"
        what = what if slots else f"{rows} of {case.model.num_experts} experts a layer"
        return [f"VRAM: {what} do not fit{beside}; at most {most} do" + (" together" if slots else "")]
    return [
        f"host RAM: with {_in_vram(case, rows)} "
        f"{size(case.host(rows, after_moves=False))} are needed, and {size(case.machine.host_bytes)} are available"
    ]


def _nothing_granted(case: Case) -> str:
    """What takes all of a GPU before any weight loads."""
    reserve, vram = case.reserve, case.machine.vram_bytes
    taken = [f"{flag_name('headroom_gb')} {reserve.headroom_gb}", f"{size(case.taken_before_loading)} that CUDA takes"]
    if reserve.mem_fraction_static is None:
        chunk, kept = case.defaults.chunked_prefill_size, size(case.defaults.reserved_bytes)
        taken.insert(0, f"{kept} that SGLang keeps for --chunked-prefill-size {chunk} and CUDA graphs")
    else:
        taken.insert(0, f"{1 - reserve.mem_fraction_static:.1%} that --mem-fraction-static {reserve.mem_fraction_static} keeps")
    if reserve.free_vram_bytes is not None:
        taken.append(f"{size(vram - reserve.free_vram_bytes)} in use before the start")
    if reserve.image_bytes:
        taken.append(f"{size(reserve.image_bytes)} for images")
    return f"VRAM: a GPU of {size(vram)} is too small: nothing is left for weights beside {', '.join(taken)}"


def _remedies(case: Case) -> list[str]:
    """Changes any one of which would be enough."""
    out = []
    most = case.most_in_vram()
    if case.reserve.stream_gb and _without_buffers(case).largest() is not None:
        out.append(f"no stream buffers ({_STREAM_GB} 0)")
    if most is not None:
        out.append(f"host RAM of {size(case.host(most, after_moves=False))}")
    elif _tokens_that_fit(case) > 0:
        out.append(
            f"a KV cache of at most {_tokens_that_fit(case)} tokens a rank (--max-total-tokens, fewer requests or a shorter "
            f"--context-length), and {size(case.host(0, after_moves=False))} of host RAM"
        )
    steps = range(case.machine.vram_bytes // GIB // VRAM_STEP_GIB * VRAM_STEP_GIB, MAX_VRAM_GIB + 1, VRAM_STEP_GIB)
    vram = next((each for each in steps[1:] if _with_vram(case, each).largest() is not None), None)
    if vram is not None:
        out.append(f"GPUs of {vram} GiB each, with the available host RAM")
    for tp in (tp for tp in (2, 4, 8, 16, 32) if tp > case.parallel.tp):
        ranks, host = _with_tp(case, tp)
        if host:
            out.append(f"{ranks} such GPUs with --tp-size {tp}, and {size(host)} of host RAM")
            break
    return out


def _tokens_that_fit(case: Case) -> int:
    stages = range(case.parallel.pp)
    room = min(case.budget - case.rank(stage, 0).used_bytes + case.pool_bytes(stage) for stage in stages)
    # At least one byte: with linear attention only, a token takes none.
    return max(0, int(room / max(1.0, *(case.kv_token_bytes(stage) for stage in stages))))


def _without_buffers(case: Case) -> Case:
    return dataclasses.replace(case, reserve=dataclasses.replace(case.reserve, stream_gb=0))


def _with_vram(case: Case, gib_each: int) -> Case:
    """The same case on GPUs of ``gib_each`` GiB, with as much VRAM in use by others."""
    bigger = dataclasses.replace(case.machine, vram_bytes=gib_each * GIB)
    free = case.reserve.free_vram_bytes
    free = None if free is None else free + bigger.vram_bytes - case.machine.vram_bytes
    return dataclasses.replace(case, machine=bigger, reserve=dataclasses.replace(case.reserve, free_vram_bytes=free))


def _with_tp(case: Case, tp: int) -> tuple[int, int]:
    """(ranks, the host RAM that they would need); 0 bytes if that many GPUs are not enough."""
    parallel = dataclasses.replace(case.parallel, tp=tp, ep=1 if case.parallel.ep == 1 else tp)
    plenty = dataclasses.replace(case.machine, gpus=parallel.ranks, host_bytes=1 << 62)
    wider = dataclasses.replace(case, parallel=parallel, machine=plenty)
    chosen = None if shape_problems(wider) else wider.largest()
    return parallel.ranks, 0 if chosen is None else wider.host(chosen, after_moves=False)


def _notes(case: Case, chosen: int | None, asked: Slots) -> list[str]:
    """``chosen`` rows of VRAM, and the slots that were ``asked`` for."""
    out = []
    if case.model.kv.stateless_layers and case.linear is None:
        out.append(f"{len(case.model.kv.stateless_layers)} layers have linear attention: their state is not counted")
    if not case.model.from_headers:
        out.append("bytes are derived from the config; give the checkpoint's folder to read them from its headers")
    if chosen is None:
        return out
    if chosen == case.model.num_experts:
        slots = f", and {_SLOTS} is of no use" if asked.asked else ""
        out.append(f"every expert fits in VRAM: offloading is not needed{slots}")
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
    needed = case.host(chosen, after_moves=True)
    if needed > case.machine.host_bytes:
        out.append(
            f"host RAM use may grow to {size(needed)} as residents change, because promoted experts keep their host pages, and "
            f"{size(case.machine.host_bytes)} are available: use fixed residents ({flag_name('resident_selection')} "
            "first_n or manual)"
        )
    return out


def _flags(case: Case, chosen: int) -> tuple[str, ...]:
    p, w = case.parallel, case.workload
    out = [f"--model-path {case.model.name}", f"--tp-size {p.tp}"]
    out += [f"--ep-size {p.ep}"] if p.ep > 1 else []
    out += [f"--pp-size {p.pp}"] if p.pp > 1 else []
    out += [f"--dp-size {p.dp}"] if p.dp > 1 else []
    out += ["--enable-dp-attention"] if p.dp_attention else []
    out += [f"--mem-fraction-static {case.fraction}", f"--chunked-prefill-size {case.defaults.chunked_prefill_size}"]
    out += [f"--context-length {w.context_length}", f"--max-running-requests {w.requests}"]
    out += [f"--max-total-tokens {w.max_total_tokens}"] if w.max_total_tokens is not None else []
    out += [f"--kv-cache-dtype {w.kv_cache_dtype}"] if w.kv_cache_dtype != "bfloat16" else []
    out += ["--speculative-algorithm NEXTN"] if w.speculative else []
    if chosen < case.model.num_experts:
        out += [f"{_N} {case.residents_of(chosen)}", f"{flag_name('headroom_gb')} {case.reserve.headroom_gb}"]
        out += [f"{_SLOTS} {case.slots_of(chosen)}"] if case.slots_of(chosen) else []
        out += [f"{_STREAM_GB} {case.reserve.stream_gb:g}"] if case.reserve.stream_gb is not None else []
    return tuple(out)


def _speeds(case: Case, chosen: int, hit_rate: float | None) -> tuple[Speed, ...]:
    """For one request and for all, at the given hit rate or at those of measured routing."""
    batches = sorted({1, case.workload.requests})
    if hit_rate is not None:
        return tuple(_speed(case, chosen, requests, "hit rate as given", hit_rate) for requests in batches)
    return tuple(
        dataclasses.replace(_speed(case, chosen, requests, name, found.rate), measured_on=found)
        for requests in batches
        for name, found in case.measured_hit_rates(chosen, requests).named().items()
    )


def _speed(case: Case, chosen: int, requests: int, name: str, hit_rate: float) -> Speed:
    stages = [case.cost(stage) for stage in range(case.parallel.pp)]
    return predict(
        *(name, hit_rate, case.residents_of(chosen), case.model.num_experts, case.model.top_k, stages, case.machine),
        *(case.workload, case.parallel, requests, case.defaults.chunked_prefill_size, case.assumed, case.stream(chosen)),
        slots=case.slots_of(chosen),
    )


def _hiding_chunk(case: Case, chosen: int) -> int:
    stages = [case.cost(stage) for stage in range(case.parallel.pp)]
    return hiding_chunk(
        *(chosen, case.model.num_experts, case.model.top_k, stages, case.machine, case.parallel, case.assumed),
        case.stream(chosen),
    )
