"""Forecasts an expert's activations from the other experts in use: experts of one topic are activated together, and the experts
of one token predict those of the next.

Pure: arrays in, arrays out. Experts are numbered across all layers, ``0..size``.
"""

from __future__ import annotations

import numpy as np

SCALES = np.array([1.0, 4.0, 16.0])
"""The time constants, in decode steps, over which the use of experts is averaged."""
MEAN_STEPS = 256.0
"""The time constant, in decode steps, of the long-run mean. The context is the deviation from it."""
RIDGE = 0.03
RIDGE_TRANSITIONS = 32.0
"""Ridge regularisation relative to the mean square of the context: a constant part, and a part equal to this many observed
transitions without any connection."""


class Context:
    """Learns, for each expert, how its future activations depend on the recently used experts of all layers.

    Use is projected on random directions. These preserve distances well enough (Achlioptas, Journal of Computer and System
    Sciences 66, 2003) and, unlike principal components, never change under the learned weights. The weights are learned by
    least-squares temporal differences (Bradtke and Barto, Machine Learning 22, 1996); all experts share one matrix.
    """

    def __init__(self, size: int, directions: int):
        """``size``: the number of experts. 0 ``directions`` turn the context off."""
        self._signs = 2 * np.random.default_rng(0).integers(0, 2, (size, directions), dtype=np.int8) - np.int8(1)
        self._scales = np.array([*SCALES, MEAN_STEPS])
        self._means = np.zeros((len(self._scales), directions))
        width = len(SCALES) * directions
        self._now = np.zeros(width)
        self._now_now = np.zeros((width, width))
        self._now_next = np.zeros((width, width))
        self._now_activation = np.zeros((size, width), dtype=np.float32)
        """Each expert's sum of the contexts before its activations, divided by ``_weight``."""
        self._weight = 1.0
        self._transitions = 0.0

    def observe(self, rate: np.ndarray, steps: float, seen: float, decay: float) -> None:
        """Take each expert's activations per step, ``rate`` (float ``[size]``), over ``steps`` steps after ``seen`` earlier
        ones. ``decay`` scales all earlier sums."""
        used = np.flatnonzero(rate)
        before = self._now
        share = np.maximum(-np.expm1(-steps / self._scales), steps / (seen + steps))
        share[0] = 1.0  # the last step alone
        self._means += share[:, None] * (rate[used] @ self._signs[used] - self._means)
        self._now = (self._means[:-1] - self._means[1:]).ravel()
        if not seen:
            return
        self._now_now = decay * self._now_now + np.outer(before, before)
        self._now_next = decay * self._now_next + np.outer(before, self._now)
        self._transitions = decay * self._transitions + 1.0
        self._weight *= decay
        if self._weight < 1e-3:
            self._now_activation *= np.float32(self._weight)
            self._weight = 1.0
        self._now_activation[used] += (rate[used] / self._weight).astype(np.float32)[:, None] * before.astype(np.float32)

    def activations(self, discount: float) -> np.ndarray:
        """float32 ``[size]``: how far future activations deviate from the long-run mean, averaged over transitions, with each
        later transition discounted by ``discount``."""
        if not self._transitions or not self._now.size:
            return np.zeros(len(self._signs), dtype=np.float32)
        square = self._now_now - discount * self._now_next
        ridge = (RIDGE + RIDGE_TRANSITIONS / self._transitions) * np.trace(square) / len(square) + 1e-9
        weights = np.linalg.solve(square.T + ridge * np.eye(len(square)), self._now)
        return self._now_activation @ ((1.0 - discount) * self._weight * weights).astype(np.float32)
