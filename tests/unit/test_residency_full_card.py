"""Changing residents on a card without free VRAM, over the simulated driver: where residency is by the driver's block, nothing
is evicted, and nothing beyond the budget is held. By pages of 64 KiB it was not so."""

from __future__ import annotations

import numpy as np
import pytest
from builders.managers import LAYERS, E, Rank, config
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES
from sglang_uvm_offload.memory.protocol import Location

EXPERT_BYTES = 3 << 20


class FullCard:
    """A rank whose residents and plain allocations take all VRAM, and which then serves traffic that changes."""

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


def test_by_pages_of_64_kib_residents_are_evicted_that_are_taken_for_resident():
    card = FullCard(PAGE_BYTES)
    card.serve()
    assert card.rank.manager.ledger.moves > 10
    assert card.memory.traffic.evicted_bytes > 0
    assert card.missing_bytes() > 0


def test_residents_that_would_outgrow_free_vram_are_not_promoted_and_the_reason_is_shown():
    card = FullCard(BLOCK_BYTES)
    everything = np.ones(len(card.rank.model.extents), dtype=bool)
    card.rank.manager.residents.move_to(everything)
    assert "residents would grow by 36.0 MiB, and 0.0 MiB of VRAM is free" in card.rank.manager.fault
    assert card.memory.traffic.to_device_bytes == card.memory.traffic.evicted_bytes == 0
