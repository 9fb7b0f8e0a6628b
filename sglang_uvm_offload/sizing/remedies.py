"""What a machine is short of for a model, and which single changes would be enough."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.sizing.gpus import GPUS
from sglang_uvm_offload.sizing.lookup_tables import VRAM, offloaded_by, other_place
from sglang_uvm_offload.sizing.machine import GIB
from sglang_uvm_offload.sizing.plan import RankMemory
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.ranks import rank_flags, shape_problems
from sglang_uvm_offload.units import size

VRAM_STEP_GIB = 8
"""The step of the search for a large enough GPU."""
LEAST_TOKENS = 512
"""A smaller KV cache is not worth naming."""
MORE_RANKS = (2, 4, 8, 16, 32)

_STREAM_GB = flag_name("stream_buffer_gb")


def shortages(case: Case) -> list[str]:
    """Which memories are short, and what uses them."""
    out, most = [], case.most_in_vram()
    worst = tightest(case, 0)
    if not case.budget:
        out.append(_nothing_granted(case))
    elif worst.spare_bytes < 0:
        weights = f"{size(worst.plain_weights)} of weights beside experts{_with_tables(worst)}"
        out.append(
            f"VRAM: with no expert resident{_with_buffers(worst)} a rank needs {size(worst.used_bytes)} ({weights}, "
            f"{size(worst.kv_bytes)} of KV cache for {case.kv_tokens} tokens), and "
            f"its budget is {size(case.budget)} of {size(case.machine.vram_bytes)}"
        )
    if not case.in_host(most or 0):
        out.append(_host_shortage(case, most or 0, "" if most is None else ", the most that VRAM holds,"))
    return out


def refusals(case: Case, rows: int, most: int) -> list[str]:
    """Why a machine whose VRAM holds ``most`` rows does not hold ``rows``, or its host RAM not the other experts."""
    out, slots = [], case.slots_of(rows)
    if not case.in_vram(rows):
        what = f"{rows - slots} residents and {slots} slots for the {case.model.num_experts} experts of a layer"
        what = what if slots else f"{rows} of {case.model.num_experts} experts a layer"
        buffers = _with_buffers(tightest(case, rows))
        out.append(f"VRAM: {what} do not fit{buffers}; at most {most} do" + (" together" if slots else ""))
    held = min(rows, most)
    if not case.in_host(held):
        short = _host_shortage(case, held, "")
        out.append(f"{short}; {_least_for_host(case)} residents or more would do" if case.in_host(most) else short)
    return out


def remedies(case: Case) -> list[str]:
    """Changes that are each enough alone: the planner tried each."""
    return [text for text, changed in _changes(case) if _fits(changed)]


def tightest(case: Case, rows: int) -> RankMemory:
    """The rank with least to spare."""
    return min((case.rank(stage, rows) for stage in range(case.parallel.pp)), key=lambda rank: rank.spare_bytes)


def _host_shortage(case: Case, rows: int, which: str) -> str:
    need = case.host_need(rows)
    cache = need.cache + need.beside_cache
    cached = f" ({size(cache)} of it for the hierarchical cache and what SGLang keeps free besides)" if cache else ""
    cached += f" ({size(need.tables)} of it for lookup tables)" if need.tables else ""
    slots = f" and {case.slots_of(rows)} slots" if case.slots_of(rows) else ""
    resident = f"{case.residents_of(rows)} of {case.model.num_experts} experts a layer resident{slots}{which}"
    return (
        f"host RAM: with {resident if rows else 'no expert resident'} "
        f"{size(need.total)} are needed{cached}, and {_host_room(case, rows)}"
    )


def _host_room(case: Case, rows: int) -> str:
    room = size(max(0, case.host_room(rows)))
    if not case.machine.one_memory:
        return f"{room} are available"
    taken, pool = size(case.gpus_take(rows)), size(case.machine.pool_bytes)
    return f"{room} are left after {taken} for the GPU, which has the same memory ({pool} are available to both)"


def _least_for_host(case: Case) -> int:
    """The fewest residents with which host RAM holds the other experts; more take less of it."""
    rows = bisect_left(range(case.model.num_experts), True, key=case.in_host)
    return case.residents_of(rows)


def _with_buffers(rank: RankMemory) -> str:
    return f" with {size(rank.stream_bytes)} of stream buffers" if rank.stream_buffers else ""


def _with_tables(rank: RankMemory) -> str:
    return f", {size(rank.table_bytes)} of lookup tables" if rank.table_bytes else ""


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
    return f"VRAM: a GPU of {size(vram)} is too small: nothing is left for weights after {', '.join(taken)}"


def _changes(case: Case) -> Iterator[tuple[str, Case]]:
    """What could be changed, in words, and the changed case."""
    most = case.most_in_vram()
    if case.reserve.stream_gb:
        none = dataclasses.replace(case.reserve, stream_gb=0)
        yield f"no stream buffers ({_STREAM_GB} 0)", dataclasses.replace(case, reserve=none)
    if case.tables_in == VRAM and (place := other_place(case.model.tables)) != VRAM:
        yield f"lookup tables in host RAM ({offloaded_by(case.model.tables)})", dataclasses.replace(case, tables_in=place)
    host = _whole_gib(case.host(most or 0, after_moves=False))
    if most is not None:
        yield f"host RAM of {host} GiB", _with_host(case, host)
    elif (tokens := _tokens_that_fit(case)) >= LEAST_TOKENS:
        yield (
            f"a KV cache of at most {tokens} tokens a rank (--max-total-tokens {tokens}, fewer requests or a shorter "
            f"--context-length), and {host} GiB of host RAM",
            _with_host(dataclasses.replace(case, workload=dataclasses.replace(case.workload, max_total_tokens=tokens)), host),
        )
    if (larger := _larger_gpus(case)) is not None:
        yield larger
    if (wider := _more_gpus(case)) is not None:
        yield wider


def _larger_gpus(case: Case) -> tuple[str, Case] | None:
    """The same number of GPUs that exist."""
    sizes = sorted((gpu.memory_mib >> 10, kind) for kind, gpu in GPUS.items() if not gpu.one_memory)
    steps = range(case.machine.vram_bytes // GIB // VRAM_STEP_GIB * VRAM_STEP_GIB, sizes[-1][0] + 1, VRAM_STEP_GIB)
    vram = next((each for each in steps[1:] if _fits(_with_vram(case, each))), None)
    if vram is None:
        return None
    names = [kind for gib, kind in sizes if gib >= vram][:2]
    return f"GPUs of {vram} GiB each ({' or '.join(names)}), with the available host RAM", _with_vram(case, vram)


def _more_gpus(case: Case) -> tuple[str, Case] | None:
    """More GPUs of the same kind, with as much host RAM as they then need."""
    for tp in (tp for tp in MORE_RANKS if tp > case.parallel.tp):
        for ep in dict.fromkeys((1 if case.parallel.ep == 1 else tp, tp)):
            parallel = dataclasses.replace(case.parallel, tp=tp, ep=ep)
            plenty = dataclasses.replace(case.machine, gpus=parallel.ranks, host_bytes=1 << 62)
            wider = dataclasses.replace(case, parallel=parallel, machine=plenty)
            chosen = None if shape_problems(wider) else wider.largest()
            if chosen is not None:
                host = _whole_gib(wider.host(chosen, after_moves=False))
                text = f"{parallel.ranks} such GPUs with {rank_flags(parallel)}, and {host} GiB of host RAM"
                return text, _with_host(wider, host)
    return None


def _fits(case: Case) -> bool:
    return not shape_problems(case) and case.largest() is not None


def _whole_gib(nbytes: int) -> int:
    """Rounded up, so that what is printed is enough."""
    return -(-nbytes // GIB)


def _tokens_that_fit(case: Case) -> int:
    """Of the KV cache, without any resident; fewer than the workload needs."""
    short = [case.rank(stage, 0).used_bytes - case.budget for stage in range(case.parallel.pp)]
    return max(0, case.kv_tokens - max(math.ceil(each / case.kv_token_bytes(s)) for s, each in enumerate(short)))


def _with_host(case: Case, gib: int) -> Case:
    return dataclasses.replace(case, machine=dataclasses.replace(case.machine, host_bytes=gib * GIB))


def _with_vram(case: Case, gib_each: int) -> Case:
    """The same case on GPUs of ``gib_each`` GiB, with as much VRAM in use by others."""
    bigger = dataclasses.replace(case.machine, vram_bytes=gib_each * GIB)
    free = case.reserve.free_vram_bytes
    free = None if free is None else free + bigger.vram_bytes - case.machine.vram_bytes
    return dataclasses.replace(case, machine=bigger, reserve=dataclasses.replace(case.reserve, free_vram_bytes=free))
