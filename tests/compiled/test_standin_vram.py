"""The stand-in's card has a size: what takes VRAM on a full one evicts managed blocks, as the driver does, or fails."""

from __future__ import annotations

import pytest
from standin.run import Standin

PREPARE = """
import ctypes
runtime, memory = ctypes.CDLL("libcuda.so.1"), CudaMemory()
def plain(blocks):
    address = ctypes.c_void_p()
    result = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(blocks * BLOCK))
    return address if result == 0 else None
def put(managed, block, place):
    memory.place(managed, [Span(block * BLOCK, BLOCK)], place)
a, b = (memory.allocate(3 * BLOCK, name) for name in "ab")
kept = [memory.tensor(each) for each in (a, b)]
memory.in_vram([(a, 0)])  # allocates what it compares with
for managed, block in ((a, 0), (b, 0), (a, 1), (b, 1)):
    put(managed, block, DEVICE)
put(a, 2, HOST)
put(b, 2, HOST)
full = plain(memory.info().device_free // BLOCK)
def free():
    return memory.info().device_free // BLOCK
def there():
    \"\"\"In VRAM, of blocks 0 and 1 of a and b: by the time of a read, which brings each back.\"\"\"
    return memory.in_vram([(a, 0), (b, 0), (a, BLOCK), (b, BLOCK)]).tolist()
"""
VRAM = 64 << 20


def run(standin: Standin, program: str) -> tuple[object, list[dict]]:
    ran = standin.run(PREPARE + program, vram=VRAM)
    return ran.said, ran.named("evict", "fault")


@pytest.mark.parametrize(("taken", "left"), [(1, [False, True, True, True]), (3, [False, False, False, True])])
def test_a_plain_allocation_evicts_what_was_populated_longest_ago_and_no_more(standin, taken, left):
    said, moved = run(
        standin,
        f"""
one = plain({taken})
before = free()
runtime.cudaFree(one)
print(json.dumps([before, there()]))
""",
    )
    assert said == [0, left]
    assert [call["call"] for call in moved] == ["evict", *["fault"] * taken]
    assert moved[0]["nbytes"] == taken << 21


def test_a_read_of_an_evicted_block_brings_it_back_and_takes_another_one(standin):
    said, moved = run(
        standin,
        """
one = plain(1)
print(json.dumps([memory.in_vram([(a, 0)]).tolist(), memory.in_vram([(a, 0)]).tolist(), free()]))
""",
    )
    assert said == [[False], [True], 0]
    assert [call["call"] for call in moved] == ["evict", "evict", "fault"]


def test_where_no_managed_block_is_left_all_fail_and_none_waits(standin):
    said, moved = run(
        standin,
        """
everything, more = plain(4), plain(1)
try:
    put(a, 2, DEVICE)
    refused = ""
except ManagedMemoryError as refusal:
    refused = str(refusal)
print(json.dumps([everything is not None, more is None, refused, memory.in_vram([(a, 0)]).tolist()]))
""",
    )
    everything, none, refused, found = said
    assert (everything, none, found) == (True, True, [False])
    assert "cudaMemPrefetchAsync to device failed on a" in refused
    assert "out of memory" in refused
    assert (moved[-1]["call"], moved[-1]["result"]) == ("fault", 2)
