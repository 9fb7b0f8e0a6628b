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

from sglang_uvm_offload.forecast import PREFILL_PRIOR_STEPS, TUNING, Forecast, Tuning, spread

PATIENT_EVERY_STEPS = 64
"""How often small differences are looked for."""
SEED_STEPS = 256.0
"""How many decode steps a profile is worth, however many it saw: live traffic overrules it in about as many."""


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
    return (touches + strength * spread(per_step, routed)) / np.maximum(decode_steps + strength, 1.0)


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
    one compares the touches that are forecast until an average expert is touched ``horizon_touches`` times. The patient one
    sees small differences too, where all time scales agree about them, and lets them pay back over ``patient_steps``.
    """

    def __init__(
        self,
        capacity: np.ndarray,
        expert_bytes: np.ndarray,
        candidate: np.ndarray,
        per_layer: Literal["uniform", "global"] = "global",
        floor: int = 1,
        move_cost: float = 1.0,
        tuning: Tuning = TUNING,
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
        self._tuning = tuning
        self._threshold = tuning.hysteresis * move_cost
        self._forecast = Forecast(candidate, tuning)
        self._patient_at = float(PATIENT_EVERY_STEPS)

    def seed(self, touches: np.ndarray, steps: float, prefill_routed: np.ndarray) -> None:
        """What an earlier run counted, to be observed before anything else: it weighs ``SEED_STEPS`` decode steps at most."""
        weight = min(1.0, SEED_STEPS / steps) if steps > 0 else 1.0
        self.observe(touches * weight, steps * weight, prefill_routed)
        self._patient_at = self._forecast.steps + PATIENT_EVERY_STEPS

    def observe(self, touches: np.ndarray, steps: float, prefill_routed: np.ndarray | None = None) -> None:
        """What was counted since the last call: ``touches`` of each expert in ``steps`` decode steps, and the prefill tokens
        routed to it. Without either nothing changes: idle time forgets nothing."""
        if touches.shape != self._candidate.shape:
            raise ValueError(f"touches {touches.shape} are not {self._candidate.shape}")
        if prefill_routed is not None and prefill_routed.any():
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
            chosen = self._choose(self._tuning.patient_steps * np.where(chosen, high, low), chosen)
        promote = chosen & ~resident
        if (promote * self._bytes).sum() > max_bytes:
            promote = self._affordable(promote, saved, max_bytes)
            chosen = self._pack(saved, resident | promote, resident)
        elif look_patiently:
            self._patient_at = self._forecast.steps + PATIENT_EVERY_STEPS
        return Plan(chosen & ~resident, resident & ~chosen)

    def _choose(self, saved: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """The candidates that save most, where a resident counts ``threshold`` more: so an expert replaces another only if
        it saves so much more than that one, and fills a free place only if it saves so much."""
        worthy = self._candidate & (resident | (saved > self._threshold))
        return self._pack(np.where(resident, saved + self._threshold, saved), worthy, resident)

    def _pack(self, key: np.ndarray, candidate: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """As many candidates as there is room for, those with the largest key. ``resident`` is among the candidates."""
        return self._pack_layers(key, candidate, resident) if self._uniform else self._pack_pool(key, candidate, resident)

    def _pack_layers(self, key: np.ndarray, candidate: np.ndarray, resident: np.ndarray) -> np.ndarray:
        best_newcomer = np.where(candidate & ~resident, key, -np.inf).max(axis=1, initial=-np.inf)
        least_resident = np.where(resident, key, np.inf).min(axis=1, initial=np.inf)
        contested = (best_newcomer >= least_resident) | (resident.sum(axis=1) != self._capacity)
        chosen = resident.copy()
        chosen[contested] = candidate[contested] & (
            _rank(np.where(candidate, key, -np.inf)[contested]) < self._capacity[contested, None]
        )
        return chosen

    def _pack_pool(self, key: np.ndarray, candidate: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """Sorting all experts takes most of a decision. So only those are sorted whose place is contested: residents that some
        newcomer beats, and newcomers that beat some resident or find room."""
        newcomer = candidate & ~resident
        room = self._budget - int(self._bytes[resident].sum())
        if room < 0:
            return self._pack_floors(key, candidate)
        chosen = resident & (key > key[newcomer].max(initial=-np.inf))
        contested = candidate & ~chosen
        if room < self._bytes.min(initial=self._budget + 1):
            contested &= key >= key[resident].min(initial=np.inf)
        self._fill(chosen, np.where(contested, key, -np.inf), contested)
        enough = chosen.sum(axis=1) >= np.minimum(self._floor, candidate.sum(axis=1))
        return chosen if enough.all() else self._pack_floors(key, candidate)

    def _pack_floors(self, key: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        """The same where a layer's floor decides: its best ones come before all others."""
        key = np.where(candidate, key, -np.inf)
        key[candidate & (_rank(key) < self._floor[:, None])] = np.inf
        chosen = np.zeros(key.shape, dtype=bool)
        self._fill(chosen, key, candidate)
        return chosen

    def _fill(self, chosen: np.ndarray, key: np.ndarray, candidate: np.ndarray) -> None:
        """Add candidates to ``chosen``, the largest key first, until the next one exceeds the budget."""
        index = np.flatnonzero(candidate)
        ranking = index[np.argsort(-key.ravel()[index], kind="stable")]
        used = self._bytes[chosen].sum() + np.cumsum(self._bytes.ravel()[ranking])
        chosen.ravel()[ranking[used <= self._budget]] = True

    def _affordable(self, promote: np.ndarray, saved: np.ndarray, max_bytes: float) -> np.ndarray:
        """Those of ``promote`` that save most and take at most ``max_bytes`` together."""
        ranking = np.argsort(np.where(promote, -saved, np.inf), axis=None, kind="stable")[: promote.sum()]
        kept = np.zeros_like(promote)
        kept.ravel()[ranking[np.cumsum(self._bytes.ravel()[ranking]) <= max_bytes]] = True
        return kept


def _rank(key: np.ndarray) -> np.ndarray:
    """Each expert's place in its layer, 0 for the largest key, then the lower id."""
    order = np.argsort(-key, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(key.shape[1]), key.shape), axis=1)
    return rank
