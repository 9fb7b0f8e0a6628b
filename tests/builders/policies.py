"""The shipped policy without blocks of memory, on arrays ``[layers, experts]``."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.policy.adaptive import AdaptivePolicy, Moves
from sglang_uvm_offload.policy.extents import Budget, Extents
from sglang_uvm_offload.policy.forecast import TUNING, Tuning


def whole(shape: tuple[int, int], expert_bytes: np.ndarray) -> Extents:
    """Returns one extent per expert, with its layer's bytes per expert."""
    experts = np.arange(shape[0] * shape[1])
    nbytes = np.repeat(np.asarray(expert_bytes, dtype=np.int64), shape[1])
    return Extents(shape, experts // shape[1], nbytes, experts, experts, nbytes)


class WholeExperts(AdaptivePolicy):
    def __init__(
        self,
        capacity: np.ndarray,
        expert_bytes: np.ndarray,
        candidate: np.ndarray,
        floor: int = 1,
        tuning: Tuning = TUNING,
    ):
        """``capacity`` is the number of residents per layer; each layer keeps at least ``floor``."""
        capacity = np.minimum(capacity, candidate.sum(axis=1))
        floors = np.minimum(floor, capacity) * expert_bytes
        extents = whole(candidate.shape, expert_bytes)
        super().__init__(Budget(extents, candidate.ravel().copy(), int(capacity @ expert_bytes), floors), candidate, tuning)

    def decide(self, resident: np.ndarray, max_bytes: float = np.inf) -> Moves:
        moves = super().decide(resident.ravel(), max_bytes)
        return Moves(moves.promote.reshape(resident.shape), moves.demote.reshape(resident.shape))
