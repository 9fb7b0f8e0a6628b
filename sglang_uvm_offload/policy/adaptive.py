"""Which experts should be resident. Pure: arrays and state in, moves out; no clock, no device, no log.

Arrays are ``[layers, experts]`` unless stated. Results depend on the arguments alone, so every rank with the same counts makes
the same decision.

The policy minimises bytes over the link. Each decode step that activates an offloaded expert reads it once, and moving an
expert into VRAM costs ``move_cost`` reads of it. So a promotion must save more reads than it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.policy.forecast import TUNING, Forecast, Tuning
from sglang_uvm_offload.policy.ranking import rank

SEED_STEPS = 256.0
"""The weight of a profile in decode steps, however many it counted: live traffic outweighs it after about as many."""


@dataclass(frozen=True)
class Moves:
    """Experts to promote and to demote, ``bool[layers, experts]``; no expert is in both."""

    promote: np.ndarray
    demote: np.ndarray


class AdaptivePolicy:
    """Follows the traffic: promotes an expert when the reads it should save outweigh the move, else moves nothing.

    ``observe`` takes the counts since the last call. ``decide`` returns the moves to make now: it compares forecast activations
    over the time in which an average expert is activated ``horizon_activations`` times.
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
        """``capacity`` int ``[layers]``: residents of each layer under an even split; their bytes are one budget over all
        layers, and each layer keeps at least ``floor`` residents. ``expert_bytes`` int ``[layers]``. ``candidate``: the
        experts to choose from, without always-resident ones and empty slots. ``move_cost``: the cost of promoting one expert
        and demoting another, in reads of an expert. Raises ``ValueError`` for arguments that do not match.
        """
        layers = candidate.shape[:1]
        if candidate.ndim != 2 or capacity.shape != layers or expert_bytes.shape != layers:
            raise ValueError(
                f"capacity {capacity.shape}, expert_bytes {expert_bytes.shape} and candidate {candidate.shape} do not match"
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
        """Observe the counts of an earlier run, before any others. They weigh at most ``SEED_STEPS`` decode steps."""
        weight = min(1.0, SEED_STEPS / steps) if steps > 0 else 1.0
        self.observe(activations * weight, steps * weight, prefill_routed)

    def observe(self, activations: np.ndarray, steps: float, prefill_routed: np.ndarray | None = None) -> None:
        """Take the counts since the last call: ``activations`` of each expert in ``steps`` decode steps, and the prefill
        tokens routed to it. Without either nothing changes: idle time forgets nothing."""
        if activations.shape != self._candidate.shape:
            raise ValueError(f"activations {activations.shape} are not {self._candidate.shape}")
        if prefill_routed is not None and prefill_routed.any():
            self._forecast.hint(prefill_routed)
        if steps > 0:
            self._forecast.observe(activations, steps)

    def decide(self, resident: np.ndarray, max_bytes: float = np.inf) -> Moves:
        """The moves to make while ``resident`` experts are in VRAM. Promotes at most ``max_bytes``, the best experts first."""
        resident = resident & self._candidate
        saved = self._forecast.activations(self._forecast.horizon())
        chosen = self._choose(saved, resident)
        promote = chosen & ~resident
        if (promote * self._bytes).sum() > max_bytes:
            promote = self._affordable(promote, saved, max_bytes)
            chosen = self._pack(saved, resident | promote, resident)
        return Moves(chosen & ~resident, resident & ~chosen)

    def _choose(self, saved: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """The candidates that save most. A resident's savings count ``threshold`` more, so an expert must save that much more
        than the resident it replaces, and that much to fill a free place."""
        worthy = self._candidate & (resident | (saved > self._threshold))
        return self._pack(np.where(resident, saved + self._threshold, saved), worthy, resident)

    def _pack(self, key: np.ndarray, candidate: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """The candidates with the largest keys that fit the budget. ``resident`` is a subset of the candidates.

        Sorting all experts would take most of a decision's time, so only contested ones are sorted: residents that some
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
        """``_pack`` where floors bind: the best experts of each layer, up to its floor, come before all others."""
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
        """The experts of ``promote`` that save most, at most ``max_bytes`` together."""
        ranking = np.argsort(np.where(promote, -saved, np.inf), axis=None, kind="stable")[: promote.sum()]
        kept = np.zeros_like(promote)
        kept.ravel()[ranking[np.cumsum(self._bytes.ravel()[ranking]) <= max_bytes]] = True
        return kept
