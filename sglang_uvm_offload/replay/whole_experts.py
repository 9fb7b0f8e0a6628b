"""The shipped policy for memory without blocks: it keeps whole experts, and arrays are ``[layers, experts]``."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.policy.adaptive import AdaptivePolicy, Moves
from sglang_uvm_offload.policy.extents import Budget
from sglang_uvm_offload.policy.forecast import TUNING, Tuning


class WholeExperts(AdaptivePolicy):
    def __init__(
        self,
        capacity: np.ndarray,
        expert_bytes: np.ndarray,
        candidate: np.ndarray,
        floor: int = 1,
        move_cost: float = 1.0,
        tuning: Tuning = TUNING,
    ):
        """See ``Budget.of_experts`` and ``AdaptivePolicy``."""
        super().__init__(Budget.of_experts(capacity, expert_bytes, candidate, floor), candidate, move_cost, tuning)

    def decide(self, resident: np.ndarray, max_bytes: float = np.inf) -> Moves:
        moves = super().decide(resident.ravel(), max_bytes)
        return Moves(moves.promote.reshape(resident.shape), moves.demote.reshape(resident.shape))
