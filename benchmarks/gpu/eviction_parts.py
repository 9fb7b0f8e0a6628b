"""The part that lets the driver evict residents, and asks whether the plugin notices."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.environment import computes
from benchmarks.gpu.rows import Rows, run_part
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.residency.evictions import Evictions

MIB, GIB = 1 << 20, 1 << 30


def noticing(rows: Rows) -> None:
    """Plain allocations grow until a look finds residents evicted, or until they have taken half of the residents' bytes beyond
    what was free. Then the pressure goes, and a read of all residents should bring them back."""
    memory = CudaMemory()
    tensor = ExpertTensor(memory, "experts", ExpertLayout(128, rows.pick(8 * MIB, BLOCK_BYTES)))
    tensor.place(np.ones(tensor.layout.num_extents, dtype=bool))
    words = tensor.bytes().view(torch.int64).random_()
    checksum = int(words.sum())
    layer = cast(ExpertLayer, SimpleNamespace(tensors=[tensor], resident_bytes=tensor.resident_bytes))
    evictions = Evictions(memory, 0.0)

    def put(figure: str, unit: str, *values: float) -> None:
        rows.put("noticing", unit, values, figure=figure)

    def look() -> int:
        evictions.check([layer])
        if evictions.evicted_bytes is None:
            raise AssertionError("whether residents were evicted cannot be told")
        return evictions.evicted_bytes

    def looks(count: int) -> tuple[list[float], list[float]]:
        """MiB evicted, and milliseconds, of looks between reads of all residents, as steps make them."""
        found, took = [], []
        for _ in range(count):
            words.sum()
            torch.cuda.synchronize()
            started = time.perf_counter()
            found.append(look() / MIB)
            took.append((time.perf_counter() - started) * 1e3)
        return found, took

    looks(2)
    found, took = looks(20)
    put("noticed with room", "MiB", *found)
    put("one look with room", "ms", *took)
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
        free = memory.info().device_free
        if not take(64 * MIB):
            put("free VRAM when a plain allocation failed", "MiB", free / MIB)
            break
        taken += 64 * MIB
        evicted = look()
    put("free VRAM before the last allocation", "MiB", free / MIB)
    put("plain bytes beyond what was free", "MiB", max(0, taken - start) / MIB)
    found, took = looks(5)
    put("noticed under pressure", "MiB", evicted / MIB, *found)
    put("one look under pressure", "ms", *took)
    same = [int(words.sum()) == checksum]
    plain.clear()
    torch.cuda.empty_cache()
    same += [int(words.sum()) == checksum for _ in range(2)]
    put("noticed once the pressure was gone and all were read", "MiB", *looks(5)[0])
    put("the bytes stayed", "bool", *same)
    if not all(same) and computes():
        raise AssertionError("bytes changed under pressure")


PARTS = {noticing.__name__: noticing}

if __name__ == "__main__":
    run_part(PARTS)
