"""Slots on a trace: the real policy of a layer's extra rows in VRAM, and VRAM split between them and residents.

A miss crosses the link once, whether it is read in place or fills a slot. Arrays are ``bool[layers, experts]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sglang_uvm_offload.policy.slot_policy import EMPTY, WHOLE, SlotPolicy
from sglang_uvm_offload.replay.baselines import Served

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares of VRAM in slots that a sweep tries."""


class SlotCache:
    """``slots`` slots in each layer of ``shape``, and ``residents`` that never change. Other experts are offloaded whole."""

    def __init__(self, shape: tuple[int, int], slots: int, residents: np.ndarray):
        self._residents = residents
        self._share = np.where(residents, 0, WHOLE)
        self._policy = SlotPolicy(np.ones(shape, dtype=bool), slots)

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


@dataclass(frozen=True)
class Split:
    """The result of one split of each layer's VRAM over the scored steps. Seconds are link time: reads plus fills."""

    slot_share: float
    """The share of VRAM in slots that was asked for; ``residents`` and ``slots`` are whole experts."""
    residents: int
    slots: int
    hit_rate: float
    fills_per_step: float
    read_bytes_per_step: float
    filled_bytes_per_step: float
    step_seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def best_split(splits: Sequence[Split]) -> Split:
    """The split with the least link time, of equal ones that with the fewest slots: residents need no fills."""
    return min(splits, key=lambda split: (split.step_seconds, split.slots))
