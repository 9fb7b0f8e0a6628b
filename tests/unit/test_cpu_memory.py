"""Emulated memory, and the driver simulated over it: locations, accounting, eviction and refusals are the driver's."""

import contextlib
import gc
import weakref

import pytest
from simulated_driver import SimulatedDriver

from scripts.harness import memory_contract
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, Span

MIB = 1 << 20


def whole(managed):
    return [Span(0, managed.nbytes)]


def resident(memory, nbytes, name):
    managed = memory.allocate(nbytes, name)
    memory.place(managed, whole(managed), Location.DEVICE)
    return managed


@pytest.mark.slow
@pytest.mark.parametrize("make", [EmulatedMemory, SimulatedDriver])
@pytest.mark.parametrize("check", memory_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check, make):
    check(make())


def test_a_page_written_before_it_was_placed_is_populated_on_the_host_and_keeps_its_host_room():
    memory = SimulatedDriver()
    managed = memory.allocate(2 * MIB, "w13")
    tensor = memory.tensor(managed)
    tensor[:PAGE_BYTES] = 1
    assert memory.location(managed, Span(0, PAGE_BYTES)) is Location.HOST
    assert memory.location(managed, Span(PAGE_BYTES, PAGE_BYTES)) is None
    memory.place(managed, [Span(0, 2 * PAGE_BYTES)], Location.DEVICE)
    assert memory.host_used == PAGE_BYTES, "the driver frees no host chunk when its page migrates"
    assert memory.device_used == 2 * PAGE_BYTES
    assert memory.traffic.to_device_bytes == PAGE_BYTES, "an unpopulated page is populated in place, nothing crosses the link"


def test_a_tensor_of_each_step_leaves_nothing_behind():
    memory = EmulatedMemory()
    managed = memory.allocate(PAGE_BYTES, "w13")
    kept = memory.tensor(managed)
    kept.fill_(7)
    gc.collect()
    before = len(weakref.finalize._registry)
    for _ in range(100):
        assert memory.tensor(managed)[0] == 7
    assert len(weakref.finalize._registry) == before
    del kept
    gc.collect()
    assert not memory.holds(managed)


def test_vram_that_is_full_evicts_the_least_recently_populated_block():
    memory = SimulatedDriver(device_bytes=4 * BLOCK_BYTES)
    first, second = (resident(memory, 2 * BLOCK_BYTES, name) for name in ("first", "second"))
    memory.place(first, [Span(0, BLOCK_BYTES)], Location.HOST)
    memory.place(first, [Span(0, BLOCK_BYTES)], Location.DEVICE)
    memory.allocate_plain(BLOCK_BYTES, "KV cache")
    assert memory.location(first, Span(BLOCK_BYTES, BLOCK_BYTES)) is Location.HOST
    assert memory.location(first, Span(0, BLOCK_BYTES)) is Location.DEVICE
    assert memory.location(second, Span(0, 2 * BLOCK_BYTES)) is Location.DEVICE
    assert memory.traffic.evicted_bytes == BLOCK_BYTES
    assert memory.device_used == 4 * BLOCK_BYTES


def test_a_block_that_moved_to_the_host_keeps_its_vram_until_something_needs_it_and_goes_before_any_resident():
    memory = SimulatedDriver(device_bytes=4 * BLOCK_BYTES)
    first, second = (resident(memory, 2 * BLOCK_BYTES, name) for name in ("first", "second"))
    memory.place(second, [Span(0, BLOCK_BYTES)], Location.HOST)
    assert memory.info().device_free == 0
    memory.allocate_plain(BLOCK_BYTES, "workspace")
    assert memory.traffic.evicted_bytes == 0
    assert memory.location(first, Span(0, 2 * BLOCK_BYTES)) is Location.DEVICE
    memory.place(first, [Span(0, BLOCK_BYTES)], Location.HOST)
    memory.place(second, [Span(0, BLOCK_BYTES)], Location.DEVICE)
    assert memory.traffic.evicted_bytes == 0, "what was demoted makes room for what is promoted"
    assert memory.device_used == memory.device_bytes == memory.device_resident + BLOCK_BYTES


def test_an_allocation_that_no_eviction_can_fit_fails_and_changes_nothing():
    memory = SimulatedDriver(device_bytes=2 * BLOCK_BYTES)
    held = resident(memory, BLOCK_BYTES, "held")
    with pytest.raises(ManagedMemoryError, match="out of VRAM"):
        memory.allocate_plain(3 * BLOCK_BYTES, "KV cache")
    assert memory.location(held, Span(0, BLOCK_BYTES)) is Location.DEVICE
    assert memory.device_used == BLOCK_BYTES


def test_an_evicted_page_that_prefers_the_gpu_faults_back_and_one_that_prefers_the_host_is_zero_copy():
    memory = SimulatedDriver(device_bytes=2 * BLOCK_BYTES)
    prefers_gpu, prefers_host = (resident(memory, BLOCK_BYTES, name) for name in ("gpu", "host"))
    memory.prefer(prefers_host, whole(prefers_host), Location.HOST)
    memory.allocate_plain(2 * BLOCK_BYTES, "KV cache")
    memory.free_plain(2 * BLOCK_BYTES)
    memory.read(prefers_host, whole(prefers_host))
    assert memory.location(prefers_host, Span(0, BLOCK_BYTES)) is Location.HOST
    memory.read(prefers_gpu, whole(prefers_gpu))
    assert memory.location(prefers_gpu, Span(0, BLOCK_BYTES)) is Location.DEVICE


def test_emulated_vram_that_is_used_is_what_was_placed_in_it():
    memory = EmulatedMemory()
    managed = memory.allocate(4 * PAGE_BYTES, "w13")
    memory.place(managed, [Span(0, 3 * PAGE_BYTES)], Location.DEVICE)
    memory.place(managed, [Span(0, PAGE_BYTES)], Location.HOST)
    info = memory.info()
    assert info.device_total - info.device_free == 2 * PAGE_BYTES


@pytest.mark.parametrize(("wrong", "kept"), [(1, True), (memory_contract.READS, False)])
def test_one_slow_read_breaks_no_promise_and_a_block_that_is_elsewhere_does(wrong, kept):
    class Slow(EmulatedMemory):
        reads = 0

        def in_vram(self, blocks):
            found = super().in_vram(blocks)
            if found is not None and len(found):
                found[0] ^= self.reads % memory_contract.READS < wrong
            self.reads += 1
            return found

    broken = pytest.raises(AssertionError, match="not found there")
    with contextlib.nullcontext() if kept else broken:
        memory_contract.check_bytes_and_addresses_survive_any_moves(Slow())
