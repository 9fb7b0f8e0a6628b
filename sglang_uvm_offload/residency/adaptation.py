"""Continuous adaptation: feeds the counts to the policy and returns the residents that it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sglang_uvm_offload.policy.adaptive import AdaptivePolicy
from sglang_uvm_offload.policy.extents import Budget, Extents
from sglang_uvm_offload.policy.forecast import TUNING
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts

INTERVAL_STEPS = 1
"""Steps between two polls of the counts. With fewer, residents follow the traffic better; benchmarks/policy_goals.py measures
the cost of longer intervals."""


class Adaptation:
    """The policy over one model's layers. It runs only on the rank that decides for its peers."""

    def __init__(
        self, model: ModelExperts, start: RoutingCounts, history: Sequence[RoutingCounts] = (), coactivation: bool = True
    ):
        """Counts up to ``start`` are ignored. ``history`` holds earlier counts for these experts, the oldest first (a profile):
        the forecast begins with it, until live traffic outweighs it. The VRAM that is taken now is the budget.
        ``coactivation``: whether the forecast is from which experts are used together too, or from their own past alone."""
        self._seen = start
        tuning = TUNING if coactivation else replace(TUNING, directions=0)
        self._policy = AdaptivePolicy(_budget_of(model), model.candidates(), tuning=tuning)
        for counts in history:
            self._policy.seed(*_seen(counts))

    def follow(self, model: ModelExperts) -> None:
        """Decide on the present extents of ``model``. The forecast is of experts, so it stays."""
        self._policy.budget = _budget_of(model)

    @property
    def extents(self) -> Extents:
        """Those that decisions are about."""
        return self._policy.budget.extents

    @property
    def max_extent_bytes(self) -> int:
        return int(self.extents.nbytes.max(initial=1))

    def decide(self, counts: RoutingCounts, resident: np.ndarray, max_bytes: float) -> np.ndarray | None:
        """The residents to move to after ``counts`` (totals since the start), ``bool[extents]``; None to keep ``resident``.
        Promotes at most ``max_bytes``."""
        new = counts.since(self._seen)
        self._seen = counts
        self._policy.observe(*_seen(new))
        moves = self._policy.decide(resident, max_bytes)
        if not moves.promote.any() and not moves.demote.any():
            return None
        return (resident | moves.promote) & ~moves.demote


def _budget_of(model: ModelExperts) -> Budget:
    """The VRAM of the movable residents. Each layer keeps a quarter of what the layer with the fewest residents has, or one."""
    extents, movable = model.extents, model.movable()
    used = extents.bytes_by_layer(model.resident_extents() & movable)
    expert_bytes = np.array([max(layer.expert_bytes, 1) for layer in model.layers], dtype=np.int64)
    floor = max(1, int((used // expert_bytes).min(initial=0)) // 4)
    return Budget(extents, movable, int(used.sum()), np.minimum(floor * expert_bytes, used))


def _seen(counts: RoutingCounts) -> tuple[np.ndarray, int, np.ndarray]:
    """The policy's input: activations in decode steps, the number of these steps, and routed prefill tokens."""
    return counts.counts[:, Phase.DECODE, ACTIVATIONS], counts.steps[Phase.DECODE], counts.counts[:, Phase.PREFILL, ROUTED]
