"""Detecting evicted residents: which blocks are checked, what is logged, and when."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from builders.managers import LAYERS, Rank, config
from builders.refusing import Later
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, MemoryInfo, Span
from sglang_uvm_offload.residency import evictions, manager

RESIDENT = 4 * BLOCK_BYTES
"""Bytes of residents in each layer of ``Rank`` below."""


class Watched(Rank):
    """A rank with experts of a block each, four a layer resident, on a card that plain allocations can fill."""

    def __init__(self, memory=None, **more):
        self.now = 0.0
        self.memory = memory or SimulatedDriver(device_bytes=1 << 40, block_bytes=BLOCK_BYTES)
        cfg = config(num_resident=4, resident_selection="first_n", headroom_gb=0.5)
        super().__init__(cfg, self.memory, expert_bytes=BLOCK_BYTES, clock=lambda: self.now, **more)

    def fill(self, evict: int) -> None:
        """Plain allocations take all free VRAM, and ``evict`` bytes more."""
        self.memory.device_bytes = self.memory.device_used
        self.memory.allocate_plain(evict, "KV cache")

    def look(self) -> int | None:
        self.now += manager.CHECK_SECONDS
        self.manager.poll_if_due()
        return self.manager.evictions.evicted_bytes


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_evicted_residents_are_counted_and_the_log_names_the_cure(caplog):
    rank = Watched()
    assert rank.status()["evicted_bytes"] is None
    assert rank.look() == 0
    assert warnings(caplog) == []
    rank.fill(evict=LAYERS * RESIDENT // 3)
    assert rank.look() == rank.status()["evicted_bytes"] == LAYERS * RESIDENT // 3
    (said,) = warnings(caplog)
    assert "about 8.0 MiB of the 24.0 MiB of resident experts were evicted" in said
    assert "outputs are not affected" in said
    assert "a larger --expert-offload-headroom-gb (now 0.5), fewer resident experts" in said


def test_the_same_is_not_said_twice_and_more_of_it_is(caplog):
    rank = Watched()
    for missing, said in ((3, 1), (3, 1), (6, 1), (7, 2)):
        rank.manager.evictions._memory = Evicts(rank.model.layers, missing)
        assert rank.look() == missing * BLOCK_BYTES
        assert len(warnings(caplog)) == said


def test_only_residents_are_looked_at_in_every_layer_and_no_more_than_a_sample(monkeypatch):
    rank = Watched()
    rank.manager.evictions._memory = memory = Evicts(rank.model.layers)
    rank.look()
    resident = [(t.address, i * BLOCK_BYTES) for la in rank.model.layers for t in la.tensors for i in range(4)]
    assert sorted(memory.asked) == sorted(resident)
    monkeypatch.setattr(evictions, "MAX_BLOCKS", 5)
    seen = set()
    for _ in range(50):
        memory.asked = []
        rank.look()
        assert len(set(memory.asked)) == 5
        seen.update(memory.asked)
    assert seen == set(resident)


def test_drafts_are_looked_at_too():
    rank = Watched()
    rank.manager.evictions._memory = memory = Evicts(rank.model.layers)
    draft = rank.manager.begin_model(True)
    draft.layers.append(rank.model.layers.pop())  # as if it were its layer
    rank.look()
    assert len(memory.asked) == 4 * LAYERS


def test_a_few_slow_reads_are_taken_for_chance(caplog):
    rank = Watched()
    for missing, evicted in ((evictions.CHANCE_BLOCKS, 0), (evictions.CHANCE_BLOCKS + 1, 3 * BLOCK_BYTES)):
        assert warnings(caplog) == []
        rank.manager.evictions._memory = Evicts(rank.model.layers, missing)
        assert rank.look() == evicted


def test_of_a_large_sample_a_small_share_is_taken_for_chance_and_a_look_ends_once_it_has_found_some_missing():
    """A read brings each back."""
    layers = Rank(config(num_resident=8), expert_bytes=64 * PAGE_BYTES).model.layers  # 1536 blocks
    for missing, evicted in ((7, False), (8, True), (1536, True)):
        memory = Evicts(layers, missing)
        watch = evictions.Evictions(memory, 1.0)
        watch.check(layers)
        assert bool(watch.evicted_bytes) == evicted
    assert watch.evicted_bytes == 1536 * PAGE_BYTES
    assert len(memory.asked) == evictions.FIRST_BLOCKS


@pytest.mark.parametrize(("free", "evicted"), [(evictions.ROOM_BYTES, 24 << 20), (evictions.ROOM_BYTES + 1, 0)])
def test_where_vram_is_free_nothing_is_evicted_whatever_reads_take(free, evicted, caplog):
    rank = Watched()
    rank.manager.evictions._memory = memory = Evicts(rank.model.layers)
    memory.free = 1 << 40
    assert rank.look() == 0
    assert memory.asked, "the first look is made anyway"
    rank.manager.evictions._memory = memory = Evicts(rank.model.layers, missing=12)
    memory.free = free
    assert rank.look() == evicted
    assert bool(warnings(caplog)) == bool(memory.asked) == bool(evicted)


def test_a_look_that_cannot_tell_changes_nothing(caplog):
    rank = Watched()
    rank.manager.evictions._memory = memory = Evicts(rank.model.layers, missing=12)
    assert rank.look() == 24 << 20
    memory.answers = False
    assert rank.look() == 24 << 20
    memory.answers, memory.missing = True, set()
    assert rank.look() == 0
    assert len(warnings(caplog)) == 1


def test_a_memory_that_cannot_tell_and_one_that_fails_leave_it_open(caplog):
    rank = Watched()
    rank.manager.evictions._memory = memory = Evicts(rank.model.layers)
    memory.answers = False
    assert rank.look() is None
    assert warnings(caplog) == []
    memory.fault = ManagedMemoryError("cudaLaunchKernel", "a look at blocks", Span(0, 0), "cudaErrorUnknown")
    asked = len(memory.asked)
    for _ in range(2):
        assert rank.look() is None
    assert len(memory.asked) == asked + 4 * LAYERS  # once: what failed is not tried again
    assert warnings(caplog) == ["Expert offload: eviction checks disabled after an error"]


def test_a_look_is_every_ten_seconds_and_beside_the_steps_and_one_at_a_time():
    executor = Later()
    rank = Watched(executor=executor)
    rank.manager.poll_if_due()
    rank.manager.poll_if_due()
    assert len(executor.tasks) == 1
    assert rank.manager.evictions.evicted_bytes is None  # the thread that launches steps does not look itself
    rank.now += manager.CHECK_SECONDS
    rank.manager.poll_if_due()
    assert len(executor.tasks) == 1  # the first is still under way
    executor.run()
    rank.manager.poll_if_due()
    assert len(executor.tasks) == 1
    rank.now += manager.CHECK_SECONDS / 2
    executor.run()
    rank.manager.poll_if_due()
    assert executor.tasks == []


class Evicts(EmulatedMemory):
    """A memory that finds the first ``missing`` blocks of the layers' residents not in VRAM."""

    def __init__(self, layers, missing: int = 0):
        super().__init__()
        tensors = [tensor for layer in layers for tensor in layer.tensors]
        blocks = [(tensor.address, int(at)) for tensor in tensors for at in tensor.layout.blocks(tensor.resident)]
        self.missing = set(blocks[:missing])
        self.asked: list[tuple[int, int]] = []
        self.answers = True
        self.fault: Exception | None = None
        self.free = 0

    def info(self):
        return MemoryInfo(self.free, 1 << 40, 1 << 40)

    def in_vram(self, blocks):
        self.asked += map(_key, blocks)
        if self.fault is not None:
            raise self.fault
        return np.array([_key(block) not in self.missing for block in blocks]) if self.answers else None


def _key(block):
    managed, offset = block
    return managed.address, offset
