"""Which experts should be resident. Pure: arrays and state in, moves out; no clock, no device, no log.

Arrays are ``[layers, experts]`` unless stated. Every rank that sees the same counts decides alike: nothing here depends on
anything but the arguments.

What is minimised is the bytes over the link: an offloaded expert is read once by each decode step that activates it, and moving
an expert into VRAM costs ``move_cost`` reads of it. So a promotion has to save more reads than it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.policy.forecast import TUNING, Forecast, Tuning
from sglang_uvm_offload.policy.ranking import rank

SEED_STEPS = 256.0
"""How many decode steps a profile is worth, however many it saw: live traffic overrules it in about as many."""


@dataclass(frozen=True)
class Moves:
    """What to move, ``bool[layers, experts]``; no expert is in both."""

    promote: np.ndarray
    demote: np.ndarray


class AdaptivePolicy:
    """Follows the traffic: promotes an expert when the reads that this saves pay for the move, and else holds still.

    ``observe`` takes what the counters saw since the last call, ``plan`` says what to move now: it compares the activations
    that are forecast until an average expert is activated ``horizon_activations`` times.
    """

    def __init__(
        self,
        capacity: np.ndarray,
        expert_bytes: np.ndarray,
        candidate: np.ndarray,
        floor: int = 1,
        move_cost: float = 1.0,
        tuning: Tuning = TUNING,
    ):
        """``capacity`` int ``[layers]``: the residents of each layer under an even split; their bytes are one budget over all
        layers, of which each keeps at least ``floor`` residents. ``expert_bytes`` int ``[layers]``. ``candidate``: the
        experts there are to choose from, without always-resident ones and slots that are no expert. ``move_cost``: what
        promoting an expert and demoting another cost, in reads of an expert. Raises ``ValueError`` for what does not fit
        together.
        """
        layers = candidate.shape[:1]
        if candidate.ndim != 2 or capacity.shape != layers or expert_bytes.shape != layers:
            raise ValueError(
                f"capacity {capacity.shape}, expert_bytes {expert_bytes.shape} and candidate {candidate.shape} "
                "do not fit together"
            )
        if (capacity < 0).any() or (expert_bytes <= 0).any() or floor < 0 or not move_cost > 0:
            raise ValueError("capacity and floor must be at least 0, expert_bytes and move_cost more")
        self._candidate = candidate.copy()
        capacity = np.minimum(capacity, candidate.sum(axis=1))
        self._bytes = np.broadcast_to(expert_bytes[:, None], candidate.shape)
        self._budget = int(capacity @ expert_bytes)
        self._floor = np.minimum(floor, capacity)
        self._threshold = tuning.hysteresis * move_cost
        self._forecast = Forecast(candidate, tuning)

    def seed(self, activations: np.ndarray, steps: float, prefill_routed: np.ndarray) -> None:
        """What an earlier run counted, to be observed before anything else: it weighs ``SEED_STEPS`` decode steps at most."""
        weight = min(1.0, SEED_STEPS / steps) if steps > 0 else 1.0
        self.observe(activations * weight, steps * weight, prefill_routed)

    def observe(self, activations: np.ndarray, steps: float, prefill_routed: np.ndarray | None = None) -> None:
        """What was counted since the last call: ``activations`` of each expert in ``steps`` decode steps, and the prefill
        tokens routed to it. Without either nothing changes: idle time forgets nothing."""
        if activations.shape != self._candidate.shape:
            raise ValueError(f"activations {activations.shape} are not {self._candidate.shape}")
        if prefill_routed is not None and prefill_routed.any():
            self._forecast.hint(prefill_routed)
        if steps > 0:
            self._forecast.observe(activations, steps)

    def decide(self, resident: np.ndarray, max_bytes: float = np.inf) -> Moves:
        """What to move now that ``resident`` experts are in VRAM, promoting at most ``max_bytes``: the best ones first."""
        resident = resident & self._candidate
        saved = self._forecast.activations(self._forecast.horizon())
        chosen = self._choose(saved, resident)
        promote = chosen & ~resident
        if (promote * self._bytes).sum() > max_bytes:
            promote = self._affordable(promote, saved, max_bytes)
            chosen = self._pack(saved, resident | promote, resident)
        return Moves(chosen & ~resident, resident & ~chosen)

    def _choose(self, saved: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """The candidates that save most, where a resident counts ``threshold`` more: so an expert replaces another only if
        it saves so much more than that one, and fills a free place only if it saves so much."""
        worthy = self._candidate & (resident | (saved > self._threshold))
        return self._pack(np.where(resident, saved + self._threshold, saved), worthy, resident)

    def _pack(self, key: np.ndarray, candidate: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """As many candidates as there is room for, those with the largest key. ``resident`` is among the candidates.

        Sorting all experts takes most of a decision. So only those are sorted whose place is contested: residents that some
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
        key[candidate & (rank(key) < self._floor[:, None])] = np.inf
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
