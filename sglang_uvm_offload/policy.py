"""Which experts should be resident. Pure: arrays and state in, a plan out; no clock, no device, no log.

Arrays are ``[layers, experts]`` unless stated. Every rank that sees the same counts decides alike: nothing here depends on
anything but the arguments.

What is minimised is the bytes over the link: an offloaded expert is read once by each decode step that touches it, and moving
an expert into VRAM costs ``move_cost`` reads of it. So a promotion has to save more reads than it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

PREFILL_PRIOR_STEPS = 32.0
"""How many decode steps the routing of prefill tokens is worth, however many prefill tokens there were."""

SCALES = 4.0 ** np.arange(7)
"""The time constants, in decode steps, of the touch rates that are kept of each expert."""
PRIOR_STEPS = 32.0
"""An expert's first rates are drawn to the mean rate as if it had been seen at that rate for so many steps."""
MEMORY_STEPS = 4096.0
"""The time constant of what is learned about how rates persist."""
MEAN_STEPS = 256.0
"""The time constant of the mean touch rate of all experts."""
RIDGE = 1e-3
RIDGE_TRANSITIONS = 4.0
"""How much the learned weights are drawn to zero, against the mean square of the features: always, and as if so many of the
transitions seen had shown that nothing persists."""
HORIZON_TOUCHES = 2.0
"""A promotion must pay back in the time in which an average expert is touched so often."""
MAX_HORIZON_STEPS = 1024.0
HYSTERESIS = 1.5
"""A promotion must pay back its cost so many times."""
PATIENT_STEPS = 1024.0
"""The horizon for a difference in rates on which every scale from ``PATIENT_SCALE`` on agrees."""
PATIENT_SCALE = 3
PATIENT_ERRORS = 2.0
"""And by so many standard errors of either rate."""
PATIENT_EVERY_STEPS = 64
"""How often such differences are looked for."""


def score(decode_touches: np.ndarray, decode_steps: float, prefill_routed: np.ndarray) -> np.ndarray:
    """Expected touches of each expert per decode step, float64.

    ``decode_touches`` counts the decode steps, of ``decode_steps``, that used the expert; ``prefill_routed`` the prefill
    tokens routed to it. The rate seen in decode is mixed with a prior worth ``PREFILL_PRIOR_STEPS`` steps: a layer's
    touches per step, spread over its experts by their share of the prefill tokens. Without decode steps the ranking is
    that of the prefill tokens; with many the prior vanishes.
    """
    touches = np.asarray(decode_touches, dtype=np.float64)
    routed = np.asarray(prefill_routed, dtype=np.float64)
    tokens = routed.sum(axis=1, keepdims=True)
    per_step = touches.sum(axis=1, keepdims=True) / decode_steps if decode_steps else np.ones_like(tokens)
    strength = np.where(tokens > 0, PREFILL_PRIOR_STEPS, 0.0)
    return (touches + strength * _spread(per_step, routed)) / np.maximum(decode_steps + strength, 1.0)


def _spread(per_step: np.ndarray, routed: np.ndarray) -> np.ndarray:
    """A layer's touches per step (``[layers, 1]``) spread over its experts by their share of ``routed`` tokens: the chance of
    any token, if a step's tokens on an expert are Poisson."""
    return -np.expm1(-per_step * routed / np.maximum(routed.sum(axis=1, keepdims=True), 1.0))


def select(scores: np.ndarray, capacity: np.ndarray, resident: np.ndarray, pinned: np.ndarray) -> np.ndarray:
    """``bool``: the ``capacity[layer]`` experts of each layer with the highest scores, and all ``pinned`` ones.

    Pinned experts (fused shared experts) do not count against the capacity. Among equal scores a current resident stays,
    then the lower id comes first, so equal scores move nothing. Slots with a negative score are no experts (layers of
    different sizes share one array) and are never chosen. Raises ``ValueError`` for arguments whose shapes differ, or a
    score that is not a number.
    """
    if not scores.shape == resident.shape == pinned.shape or capacity.shape != scores.shape[:1]:
        raise ValueError(
            f"scores {scores.shape}, resident {resident.shape}, pinned {pinned.shape} and capacity {capacity.shape} "
            "do not fit together"
        )
    if np.isnan(scores).any():
        raise ValueError("a score is not a number")
    return top(scores, capacity, resident, ~pinned & (scores >= 0)) | pinned


