"""The simplest rule that follows the traffic: residents are the experts with the largest decayed activation counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_uvm_offload.policy.adaptive import Moves
from sglang_uvm_offload.policy.forecast import TUNING
from sglang_uvm_offload.replay.whole_experts import WholeExperts


class DecayedCounts(WholeExperts):
    """Counts each expert's activations with one time constant. An expert replaces the weakest resident if its count is larger
    by ``threshold``. Budget, floor and packing are those of the shipped policy; only the forecast differs."""

    def __init__(
        self,
        capacity: np.ndarray,
        expert_bytes: np.ndarray,
        candidate: np.ndarray,
        floor: int,
        decay_steps: float,
        threshold: float,
    ):
        tuning = replace(TUNING, hysteresis=threshold, directions=0)
        super().__init__(capacity, expert_bytes, candidate, floor, tuning=tuning)
        self._counts = np.zeros(candidate.shape)
        self._decay_steps = decay_steps

    def observe(self, activations: np.ndarray, steps: float, prefill_routed: np.ndarray | None = None) -> None:
        self._counts = self._counts * np.exp(-steps / self._decay_steps) + activations

    def decide(self, resident: np.ndarray, max_bytes: float = np.inf) -> Moves:
        chosen = self._choose(self._counts.ravel(), resident.ravel()).reshape(resident.shape)
        return Moves(chosen & ~resident, resident & ~chosen)
