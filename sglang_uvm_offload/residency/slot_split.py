"""How the VRAM of a layer's experts is divided between residents and slots: one rule, for the launch and the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FINE_EXPERTS = 32
"""In models with this many experts a layer, slots alone miss at most 2 % more than the best split of the VRAM, and prompts
bring no more than beside residents (tests/unit/test_replay_slot_splits.py)."""
FINE_SHARE, COARSE_SHARE = 1.0, 0.5
"""The share of the VRAM that becomes slots without a trace to choose it by, where host RAM holds what is offloaded then: what a
slot holds stays there too."""


def default_share(num_experts: int) -> float:
    return FINE_SHARE if num_experts >= FINE_EXPERTS else COARSE_SHARE


def pays_in_groups(residents: int, slots: int) -> bool:
    """Whether residents that are not whole blocks are better chosen by groups that are. Slots hold what groups leave out, and
    pay nothing for experts that are half in VRAM (benchmarks/results/blocks/blocks.md)."""
    return 0 < residents <= 2 * slots


@dataclass(frozen=True)
class Slots:
    """The slots that a launch asks for. ``rows`` are a layer's residents and slots together, all in VRAM."""

    asked: int | None = 0
    """None for ``auto``."""
    shares: Mapping[float, float] = field(default_factory=dict)
    """For ``auto``, from a profile: by residency (rows as a share of the experts), the best share of the rows in slots."""
    least_residents: int = 0
    """For ``auto``: rows that are no slots, as flags name so many experts."""

    def of(self, rows: int, num_experts: int) -> int:
        """How many of ``rows`` are slots: none where all experts are resident. Never fewer for more rows, and so are the
        residents, as long as something is offloaded."""
        if rows >= num_experts:
            return 0
        if self.asked is not None:
            return min(self.asked, rows)
        return min(int(rows * self._share(rows, num_experts)), max(0, rows - self.least_residents))

    def _share(self, rows: int, num_experts: int) -> float:
        """That of the nearest residency that the profile has, of two the lower; the default without any."""
        if not self.shares:
            return default_share(num_experts)
        return self.shares[min(self.shares, key=lambda residency: (abs(residency - rows / num_experts), residency))]


NO_SLOTS = Slots()
