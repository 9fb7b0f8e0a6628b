"""Continuous adaptation: feeds the counts to the policy and returns the residents that it chooses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.policy.adaptive import AdaptivePolicy
from sglang_uvm_offload.residency.ledger import stack
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts

INTERVAL_STEPS = 1
"""Steps between two polls of the counts. With fewer, residents follow the traffic better; benchmarks/policy_goals.py measures
the cost of longer intervals."""


class Adaptation:
    """The policy over one model's layers. It runs only on the rank that decides for its peers."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        width: int,
        start: RoutingCounts,
        history: RoutingCounts | None = None,
    ):
        """Counts up to ``start`` are ignored. ``history`` holds the counts of earlier runs (a profile) for these ``width``
        experts of each layer: the forecast begins with it, until live traffic outweighs it."""
        self._seen = start
        resident, always_resident = (
            stack([getattr(la, name) for la in layers], width) for name in ("resident", "always_resident")
        )
        placeable = [np.full(layer.num_experts, bool(layer.tensors)) for layer in layers]
        candidate = stack(placeable, width) & ~always_resident
        capacity = (resident & candidate).sum(axis=1)
        self._expert_bytes = np.array([max(layer.expert_bytes, 1) for layer in layers], dtype=np.int64)
        self._policy = AdaptivePolicy(
            capacity,
            self._expert_bytes,
            candidate,
            floor=max(1, int(capacity.min(initial=0)) // 4),
        )
        if history is not None:
            self._policy.seed(*_seen(history))

    @property
    def max_expert_bytes(self) -> int:
        """Bytes of the largest expert."""
        return int(self._expert_bytes.max(initial=1))

    def bytes_of(self, experts: np.ndarray) -> int:
        """Bytes of ``experts``, ``bool[layers, width]``."""
        return int(experts.sum(axis=1) @ self._expert_bytes)

    def decide(self, counts: RoutingCounts, resident: np.ndarray, max_bytes: float) -> np.ndarray | None:
        """The residents to move to after ``counts`` (totals since the start), ``bool[layers, width]``; None to keep
        ``resident``. Promotes at most ``max_bytes``."""
        new = counts.since(self._seen)
        self._seen = counts
        self._policy.observe(*_seen(new))
        moves = self._policy.decide(resident, max_bytes)
        if not moves.promote.any() and not moves.demote.any():
            return None
        return (resident | moves.promote) & ~moves.demote


def _seen(counts: RoutingCounts) -> tuple[np.ndarray, int, np.ndarray]:
    """The policy's input: activations in decode steps, the number of these steps, and routed prefill tokens."""
    return counts.counts[:, Phase.DECODE, ACTIVATIONS], counts.steps[Phase.DECODE], counts.counts[:, Phase.PREFILL, ROUTED]
