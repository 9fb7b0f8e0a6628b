"""Moving experts: on a card without free VRAM, and for a server that gives up its VRAM and takes it back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders.managers import LAYERS, E, Rank, config, slots_of
from builders.refusing import RefusingMemory
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES
from sglang_uvm_offload.memory.protocol import Location

EXPERT_BYTES = 3 << 20


class FullCard:
    """A rank whose residents and plain allocations take all VRAM, and which then serves traffic that changes. Where residency
    is by the driver's block, nothing is evicted, and nothing beyond the budget is held; by pages of 64 KiB it was not so."""

    def __init__(self, block_bytes: int, adapt: str = "continuous"):
        seconds = iter(range(10**9))
        self.memory = SimulatedDriver(device_bytes=1 << 40, block_bytes=block_bytes)
        cfg = config(num_resident=4, resident_selection="frequency", adapt=adapt, warmup_tokens=8)
        self.rank = Rank(cfg, self.memory, expert_bytes=EXPERT_BYTES, clock=lambda: float(next(seconds)))
        self.budget = self.memory.device_used
        self.memory.device_bytes = self.budget + 8 * BLOCK_BYTES
        self.memory.allocate_plain(8 * BLOCK_BYTES, "KV cache")
        self.most_resident = 0

    def serve(self, topics: int = 12, steps: int = 12) -> None:
        rng = np.random.default_rng(0)
        for _ in range(topics):
            hot = {layer: [rng.choice(E, 3, replace=False).tolist()] for layer in range(LAYERS)}
            for _ in range(steps):
                self.rank.step(hot)
                self.most_resident = max(self.most_resident, self.memory.device_resident)

    def missing_bytes(self) -> int:
        """Bytes taken for resident that are not in VRAM."""
        return sum(
            span.nbytes
            for layer in self.rank.model.layers
            for tensor in layer.tensors
            for span in tensor.layout.spans(tensor.resident)
            if self.memory.location(tensor.managed, span) is not Location.DEVICE
        )


@pytest.mark.parametrize("adapt", ["warmup", "continuous"])
def test_nothing_is_evicted_and_nothing_is_held_beyond_the_budget(adapt):
    card = FullCard(BLOCK_BYTES, adapt)
    card.serve()
    assert card.rank.manager.fault is None
    assert card.rank.manager.ledger.moves > 10
    assert card.memory.traffic.evicted_bytes == 0
    assert card.missing_bytes() == 0
    assert card.most_resident <= card.budget == sum(layer.layouts[0].budget(4) for layer in card.rank.model.layers)
    assert card.memory.device_peak == card.memory.device_bytes


def test_residents_that_would_outgrow_free_vram_are_not_promoted_and_the_reason_is_shown():
    card = FullCard(BLOCK_BYTES)
    everything = np.ones(len(card.rank.model.extents), dtype=bool)
    card.rank.manager.residents.move_to(everything)
    assert "residents would grow by 36.0 MiB, and 0.0 MiB of VRAM is free" in card.rank.manager.fault
    assert card.memory.traffic.to_device_bytes == card.memory.traffic.evicted_bytes == 0


# A server that gives up its VRAM


def filled(memory: EmulatedMemory | None = None, **flags) -> tuple[Rank, list[bytes]]:
    """A rank whose experts hold random bytes."""
    rank = Rank(config(**flags), memory or EmulatedMemory())
    for seed, module in enumerate(rank.modules):
        module.w13.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return rank, bytes_of(rank)


def bytes_of(rank: Rank) -> list[bytes]:
    return [module.w13.numpy().tobytes() for module in rank.modules]


def in_vram(rank: Rank) -> list[str]:
    """Where the memory has each block of every tensor, and of the slots."""
    tensors = [tensor for layer in rank.model.layers for tensor in layer.tensors]
    found = []
    for managed in [*(it.managed for it in tensors), *(slots_of(pool, tensors[0]) for pool in rank.model.pools())]:
        blocks = [(managed, begin) for begin in range(0, managed.nbytes, PAGE_BYTES)]
        found.append("".join("V" if there else "h" for there in rank.manager.memory.in_vram(blocks)))
    return found


