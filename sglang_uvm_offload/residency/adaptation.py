"""Following the traffic: when the policy looks at the counts, and what it then wants to be resident."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.policy.adaptive import AdaptivePolicy
from sglang_uvm_offload.residency.ledger import stack
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts

INTERVAL_STEPS = 1
"""Steps between two looks at the counts. The fewer, the better residents follow (benchmarks/policy_goals.py shows what waiting
costs)."""


class Adaptation:
    """The policy over one model's layers. Only the rank that decides for its peers feeds it."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        width: int,
        start: RoutingCounts,
        history: RoutingCounts | None = None,
    ):
        """``start`` is what was counted so far, which does not count. ``history`` is what earlier runs counted of these
        ``width`` experts of each layer (a profile): the forecast begins with it, until live traffic overrules it."""
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
    def most_expert_bytes(self) -> int:
        """Bytes of an expert of the layer where they are largest."""
        return int(self._expert_bytes.max(initial=1))

    def bytes_of(self, experts: np.ndarray) -> int:
        """Bytes of ``experts``, ``bool[layers, width]``."""
        return int(experts.sum(axis=1) @ self._expert_bytes)

    def wanted(self, counts: RoutingCounts, resident: np.ndarray, max_bytes: float) -> np.ndarray | None:
        """``bool[layers, width]`` of residents after ``counts`` (since the start), None to leave them at ``resident``. Promotes
        at most ``max_bytes``."""
        new = counts.since(self._seen)
        self._seen = counts
        self._policy.observe(*_seen(new))
        moves = self._policy.decide(resident, max_bytes)
        if not moves.promote.any() and not moves.demote.any():
            return None
        return (resident | moves.promote) & ~moves.demote


def _seen(counts: RoutingCounts) -> tuple[np.ndarray, int, np.ndarray]:
    """What the policy observes: activations of decode steps, how many these were, and routed prefill tokens."""
    return counts.counts[:, Phase.DECODE, ACTIVATIONS], counts.steps[Phase.DECODE], counts.counts[:, Phase.PREFILL, ROUTED]
