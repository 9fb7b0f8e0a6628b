"""Changes that make a model fit."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.plan.lookup_tables import VRAM, offloaded_by, other_place
from sglang_uvm_offload.plan.machine import GIB
from sglang_uvm_offload.plan.ranks import rank_flags, shape_problems

VRAM_STEP_GIB = 8
"""The step of the search for a large enough GPU."""
MORE_RANKS = (2, 4, 8, 16, 32)
_PLENTY_GIB = 1 << 32

_STREAM_GB = flag_name("stream_buffer_gb")


def remedies(case: Case) -> list[str]:
    """Changes that are each enough alone. The planner has tried each one."""
    return [text for text, changed in _changes(case) if changed.fits]


def _changes(case: Case) -> Iterator[tuple[str, Case]]:
    """Each possible change, in words, with the changed case."""
    if case.reserve.stream_gb:
        none = dataclasses.replace(case.reserve, stream_gb=0)
        yield f"no stream buffers ({_STREAM_GB} 0)", dataclasses.replace(case, reserve=none)
    if case.tables_in == VRAM and (place := other_place(case.model.tables)) != VRAM:
        yield f"lookup tables in host RAM ({offloaded_by(case.model.tables)})", dataclasses.replace(case, tables_in=place)
    if host := _host_gib(case):
        yield f"host RAM of {host} GiB", _with_host(case, host)
    yield from _larger_gpus(case)
    yield from _more_gpus(case)


def _larger_gpus(case: Case) -> Iterator[tuple[str, Case]]:
    """The same number of larger GPUs, of kinds that exist."""
    sizes = sorted((gpu.memory_mib >> 10, kind) for kind, gpu in GPUS.items() if not gpu.one_memory)
    steps = range(case.machine.vram_bytes // GIB // VRAM_STEP_GIB * VRAM_STEP_GIB, sizes[-1][0] + 1, VRAM_STEP_GIB)
    for vram in steps[1:]:
        if (larger := _with_vram(case, vram)).fits:
            names = [kind for gib, kind in sizes if gib >= vram][:2]
            yield f"GPUs of {vram} GiB each ({' or '.join(names)}), with the available host RAM", larger
            return


def _more_gpus(case: Case) -> Iterator[tuple[str, Case]]:
    """More GPUs of the same kind, with the host RAM that they need."""
    for tp in (tp for tp in MORE_RANKS if tp > case.parallel.tp):
        for ep in dict.fromkeys((1 if case.parallel.ep == 1 else tp, tp)):
            parallel = dataclasses.replace(case.parallel, tp=tp, ep=ep)
            machine = dataclasses.replace(case.machine, gpus=parallel.ranks)
            wider = dataclasses.replace(case, parallel=parallel, machine=machine)
            if not shape_problems(wider) and (host := _host_gib(wider)):
                gpus = f"{parallel.ranks} GPUs of {machine.vram_bytes / GIB:.0f} GiB, as now"
                yield f"{gpus}, with {rank_flags(parallel)} and {host} GiB of host RAM", _with_host(wider, host)
                return


def _host_gib(case: Case) -> int:
    """The least host RAM that is enough, in GiB; 0 if no amount is."""
    plenty = _with_host(case, _PLENTY_GIB)
    if not plenty.fits:
        return 0
    enough = range(-(-plenty.host_need(plenty.division).total // GIB) + 1)
    return bisect_left(enough, True, key=lambda gib: _with_host(case, gib).fits)


def _with_host(case: Case, gib: int) -> Case:
    return dataclasses.replace(case, machine=dataclasses.replace(case.machine, host_bytes=gib * GIB))


def _with_vram(case: Case, gib_each: int) -> Case:
    """The same case on GPUs of ``gib_each`` GiB. Other processes use as much VRAM as before."""
    bigger = dataclasses.replace(case.machine, vram_bytes=gib_each * GIB)
    free = case.reserve.free_vram_bytes
    free = None if free is None else free + bigger.vram_bytes - case.machine.vram_bytes
    return dataclasses.replace(case, machine=bigger, reserve=dataclasses.replace(case.reserve, free_vram_bytes=free))
