"""Forecasts each expert's activations from its past ones. Pure: arrays in, arrays out.

Tried without a gain on all traces: several horizons at once, weights that depend on how hot an expert is, weights for each
layer, eligibility traces, and other time constants.

Arrays are ``[layers, experts]`` unless stated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.policy.coactivation import Context

PREFILL_PRIOR_STEPS = 32.0
"""The weight of prefill routing in decode steps, however many prefill tokens there were."""

SCALES = 4.0 ** np.arange(7)
"""The time constants, in decode steps, of each expert's activation rates."""
MEAN_STEPS = 256.0
"""The time constant of the mean activation rate of all experts."""
RIDGE = 1e-3
RIDGE_TRANSITIONS = 4.0
"""Ridge regularisation relative to the mean square of the features: a constant part, and a part equal to this many observed
transitions after which nothing persisted."""
MAX_HORIZON_STEPS = 1024.0
PRIOR_STEPS = 32.0
"""The weight, in steps, of the mean rate as a prior for each expert's first rates."""


@dataclass(frozen=True)
class Tuning:
    """The most important constants, chosen by measurement: each was halved and doubled
    (benchmarks/results/policy/tunings.md)."""

    hysteresis: float = 1.5
    """A promotion must save this many times its cost."""
    horizon_activations: float = 2.0
    """The horizon is the time in which an average expert is activated this many times."""
    memory_steps: float = 4096.0
    """The time constant, in decode steps, of the learned weights."""
    directions: int = 64
    """The width of the context. A larger one makes each decision slower."""


TUNING = Tuning()


def spread(per_step: np.ndarray, routed: np.ndarray) -> np.ndarray:
    """Spread each layer's activations per step (``[layers, 1]``) over its experts by their share of the ``routed`` tokens: the
    probability that an expert gets at least one token, if a step's tokens per expert are Poisson."""
    return -np.expm1(-per_step * routed / np.maximum(routed.sum(axis=1, keepdims=True), 1.0))


class Forecast:
    """Forecasts activations from activation rates over several time scales and from the ``Context``.

    It learns the weight of each from the traffic, by least-squares temporal differences (Bradtke and Barto, Machine Learning
    22, 1996) pooled over all experts. So request-dependent and stationary routing need no different settings. It keeps the sums
    separate by power of the discount, so the horizon may change.
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
        """The number of observed transitions, and of their steps, both decayed."""

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
        """Count prefill tokens ``[layers, experts]`` as decode steps with the same mix of experts: at most
        ``PREFILL_PRIOR_STEPS``, and only in the time scales longer than that."""
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
        """The number of steps in which an average expert is activated ``horizon_activations`` times."""
        return 1.0 + min(self._tuning.horizon_activations / max(self._mean, 1e-9), MAX_HORIZON_STEPS)

    def activations(self, horizon: float) -> np.ndarray:
        """``[layers, experts]``: expected future activations, discounted with a mean of ``horizon`` steps."""
        weights = np.zeros(len(self._features))
        transitions, _ = self._transitions
        if transitions:
            discount = self._discount(horizon)
            square = self._now_now - discount * self._now_next
            ridge = (RIDGE + RIDGE_TRANSITIONS / transitions) * np.trace(square) / len(square) + 1e-9
            reward = self._now_rate * (1.0 - discount) * horizon
            weights = np.linalg.solve(square + ridge * np.eye(len(square)), reward)
        activations = weights.astype(np.float32) @ self._features
        # No true value is larger. Negative ones need no bound: what saves nothing is never promoted.
        return np.minimum(activations, horizon).reshape(self._candidate.shape)

    def _describe(self) -> np.ndarray:
        """The features: each scale's rate minus the next longer one's, the longest rate, the mean, the context."""
        features = np.empty_like(self._features)
        np.subtract(self._rates[:-1], self._rates[1:], out=features[:-3])
        features[-3] = self._rates[-1]
        features[-2] = self._mean * self._candidate.ravel()
        features[-1] = self._context.activations(self._discount(self.horizon()))
        return features

    def _discount(self, horizon: float) -> float:
        """The discount for one transition."""
        transitions, steps = self._transitions
        return (1.0 - 1.0 / horizon) ** (steps / transitions if transitions else 1.0)