@pytest.mark.parametrize("slots", [0, 2])
def test_nothing_is_in_vram_meanwhile_and_then_all_is_as_it_was(slots):
    rank, held = filled(slots=slots)
    before = in_vram(rank)
    assert before == ["VVVhhhhh"] * 3 + ["V" * 3 * slots] * bool(slots)
    rank.manager.sleep()
    assert in_vram(rank) == ["h" * 8] * 3 + ["h" * 3 * slots] * bool(slots)
    assert rank.status()["resident_bytes"] == 0
    rank.manager.wake()
    assert in_vram(rank) == before
    assert bytes_of(rank) == held
    assert rank.manager.fault is None


@pytest.mark.parametrize("host_ram", [True, False])
def test_slots_alone_leave_vram_where_host_ram_has_room_and_come_back(host_ram):
    rank = Rank(config(num_resident=0, slots=1))
    before = in_vram(rank)
    if not host_ram:
        short = replace(rank.manager.memory.info(), host_available=0)
        rank.manager.memory.info = lambda: short
    rank.manager.sleep()
    assert in_vram(rank)[-1] == ("hhh" if host_ram else "VVV")
    rank.manager.wake()
    assert in_vram(rank) == before == ["hhhhhhhh"] * 3 + ["VVV"]


def test_a_second_call_of_either_changes_nothing():
    rank, _ = filled()
    before = in_vram(rank)
    rank.manager.wake()
    assert in_vram(rank) == before
    rank.manager.sleep()
    rank.manager.sleep()
    rank.manager.wake()
    assert in_vram(rank) == before


def test_an_operator_moves_nothing_back_meanwhile():
    rank, _ = filled(warmup_tokens=1000)
    rank.step([[5, 6, 7]] * 4)
    rank.manager.sleep()
    rank.manager.readvise()
    assert rank.status()["resident_bytes"] == 0
    rank.manager.wake()
    rank.manager.readvise()
    assert rank.resident() == [[5, 6, 7]] * 3


def test_without_host_ram_the_experts_stay_and_serving_goes_on(caplog):
    rank, held = filled()
    before = in_vram(rank)
    short = replace(rank.manager.memory.info(), host_available=0)
    rank.manager.memory.info = lambda: short
    rank.manager.sleep()
    assert in_vram(rank) == before
    assert "experts stay in VRAM" in caplog.text
    rank.manager.wake()
    assert in_vram(rank) == before
    assert bytes_of(rank) == held
    assert rank.manager.fault is None


def test_vram_that_the_driver_still_holds_is_taken_again():
    rank, held = filled()
    before = in_vram(rank)
    rank.manager.sleep()
    full = replace(rank.manager.memory.info(), device_free=0)
    rank.manager.memory.info = lambda: full
    rank.manager.wake()
    assert in_vram(rank) == before
    assert bytes_of(rank) == held
    assert rank.manager.fault is None


def test_where_moving_has_failed_before_the_experts_stay_and_the_log_says_so(caplog):
    rank, _ = filled(slots=2)
    before = in_vram(rank)
    rank.manager.mover.failure = "demote failed"
    rank.manager.sleep()
    rank.manager.wake()
    assert in_vram(rank) == before
    assert "experts stay in VRAM" in caplog.text
    assert "demote failed" in caplog.text


@pytest.mark.parametrize("left", [0, 2, 3])
def test_what_has_left_vram_comes_back_if_the_rest_cannot_leave_it(caplog, left):
    """The experts of three layers, then their slots. Host RAM may fill up meanwhile, by what other ranks move."""
    rank, held = filled(RefusingMemory(), slots=2)
    before = in_vram(rank)
    rank.manager.memory.refused, rank.manager.memory.left = Location.HOST, left
    rank.manager.sleep()
    assert in_vram(rank) == before
    assert "experts stay in VRAM" in caplog.text
    assert "out of VRAM until" not in caplog.text
    rank.manager.wake()
    assert in_vram(rank) == before
    assert bytes_of(rank) == held


@pytest.mark.parametrize("refused", Location)
def test_the_status_shows_a_fault_of_going_and_of_coming(refused):
    rank, _ = filled(RefusingMemory())
    rank.manager.memory.refused = refused
    rank.manager.memory.left = 1
    rank.manager.sleep()
    rank.manager.wake()
    assert "injected" in rank.status()["fault"]