def top(key: np.ndarray, capacity: np.ndarray, resident: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """``bool``: the ``capacity[layer]`` candidates of each layer with the largest key; among equals residents come first,
    then lower ids."""
    order = np.lexsort((~resident, -key, ~candidate), axis=-1)
    chosen = np.zeros(key.shape, dtype=bool)
    np.put_along_axis(chosen, order, np.arange(key.shape[1]) < capacity[:, None], axis=1)
    return chosen & candidate


@dataclass(frozen=True)
class Plan:
    """What to move, ``bool[layers, experts]``; no expert is in both."""

    promote: np.ndarray
    demote: np.ndarray


class AdaptivePolicy:
    """Follows the traffic: promotes an expert when the reads that this saves pay for the move, and else holds still.

    ``observe`` takes what the counters saw since the last call, ``plan`` says what to move now. Two rules promote. The prompt
    one compares the touches that are forecast until an average expert is touched ``HORIZON_TOUCHES`` times. The patient one
    sees small differences too, where all time scales agree about them, and lets them pay back over ``PATIENT_STEPS``.
    """

    def __init__(
        self,
        capacity: np.ndarray,
        expert_bytes: np.ndarray,
        candidate: np.ndarray,
        per_layer: Literal["uniform", "global"] = "global",
        floor: int = 1,
        move_cost: float = 1.0,
    ):
        """``capacity`` int ``[layers]``: the residents of each layer under an even split; ``global`` pools their bytes over
        the layers, and leaves each at least ``floor`` residents. ``expert_bytes`` int ``[layers]``. ``candidate``: the
        experts there are to choose from, without pinned ones and slots that are no expert. ``move_cost``: what promoting
        an expert and demoting another cost, in reads of an expert. Raises ``ValueError`` for what does not fit together.
        """
        layers = candidate.shape[:1]
        if candidate.ndim != 2 or capacity.shape != layers or expert_bytes.shape != layers:
            raise ValueError(
                f"capacity {capacity.shape}, expert_bytes {expert_bytes.shape} and candidate {candidate.shape} "
                "do not fit together"
            )
        if per_layer not in ("uniform", "global"):
            raise ValueError(f"per_layer must be uniform or global, not {per_layer}")
        if (capacity < 0).any() or (expert_bytes <= 0).any() or floor < 0 or not move_cost > 0:
            raise ValueError("capacity and floor must be at least 0, expert_bytes and move_cost more")
        self._candidate = candidate.copy()
        self._capacity = np.minimum(capacity, candidate.sum(axis=1))
        self._bytes = np.broadcast_to(expert_bytes[:, None], candidate.shape)
        self._budget = int(self._capacity @ expert_bytes)
        self._floor = np.minimum(floor, self._capacity)
        self._uniform = per_layer == "uniform"
        self._threshold = HYSTERESIS * move_cost
        self._forecast = Forecast(candidate)
        self._patient_at = float(PATIENT_EVERY_STEPS)

    def observe(self, touches: np.ndarray, steps: float, prefill_routed: np.ndarray | None = None) -> None:
        """What was counted since the last call: ``touches`` of each expert in ``steps`` decode steps, and the prefill tokens
        routed to it. Without either nothing changes: idle time forgets nothing."""
        if touches.shape != self._candidate.shape:
            raise ValueError(f"touches {touches.shape} are not {self._candidate.shape}")
        if prefill_routed is not None:
            self._forecast.hint(prefill_routed)
        if steps > 0:
            self._forecast.observe(touches, steps)

    def plan(self, resident: np.ndarray, max_bytes: float = np.inf) -> Plan:
        """What to move now that ``resident`` experts are in VRAM, promoting at most ``max_bytes``: the best ones first."""
        resident = resident & self._candidate
        horizon = self._forecast.horizon()
        saved = self._forecast.touches(horizon)
        chosen = self._choose(saved, resident)
        look_patiently = self._forecast.steps >= self._patient_at
        if look_patiently:
            low, high = self._forecast.bounds(saved / horizon)
            chosen = self._choose(PATIENT_STEPS * np.where(chosen, high, low), chosen)
        promote = chosen & ~resident
        if (promote * self._bytes).sum() > max_bytes:
            promote = self._affordable(promote, saved, max_bytes)
            chosen = self._pack(saved, resident | promote)
        elif look_patiently:
            self._patient_at = self._forecast.steps + PATIENT_EVERY_STEPS
        return Plan(chosen & ~resident, resident & ~chosen)

    def _choose(self, saved: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """The candidates that save most, where a resident counts ``threshold`` more: so an expert replaces another only if
        it saves so much more than that one, and fills a free place only if it saves so much."""
        worthy = self._candidate & (resident | (saved > self._threshold))
        return self._pack(np.where(resident, saved + self._threshold, saved), worthy)

    def _pack(self, key: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        """As many candidates as there is room for, those with the largest key."""
        key = np.where(candidate, key, -np.inf)
        order = np.argsort(-key, axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.broadcast_to(np.arange(key.shape[1]), key.shape), axis=1)
        if self._uniform:
            return candidate & (rank < self._capacity[:, None])
        key[candidate & (rank < self._floor[:, None])] = np.inf
        ranking = np.argsort(-key, axis=None, kind="stable")
        fits = np.cumsum(self._bytes.ravel()[ranking]) <= self._budget
        chosen = np.zeros(key.shape, dtype=bool)
        chosen.ravel()[ranking[fits]] = True
        return chosen & candidate

    def _affordable(self, promote: np.ndarray, saved: np.ndarray, max_bytes: float) -> np.ndarray:
        """Those of ``promote`` that save most and take at most ``max_bytes`` together."""
        ranking = np.argsort(np.where(promote, -saved, np.inf), axis=None, kind="stable")[: promote.sum()]
        kept = np.zeros_like(promote)
        kept.ravel()[ranking[np.cumsum(self._bytes.ravel()[ranking]) <= max_bytes]] = True
        return kept


class Forecast:
    """The touches to come, from touch rates over several time scales.

    How far each scale predicts is learned from the traffic itself, by least-squares temporal differences (Bradtke and Barto,
    Machine Learning 22, 1996) pooled over all experts: routing that follows the request and routing that is stationary
    need no different settings. The sums are kept apart by power of the discount, so that the horizon may change.
    """

    def __init__(self, candidate: np.ndarray):
        self.steps = 0.0
        self._candidate = candidate
        self._size = max(int(candidate.sum()), 1)
        self._mean = 0.0
        self._rates = np.zeros((len(SCALES), candidate.size), dtype=np.float32)
        features = len(SCALES) + 1
        self._features = np.zeros((features, candidate.size), dtype=np.float32)
        self._now_now = np.zeros((features, features))
        self._now_next = np.zeros((features, features))
        self._now_rate = np.zeros(features)
        self._transitions = np.zeros(2)
        """Decayed: how many transitions were seen, and their steps."""

    def observe(self, touches: np.ndarray, steps: float) -> None:
        rate = (np.where(self._candidate, touches, 0).ravel() / steps).astype(np.float32)
        mean = float(rate.sum()) / self._size
        if not self.steps and not self._rates.any():
            self._rates[:] = mean * self._candidate.ravel()
        share = np.maximum(-np.expm1(-steps / SCALES), steps / (self.steps + steps + PRIOR_STEPS))
        self._rates += share.astype(np.float32)[:, None] * (rate - self._rates)
        self._mean += max(-np.expm1(-steps / MEAN_STEPS), steps / (self.steps + steps)) * (mean - self._mean)
        before, self._features = self._features, self._describe()
        if self.steps:
            decay = np.exp(-steps / MEMORY_STEPS)
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
                scaled += -np.expm1(-steps / scale) * (_spread(per_step, routed) - scaled)
        self._features = self._describe()

    def horizon(self) -> float:
        """Steps in which an average expert is touched ``HORIZON_TOUCHES`` times."""
        return 1.0 + min(HORIZON_TOUCHES / max(self._mean, 1e-9), MAX_HORIZON_STEPS)

    def touches(self, horizon: float) -> np.ndarray:
        """``[layers, experts]``: expected touches from now on, discounted with a mean of ``horizon`` steps."""
        discount = 1.0 - 1.0 / horizon
        weights = np.zeros(len(self._features))
        transitions, steps = self._transitions
        if transitions:
            discount **= steps / transitions
            square = self._now_now - discount * self._now_next
            ridge = (RIDGE + RIDGE_TRANSITIONS / transitions) * np.trace(square) / len(square) + 1e-9
            reward = self._now_rate * (1.0 - discount) * horizon
            weights = np.linalg.solve(square + ridge * np.eye(len(square)), reward)
        return (weights.astype(np.float32) @ self._features).reshape(self._candidate.shape).astype(np.float64)

    def bounds(self, now: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The least and the most that ``now`` and the rates from ``PATIENT_SCALE`` on say, ``[layers, experts]`` each."""
        rates = self._rates[PATIENT_SCALE:].reshape(-1, *self._candidate.shape)
        evidence = min(self.steps, 2 * SCALES[-1])
        error = PATIENT_ERRORS * np.sqrt((rates[-1] + 1.0 / evidence) / evidence)
        return np.minimum(rates.min(axis=0), now) - error, np.maximum(rates.max(axis=0), now) + error

    def _describe(self) -> np.ndarray:
        """The features: by how much each scale's rate exceeds the next longer one's, the longest, and the mean rate."""
        mean = np.where(self._candidate.ravel(), self._mean, 0.0)
        return np.vstack([self._rates[:-1] - self._rates[1:], self._rates[-1:], mean[None]]).astype(np.float32)
