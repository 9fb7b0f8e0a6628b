"""Checks the contract of ``Memory`` on any backend, one function per promise.

A check takes a fresh or used memory, leaves nothing allocated in it, and raises ``AssertionError`` if the promise is broken.
Ranges are as small as the promise allows.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Memory, Span

DEVICE, HOST = Location.DEVICE, Location.HOST
READS = 3
"""Attempts to find a block where it should be: a single read may be slow by chance."""


@contextmanager
def managed(memory: Memory, nbytes: int, name: str = "w13") -> Iterator[ManagedRange]:
    """A range that is freed at the end of the block."""
    it = memory.allocate(nbytes, name)
    try:
        yield it
    finally:
        memory.free(it)


def refuses(action: Callable[[], object], error: type[Exception] = ValueError) -> str:
    """The message of the ``error`` that ``action`` raises. Raises ``AssertionError`` if it raises none."""
    try:
        action()
    except error as refusal:
        return str(refusal)
    raise AssertionError(f"{action} was not refused")


def expect_location(memory: Memory, it: ManagedRange, spans: list[Span], location: Location) -> None:
    """Assert that one of ``READS`` measurements finds each block of ``spans`` at ``location``. A first measurement is
    discarded, because reading may move a block that prefers the other location. Fails if no measurement can tell."""
    blocks = [(it, at) for span in spans for at in range(span.offset, span.end, memory.block_bytes)]
    memory.in_vram(blocks)
    for _ in range(READS):
        there = memory.in_vram(blocks)
        if there is None:
            continue
        blocks = [each for each, in_vram in zip(blocks, there, strict=True) if in_vram != (location is DEVICE)]
        if not blocks:
            return
    raise AssertionError(f"{it.name}, placed at {location} in {spans}: not found there {[at for _, at in blocks]}")


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def check_a_range_is_aligned_and_as_long_as_asked(memory: Memory) -> None:
    for nbytes in (1, 4096, BLOCK_BYTES + 12345):
        with managed(memory, nbytes, "w2") as it:
            assert it.address % BLOCK_BYTES == 0
            assert (it.nbytes, it.name) == (nbytes, "w2")


def check_no_two_ranges_share_a_block(memory: Memory) -> None:
    with managed(memory, 1) as a, managed(memory, BLOCK_BYTES + 1) as b, managed(memory, 1) as c:
        blocks = [{*range(it.address // BLOCK_BYTES, -(-(it.address + it.nbytes) // BLOCK_BYTES))} for it in (a, b, c)]
        assert sum(map(len, blocks)) == len(set.union(*blocks))


def check_an_empty_range_is_refused(memory: Memory) -> None:
    assert "w13" in refuses(lambda: memory.allocate(0, "w13"))
    refuses(lambda: memory.allocate(-1, "w13"))


def check_a_tensor_is_the_memory_itself(memory: Memory) -> None:
    block = memory.block_bytes
    it = memory.allocate(block + 100, "w13")
    first, second = memory.tensor(it), memory.tensor(it)
    assert (first.dtype, first.shape, first.stride()) == (torch.uint8, (block + 100,), (1,))
    assert first.data_ptr() == second.data_ptr() == it.address
    first.copy_(pattern(block + 100, 1))
    assert torch.equal(second.cpu(), pattern(block + 100, 1))


def check_the_last_tensor_frees_the_range(memory: Memory) -> None:
    block = memory.block_bytes
    it = memory.allocate(block, "w13")
    view = memory.tensor(it)[10:20].view(2, 5)
    other = memory.tensor(it)
    del other
    gc.collect()
    view.copy_(torch.arange(10, dtype=torch.uint8).view(2, 5))
    assert view.cpu().tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    memory.place(it, [Span(0, block)], HOST)
    assert memory.holds(it)
    del view
    gc.collect()
    assert not memory.holds(it)
    refuses(lambda: memory.free(it))


def check_a_tensor_stays_valid_after_free(memory: Memory) -> None:
    block = memory.block_bytes
    it = memory.allocate(block, "w13")
    tensor = memory.tensor(it)
    tensor.copy_(pattern(block, 2))
    memory.free(it)
    assert torch.equal(tensor.cpu(), pattern(block, 2))


def check_a_freed_range_is_refused_everywhere(memory: Memory) -> None:
    block = memory.block_bytes
    it = memory.allocate(block, "w2_scale")
    memory.free(it)
    span = Span(0, block)
    for action in (
        lambda: memory.free(it),
        lambda: memory.tensor(it),
        lambda: memory.place(it, [span], HOST),
        lambda: memory.populate(it, [span]),
        lambda: memory.in_vram([(it, 0)]),
    ):
        assert "w2_scale" in refuses(action)


def check_a_range_of_another_hand_is_refused(memory: Memory) -> None:
    block = memory.block_bytes
    with managed(memory, block) as it:
        forged = ManagedRange(it.address, it.nbytes, it.name)
        assert not memory.holds(forged)
        refuses(lambda: memory.tensor(forged))
        refuses(lambda: memory.free(forged))


def check_bad_spans_are_refused_before_anything_happens(memory: Memory) -> None:
    block = memory.block_bytes
    nbytes = 4 * block + 100
    bad = [Span(-block, block), Span(0, 0), Span(block, -block), Span(1, block), Span(0, block + 1), Span(4 * block, block)]
    bad += [Span(8 * block, block), Span(4 * block, 99)]
    with managed(memory, nbytes) as it:
        memory.place(it, [Span(0, nbytes)], HOST)
        for span in bad:
            refuses(lambda span=span: memory.place(it, [Span(0, block), span], DEVICE))
            refuses(lambda span=span: memory.populate(it, [Span(0, block), span]))
        expect_location(memory, it, [Span(0, nbytes)], HOST)


def check_a_span_may_end_with_the_range(memory: Memory) -> None:
    block = memory.block_bytes
    with managed(memory, block + 100) as it:
        before, tail = Span(0, block), Span(block, 100)
        memory.place(it, [before], HOST)
        memory.place(it, [tail], DEVICE)
        expect_location(memory, it, [tail], DEVICE)
        expect_location(memory, it, [before], HOST)


def check_no_spans_is_no_work(memory: Memory) -> None:
    block = memory.block_bytes
    with managed(memory, block) as it:
        memory.place(it, [Span(0, block)], HOST)
        memory.place(it, [], DEVICE)
        expect_location(memory, it, [Span(0, block)], HOST)


def check_spans_are_placed_by_block(memory: Memory) -> None:
    block = memory.block_bytes
    with managed(memory, 4 * block) as it:
        whole = Span(0, 4 * block)
        memory.place(it, [whole], HOST)
        expect_location(memory, it, [whole], HOST)
        memory.place(it, [Span(0, block), Span(2 * block, block)], DEVICE)
        for i, location in enumerate((DEVICE, HOST, DEVICE, HOST)):
            expect_location(memory, it, [Span(i * block, block)], location)


def check_reads_tell_which_blocks_are_in_vram(memory: Memory) -> None:
    block = memory.block_bytes
    with managed(memory, 6 * block - 100) as a, managed(memory, 2 * block) as b:
        assert memory.in_vram([]) is not None
        memory.place(a, [Span(0, 6 * block - 100)], HOST)
        memory.place(b, [Span(0, 2 * block)], DEVICE)
        memory.place(a, [Span(block, 2 * block), Span(5 * block, block - 100)], DEVICE)
        blocks = [(b, block), *((a, i * block) for i in range(6)), (b, 0)]
        for _ in range(2):  # reading moves no block
            found = memory.in_vram(blocks)
            assert found is not None
            assert found.tolist() == [True, False, True, True, False, False, True, True]
        for offset in (-block, 1, 6 * block):
            assert "w13" in refuses(lambda offset=offset: memory.in_vram([(b, 0), (a, offset)]))


def check_two_ranges_do_not_influence_each_other(memory: Memory) -> None:
    block = memory.block_bytes
    with managed(memory, block) as a, managed(memory, block) as b:
        memory.place(b, [Span(0, block)], HOST)
        memory.place(a, [Span(0, block)], DEVICE)
        expect_location(memory, b, [Span(0, block)], HOST)


def check_a_placed_range_is_zeroed(memory: Memory) -> None:
    block = memory.block_bytes
    for location in Location:
        it = memory.allocate(2 * block, "w13")
        memory.place(it, [Span(0, 2 * block)], location)
        assert not memory.tensor(it).cpu().any()


def check_a_range_keeps_what_is_written_while_it_is_populated(memory: Memory) -> None:
    """Writes from the end to the beginning, so that some blocks are written before they are populated and some after."""
    block = memory.block_bytes
    nbytes = 48 * block - 100
    it = memory.allocate(nbytes, "w13")
    tensor, expected = memory.tensor(it), torch.zeros(nbytes, dtype=torch.uint8)
    with memory.loading():
        memory.populate(it, [Span(0, 9 * block), Span(9 * block, nbytes - 9 * block)])
        for at in range(47 * block, -1, -2 * block):
            written = pattern(min(block, nbytes - at), at)
            expected[at : at + block] = written
            tensor[at : at + block].copy_(written)
    expect_location(memory, it, [Span(0, nbytes)], HOST)
    assert torch.equal(tensor.cpu(), expected)


def check_a_range_may_be_freed_while_it_is_populated(memory: Memory) -> None:
    block = memory.block_bytes
    with memory.loading():
        ranges = [memory.allocate(24 * block, name) for name in ("w13", "w2")]
        tensors = [memory.tensor(it) for it in ranges]
        for it in ranges:
            memory.populate(it, [Span(0, 24 * block)])
        del tensors
    gc.collect()
    assert not any(memory.holds(it) for it in ranges)


def check_bytes_and_addresses_survive_any_moves(memory: Memory) -> None:
    """Places random resident sets of experts whose sizes are no multiple of a block, so that neighbours share blocks."""
    block = memory.block_bytes
    shapes = [(7, block), (5, 3 * block // 2 + 4096), (12, block // 2 + 512), (3, 2 * block)]
    for seed, (experts, expert_bytes) in enumerate(shapes):
        rng = np.random.default_rng(seed)
        layout = ExpertLayout(experts, expert_bytes, block)
        it = memory.allocate(layout.nbytes, f"w13 of {experts} experts")
        address = it.address
        tensor = memory.tensor(it)
        tensor.copy_(pattern(layout.nbytes, seed))
        for _ in range(12):
            extents = rng.random(layout.num_extents) < rng.random()
            for spans, location in ((layout.spans(extents), DEVICE), (layout.spans(~extents), HOST)):
                memory.place(it, spans, location)
                expect_location(memory, it, spans, location)
            assert tensor.data_ptr() == it.address == address
            assert torch.equal(tensor.cpu(), pattern(layout.nbytes, seed))
            if rng.random() < 0.5:
                seed += 1000
                tensor.copy_(pattern(layout.nbytes, seed))


def check_a_part_is_the_memory_of_its_allocation_in_a_storage_of_its_own(memory: Memory) -> None:
    """A part may begin anywhere; only to be placed must it begin with a block."""
    block = memory.block_bytes
    it = memory.allocate(4 * block, "pool")
    whole = memory.tensor(it)
    whole.copy_(pattern(4 * block, 3))
    for span in (Span(0, 4 * block), Span(block, 100), Span(3 * block - 10, block + 10)):
        part = memory.part(it, span, "w13 of a layer")
        tensor, other = memory.tensor(part), memory.tensor(part)
        assert (part.address, part.nbytes, part.name) == (it.address + span.offset, span.nbytes, "w13 of a layer")
        assert tensor.data_ptr() == tensor.untyped_storage().data_ptr() == other.data_ptr() == part.address
        assert tensor.shape == (span.nbytes,)
        assert tensor.untyped_storage().nbytes() == span.nbytes
        assert torch.equal(tensor.cpu(), pattern(4 * block, 3)[span.offset : span.end])
        tensor.copy_(pattern(span.nbytes, 4))
        assert torch.equal(whole[span.offset : span.end].cpu(), pattern(span.nbytes, 4))
        whole.copy_(pattern(4 * block, 3))
        del tensor, other


def check_a_part_outside_its_allocation_is_refused(memory: Memory) -> None:
    block = memory.block_bytes
    with managed(memory, 2 * block + 100, "pool") as it:
        for span in (Span(-block, block), Span(0, 0), Span(block, -1), Span(block, block + 101), Span(3 * block, 1)):
            assert "pool" in refuses(lambda span=span: memory.part(it, span, "w13"))
    assert "pool" in refuses(lambda: memory.part(it, Span(0, block), "w13"))


def check_a_part_goes_with_its_last_tensor_and_its_allocation_stays(memory: Memory) -> None:
    block = memory.block_bytes
    it = memory.allocate(2 * block, "pool")
    kept = memory.tensor(it)
    for _ in range(2):  # the same bytes may be a part again
        part = memory.part(it, Span(block, block), "w13")
        view = memory.tensor(part)[10:20]
        gc.collect()
        assert memory.holds(part)
        view.copy_(pattern(10, 3))
        del view
        gc.collect()
        assert not memory.holds(part)
        assert memory.holds(it)
        refuses(lambda part=part: memory.tensor(part))
        assert torch.equal(kept[block + 10 : block + 20].cpu(), pattern(10, 3))


def check_parts_of_the_same_bytes_live_apart(memory: Memory) -> None:
    block = memory.block_bytes
    it = memory.allocate(2 * block, "pool")
    first, second = (memory.part(it, Span(0, block), name) for name in ("w13", "w2"))
    one, other = memory.tensor(first), memory.tensor(second)
    one.copy_(pattern(block, 5))
    del one
    gc.collect()
    assert (memory.holds(first), memory.holds(second), memory.holds(it)) == (False, True, True)
    assert torch.equal(other.cpu(), pattern(block, 5))
    memory.free(second)
    assert memory.holds(it)
    assert torch.equal(other.cpu(), pattern(block, 5))


def check_an_allocation_lives_as_long_as_any_tensor_over_it_or_a_part(memory: Memory) -> None:
    block = memory.block_bytes
    for order in itertools.permutations(("whole", "first", "second")):
        it = memory.allocate(3 * block, "pool")
        ranges = {
            "whole": it,
            "first": memory.part(it, Span(0, block), "first"),
            "second": memory.part(it, Span(block, block), "second"),
        }
        tensors = {name: memory.tensor(ranges[name]) for name in reversed(order)}
        for name in ("first", "second"):
            tensors[name].copy_(pattern(block, len(name)))
        for index, name in enumerate(order):
            del tensors[name]
            gc.collect()
            assert memory.holds(it) == bool(tensors), (order, name)
            assert not memory.holds(ranges[name]) or name == "whole"
            for left in order[index + 1 :]:
                assert memory.holds(ranges[left]), (order, name, left)
                if left != "whole":
                    assert torch.equal(tensors[left].cpu(), pattern(block, len(left))), (order, name, left)


def check_a_part_alone_keeps_its_allocation(memory: Memory) -> None:
    """Also if no tensor was ever made over the whole allocation."""
    block = memory.block_bytes
    it = memory.allocate(2 * block, "pool")
    part, silent = memory.part(it, Span(block, block), "w13"), memory.part(it, Span(0, block), "w2")
    tensor = memory.tensor(part)
    gc.collect()
    assert memory.holds(it)
    tensor.copy_(pattern(block, 4))
    assert torch.equal(memory.tensor(it)[block:].cpu(), pattern(block, 4))
    assert memory.holds(it)
    del tensor
    gc.collect()
    assert not any(memory.holds(each) for each in (it, part, silent))


def check_parts_go_with_their_allocation_and_their_tensors_stay_valid(memory: Memory) -> None:
    block = memory.block_bytes
    it = memory.allocate(2 * block, "pool")
    part, silent = memory.part(it, Span(block, block), "w13"), memory.part(it, Span(0, block), "w13")
    tensor = memory.tensor(part)
    tensor.copy_(pattern(block, 5))
    memory.free(it)
    for each in (part, silent):
        assert not memory.holds(each)
        for action in (
            lambda each=each: memory.free(each),
            lambda each=each: memory.tensor(each),
            lambda each=each: memory.place(each, [Span(0, block)], HOST),
        ):
            assert "w13" in refuses(action)
    others = [memory.allocate(2 * block, "another") for _ in range(3)]
    assert all(it.address + 2 * block <= other.address or other.address + other.nbytes <= it.address for other in others)
    for other in others:
        memory.free(other)
    assert torch.equal(tensor.cpu(), pattern(block, 5))


def check_a_part_is_placed_and_found_like_a_range(memory: Memory) -> None:
    """A part that ends within a block is placed with the rest of that block."""
    block = memory.block_bytes
    it = memory.allocate(6 * block, "pool")
    memory.place(it, [Span(0, 6 * block)], HOST)
    part = memory.part(it, Span(2 * block, 2 * block - 100), "w13")
    refuses(lambda: memory.place(part, [Span(0, block), Span(block, block)], DEVICE))
    memory.place(part, [Span(block, block - 100)], DEVICE)
    for index, location in enumerate((HOST, HOST, HOST, DEVICE, HOST, HOST)):
        expect_location(memory, it, [Span(index * block, block)], location)
    expect_location(memory, part, [Span(0, block)], HOST)
    expect_location(memory, part, [Span(block, block - 100)], DEVICE)
    tensor = memory.tensor(part)
    tensor.copy_(pattern(2 * block - 100, 6))
    memory.place(part, [Span(0, 2 * block - 100)], DEVICE)
    with memory.loading():
        memory.populate(memory.part(it, Span(0, 2 * block), "w2"), [Span(0, 2 * block)])
        memory.wait_until_populated(it.address)
    memory.place(part, [Span(0, 2 * block - 100)], HOST)
    expect_location(memory, it, [Span(0, 6 * block)], HOST)
    assert torch.equal(tensor.cpu(), pattern(2 * block - 100, 6))


def check_info_is_plausible(memory: Memory) -> None:
    info = memory.info()
    assert 0 <= info.device_free <= info.device_total
    assert info.device_total > 0
    assert info.host_available > 0


def check_the_name_is_a_flag_value(memory: Memory) -> None:
    assert memory.name in ("uvm", "emulated")


CHECKS: list[Callable[[Memory], None]] = [value for name, value in list(globals().items()) if name.startswith("check_")]
