"""The activations to come of each expert, from those so far. Pure: arrays in, arrays out.

Arrays are ``[layers, experts]`` unless stated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.policy.coactivation import Context

PREFILL_PRIOR_STEPS = 32.0
"""How many decode steps the routing of prefill tokens is worth, however many prefill tokens there were."""

SCALES = 4.0 ** np.arange(7)
"""The time constants, in decode steps, of the activation rates that are kept of each expert."""
MEAN_STEPS = 256.0
"""The time constant of the mean activation rate of all experts."""
RIDGE = 1e-3
RIDGE_TRANSITIONS = 4.0
"""How much the learned weights are drawn to zero, against the mean square of the features: always, and as if so many of the
transitions seen had shown that nothing persists."""
MAX_HORIZON_STEPS = 1024.0
PRIOR_STEPS = 32.0
"""An expert's first rates are drawn to the mean rate as if it had been seen at that rate for so many steps."""


@dataclass(frozen=True)
class Tuning:
    """What matters most of what was chosen by measurement. benchmarks/policy_goals.py halves and doubles each."""

    hysteresis: float = 1.5
    """A promotion must pay back its cost so many times."""
    horizon_activations: float = 2.0
    """And in the time in which an average expert is activated so often."""
    memory_steps: float = 4096.0
    """The time constant of what is learned about how rates persist."""
    directions: int = 64
    """The width of the context; more cost time for each decision."""


TUNING = Tuning()


def spread(per_step: np.ndarray, routed: np.ndarray) -> np.ndarray:
    """A layer's activations per step (``[layers, 1]``) spread over its experts by their share of ``routed`` tokens: the chance
    of any token, if a step's tokens on an expert are Poisson."""
    return -np.expm1(-per_step * routed / np.maximum(routed.sum(axis=1, keepdims=True), 1.0))


class Forecast:
    """The activations to come, from activation rates over several time scales and from the ``Context``.

    How far each of them predicts is learned from the traffic itself, by least-squares temporal differences (Bradtke and
    Barto, Machine Learning 22, 1996) pooled over all experts: routing that follows the request and routing that is
    stationary need no different settings. The sums are kept apart by power of the discount, so that the horizon may change.
    """

    def __init__(self, candidate: np.ndarray, tuning: Tuning = TUNING):
        self.steps = 0.0
        self._tuning = tuning
        self._candidate = candidate
        self._size = max(int(candidate.sum()), 1)
        self._mean = 0.0
        self._rates = np.zeros((len(SCALES), candidate.size), dtype=np.float32)
        self._context = Context(candidate.size, tuning.directions)
        features = len(SCALES) + 2
        self._features = np.zeros((features, candidate.size), dtype=np.float32)
        self._now_now = np.zeros((features, features))
        self._now_next = np.zeros((features, features))
        self._now_rate = np.zeros(features)
        self._transitions = np.zeros(2)
        """Decayed: how many transitions were seen, and their steps."""

    def observe(self, activations: np.ndarray, steps: float) -> None:
        rate = (np.where(self._candidate, activations, 0).ravel() / steps).astype(np.float32)
        mean = float(rate.sum()) / self._size
        if not self.steps and not self._rates.any():
            self._rates[:] = mean * self._candidate.ravel()
        share = np.maximum(-np.expm1(-steps / SCALES), steps / (self.steps + steps + PRIOR_STEPS))
        self._rates += share.astype(np.float32)[:, None] * (rate - self._rates)
        self._mean += max(-np.expm1(-steps / MEAN_STEPS), steps / (self.steps + steps)) * (mean - self._mean)
        decay = np.exp(-steps / self._tuning.memory_steps)
        self._context.observe(rate, steps, self.steps, decay)
        before, self._features = self._features, self._describe()
        if self.steps:
            self._now_now = decay * self._now_now + before @ before.T
            self._now_next = decay * self._now_next + before @ self._features.T
            self._now_rate = decay * self._now_rate + before @ rate
            self._transitions = decay * self._transitions + (1.0, steps)
        self.steps += steps

    def hint(self, prefill_routed: np.ndarray) -> None:
        """Prefill tokens ``[layers, experts]`` count as decode steps with their mix, for the scales longer than the
        ``PREFILL_PRIOR_STEPS`` that they are worth at most."""
        routed = np.where(self._candidate, prefill_routed, 0).astype(np.float64)
        tokens = routed.sum(axis=1, keepdims=True)
        rates = self._rates.reshape(len(SCALES), *self._candidate.shape)
        per_step = rates[-1].sum(axis=1, keepdims=True, dtype=np.float64)
        per_step[per_step == 0] = 1.0
        steps = np.minimum(tokens / per_step, PREFILL_PRIOR_STEPS)
        for scale, scaled in zip(SCALES, rates, strict=True):
            if scale > PREFILL_PRIOR_STEPS:
                scaled += -np.expm1(-steps / scale) * (spread(per_step, routed) - scaled)
        self._features = self._describe()

    def horizon(self) -> float:
        """Steps in which an average expert is activated ``horizon_activations`` times."""
        return 1.0 + min(self._tuning.horizon_activations / max(self._mean, 1e-9), MAX_HORIZON_STEPS)

    def activations(self, horizon: float) -> np.ndarray:
        """``[layers, experts]``: expected activations from now on, discounted with a mean of ``horizon`` steps."""
        weights = np.zeros(len(self._features))
        transitions, _ = self._transitions
        if transitions:
            discount = self._discount(horizon)
            square = self._now_now - discount * self._now_next
            ridge = (RIDGE + RIDGE_TRANSITIONS / transitions) * np.trace(square) / len(square) + 1e-9
            reward = self._now_rate * (1.0 - discount) * horizon
            weights = np.linalg.solve(square + ridge * np.eye(len(square)), reward)
        activations = weights.astype(np.float32) @ self._features
        # None can be below 0 or above the horizon; below, the order still tells which resident is worth least.
        return np.clip(activations, -horizon, horizon).reshape(self._candidate.shape)

    def _describe(self) -> np.ndarray:
        """The features: by how much each scale's rate exceeds the next longer one's, the longest, the mean, the context."""
        features = np.empty_like(self._features)
        np.subtract(self._rates[:-1], self._rates[1:], out=features[:-3])
        features[-3] = self._rates[-1]
        features[-2] = self._mean * self._candidate.ravel()
        features[-1] = self._context.activations(self._discount(self.horizon()))
        return features

    def _discount(self, horizon: float) -> float:
        """For what comes a transition later."""
        transitions, steps = self._transitions
        return (1.0 - 1.0 / horizon) ** (steps / transitions if transitions else 1.0)
