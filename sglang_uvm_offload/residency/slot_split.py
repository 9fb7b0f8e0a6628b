"""Divides the VRAM of a layer's experts between residents and slots: one rule for the launch and the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FINE_EXPERTS = 32
"""In models with at least this many experts per layer, slots alone miss at most 2 % more than the best split of the VRAM, and
prompts copy no more experts than with residents (tests/unit/test_replay_slot_splits.py)."""
FINE_SHARE, COARSE_SHARE = 1.0, 0.5
"""The share of the VRAM that becomes slots if no trace says otherwise and host RAM can hold the offloaded experts, which
include what slots hold."""


def default_share(num_experts: int) -> float:
    return FINE_SHARE if num_experts >= FINE_EXPERTS else COARSE_SHARE


def pays_in_groups(residents: int, slots: int) -> bool:
    """Whether residents that do not fill whole blocks are better chosen in groups that do. Slots serve what groups leave out,
    and waste nothing on experts that are partly in VRAM (benchmarks/results/blocks/blocks.md)."""
    return 0 < residents <= 2 * slots


@dataclass(frozen=True)
class Slots:
    """The slots that a launch asks for. ``rows`` counts a layer's residents and slots together, all in VRAM."""

    asked: int | None = 0
    """None for ``auto``."""
    shares: Mapping[float, float] = field(default_factory=dict)
    """For ``auto``: a profile's best share of the rows to use as slots, by residency (rows as a share of the experts)."""
    least_residents: int = 0
    """For ``auto``: the minimum number of residents, because flags name that many experts."""

    def of(self, rows: int, num_experts: int) -> int:
        """How many of ``rows`` are slots: none if all experts are resident. As long as something is offloaded, more rows never
        mean fewer slots or fewer residents."""
        if rows >= num_experts:
            return 0
        if self.asked is not None:
            return min(self.asked, rows)
        return min(int(rows * self._share(rows, num_experts)), max(0, rows - self.least_residents))

    def _share(self, rows: int, num_experts: int) -> float:
        """The profile's share for the nearest residency (the lower of two equally near ones), or the default."""
        if not self.shares:
            return default_share(num_experts)
        return self.shares[min(self.shares, key=lambda residency: (abs(residency - rows / num_experts), residency))]


NO_SLOTS = Slots()
