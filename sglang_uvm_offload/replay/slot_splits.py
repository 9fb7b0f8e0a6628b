"""Slots on a trace: the real slot policy, and splits of VRAM between slots and residents.

A miss crosses the link once, whether it is read in place or fills a slot. Arrays are ``bool[layers, experts]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_uvm_offload.policy.slot_policy import EMPTY, WHOLE, SlotPolicy, SlotPool
from sglang_uvm_offload.replay.baselines import Served
from sglang_uvm_offload.replay.results import Split

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of VRAM in slots to try."""


class SlotCache:
    """One slot pool, ``slots`` per layer of ``shape``, and fixed ``residents``. All other experts are offloaded."""

    def __init__(self, shape: tuple[int, int], slots: int, residents: np.ndarray):
        self._residents = residents
        self._share = np.where(residents, 0, WHOLE)
        self._policy = SlotPolicy(np.ones(shape, dtype=bool), [SlotPool(range(shape[0]), slots * shape[0])])

    @property
    def resident(self) -> np.ndarray:
        """The experts in VRAM, as residents or in slots."""
        return self._residents | (self._policy.slot_of != EMPTY)

    def step(self, activated: np.ndarray) -> Served:
        self._policy.begin_step()
        resolved = self._policy.resolve(activated, self._share)
        hit, filled = activated & self._residents | resolved.hit, np.zeros_like(activated)
        for layer, expert, _ in resolved.fills:
            filled[layer, expert] = True
        return Served(hit, activated & ~hit & ~filled, filled)


def best_split(splits: Sequence[Split]) -> Split:
    """The split with the least link time; among equals, the one with fewest slots, because residents need no fills."""
    return min(splits, key=lambda split: (split.step_seconds, split.slots))
