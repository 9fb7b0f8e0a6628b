"""The part that makes the driver evict residents, and checks whether the plugin notices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.environment import computes
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.timing import Beside
from sglang_uvm_offload import residency
from sglang_uvm_offload.cuda import read_times
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.residency.evictions import Evictions

MIB, GIB = 1 << 20, 1 << 30
QUANTILES = (0, 5, 50, 95, 100)


def noticing(rows: Rows) -> None:
    """Grows plain allocations until a check finds evicted residents, or until they exceed free VRAM by half of the residents'
    bytes. Then frees them; a read of all residents should bring the evicted ones back."""
    memory = CudaMemory()
    tensor = ExpertTensor.allocated(memory, "experts", ExpertLayout(128, rows.pick(8 * MIB, BLOCK_BYTES)))
    tensor.place(np.ones(tensor.layout.num_extents, dtype=bool))
    words = tensor.bytes().view(torch.int64).random_()
    checksum = int(words.sum())
    layer = cast(ExpertLayer, SimpleNamespace(tensors=[tensor], resident_bytes=tensor.resident_bytes))
    evictions = Evictions(memory, 0.0)
    residency.evictions.ROOM_BYTES = 1 << 60  # check with free VRAM too

    def put(figure: str, *mib: float) -> None:
        rows.put("noticing", "MiB", mib, figure=figure)

    def look() -> int:
        evictions.check([layer])
        if evictions.evicted_bytes is None:
            raise AssertionError("the check cannot tell whether residents were evicted")
        return evictions.evicted_bytes

    def looks(count: int) -> list[float]:
        """Returns the MiB that each of ``count`` checks finds evicted. A read of all residents precedes each, as in steps."""
        found = []
        for _ in range(count):
            words.sum()
            torch.cuda.synchronize()
            found.append(look() / MIB)
        return found

    looks(2)
    put("noticed with room", *looks(20))
    put("noticed with room, beside reads that fill the link", *beside_a_full_link(rows, memory, look))
    plain: list[Any] = []

    def take(nbytes: int) -> bool:
        try:
            plain.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            return False
        return True

    for _ in range(memory.info().device_free // GIB - 4):
        if rows.late() or not take(GIB):
            break
    start, most = memory.info().device_free, tensor.layout.nbytes // 2
    taken = evicted = 0
    while not evicted and taken < start + most and not rows.late():
        if not take(64 * MIB):
            break
        taken += 64 * MIB
        evicted = look()
    put("plain bytes beyond what was free", max(0, taken - start) / MIB)
    put("noticed under pressure", evicted / MIB, *looks(5))
    same = [int(words.sum()) == checksum]
    plain.clear()
    torch.cuda.empty_cache()
    same += [int(words.sum()) == checksum for _ in range(2)]
    put("noticed once the pressure was gone and all were read", *looks(5))
    if not all(same) and computes():
        raise AssertionError("bytes changed under pressure")


def beside_a_full_link(rows: Rows, memory: CudaMemory, look: Callable[[], int]) -> list[float]:
    """Returns the MiB that checks report as evicted while another stream reads host RAM in place, as decode steps do. Rows
    record which checks were conclusive, and the cycles of their reads."""
    offloaded = ExpertTensor.allocated(memory, "offloaded", ExpertLayout(64, rows.pick(8 * MIB, BLOCK_BYTES)))
    offloaded.place(np.zeros(offloaded.layout.num_extents, dtype=bool))
    words = offloaded.bytes().view(torch.int64)
    words.zero_()
    beside, side = Beside(partial(torch.sum, words)), torch.cuda.Stream()
    beside.last(200)
    found, timed = [], []
    conclusive, told_apart = [], read_times.told_apart

    def keep(first: np.ndarray, later: np.ndarray, near: np.ndarray, far: np.ndarray) -> np.ndarray | None:
        timed.append({"first": first, "later": later, "in VRAM": near, "over the link": far})
        answer = told_apart(first, later, near, far)
        conclusive.append(answer is not None)
        return answer

    read_times.told_apart = keep
    try:
        for _ in range(rows.pick(10, 2)):
            with torch.cuda.stream(side):
                beside.run()
            found.append(look() / MIB)
            side.synchronize()
    finally:
        read_times.told_apart = told_apart
    rows.put("looks_beside", "bool", conclusive, figure="could tell")
    for read in timed[0]:
        cycles = np.concatenate([each[read] for each in timed])
        rows.put("look_beside", "cycles", np.percentile(cycles, QUANTILES), read=read, quantiles="0, 5, 50, 95, 100 %")
    return found


PARTS = {noticing.__name__: noticing}

if __name__ == "__main__":
    run_part(PARTS)
