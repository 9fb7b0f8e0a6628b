"""Decides which experts should be resident. Pure: arrays and state in, moves out; no clock, no device, no log.

Counts are ``[layers, experts]``, residency is ``bool[extents]`` (``policy/extents``). Results depend only on the arguments, so
ranks with the same counts make the same decision.

The policy minimises bytes over the link. Each decode step that activates an offloaded expert reads it once, and moving bytes
into VRAM costs one read of them. So a promotion must save more reads than it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.policy.extents import Budget
from sglang_uvm_offload.policy.forecast import TUNING, Forecast, Tuning
from sglang_uvm_offload.policy.ranking import within_floor

SEED_STEPS = 256.0
"""The weight of a profile, in decode steps, however many steps it counted. Live traffic outweighs it after about as many."""


@dataclass(frozen=True)
class Moves:
    """Extents to promote and to demote, ``bool[extents]``. They are disjoint."""

    promote: np.ndarray
    demote: np.ndarray


class AdaptivePolicy:
    """Follows the traffic: promotes extents whose expected savings in reads outweigh the cost of the move.

    ``observe`` takes the counts since the last call. ``decide`` returns the moves to make now. It compares the activations that
    it forecasts for the time in which an average expert is activated ``horizon_activations`` times.
    """

    def __init__(self, budget: Budget, candidate: np.ndarray, tuning: Tuning = TUNING):
        """``candidate`` ``bool[layers, experts]``: the experts to forecast, without always-resident ones and padding."""
        self.budget = budget
        self._threshold = tuning.hysteresis
        self._forecast = Forecast(candidate, tuning)

    def seed(self, activations: np.ndarray, steps: float, prefill_routed: np.ndarray) -> None:
        """Start from the counts of an earlier run, which weigh at most ``SEED_STEPS`` decode steps."""
        weight = min(1.0, SEED_STEPS / steps) if steps > 0 else 1.0
        self.observe(activations * weight, steps * weight, prefill_routed)

    def observe(self, activations: np.ndarray, steps: float, prefill_routed: np.ndarray | None = None) -> None:
        """Take the counts since the last call: each expert's ``activations`` in ``steps`` decode steps, and the prefill tokens
        routed to it. Without either, nothing changes: idle time does not decay the counts. Raises ``ValueError`` if the shape
        is wrong."""
        if activations.shape != self.budget.extents.shape:
            raise ValueError(f"activations {activations.shape} are not {self.budget.extents.shape}")
        if prefill_routed is not None and prefill_routed.any():
            self._forecast.hint(prefill_routed)
        if steps > 0:
            self._forecast.observe(activations, steps)

    def decide(self, resident: np.ndarray, max_bytes: float = np.inf) -> Moves:
        """The moves to make if the extents ``resident`` are in VRAM. Promotes at most ``max_bytes``, the best extents first."""
        resident = resident & self.budget.movable
        saved = self.budget.extents.density(self._forecast.activations(self._forecast.horizon()))
        chosen = self._choose(saved, resident)
        promote = chosen & ~resident
        if self.budget.extents.total(promote) > max_bytes:
            promote = self._affordable(promote, saved, max_bytes)
            chosen = self._pack(saved, resident | promote, resident)
        return Moves(chosen & ~resident, resident & ~chosen)

    def _choose(self, saved: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """The extents that save most per byte. A resident's savings count ``threshold`` more, so an extent must save that much
        more than the resident it replaces, and at least that much to use free VRAM."""
        worthy = self.budget.movable & (resident | (saved > self._threshold))
        return self._pack(np.where(resident, saved + self._threshold, saved), worthy, resident)

    def _pack(self, key: np.ndarray, candidate: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """The candidates with the largest keys that fit the budget. ``resident`` is a subset of the candidates.

        Sorting all extents would take most of a decision's time, so this sorts only contested ones: residents that some
        newcomer beats, and newcomers that beat some resident or fit in free VRAM."""
        extents = self.budget.extents
        newcomer = candidate & ~resident
        room = self.budget.nbytes - extents.total(resident)
        if room < 0:
            return self._pack_floors(key, candidate)
        chosen = resident & (key > key[newcomer].max(initial=-np.inf))
        contested = candidate & ~chosen
        contested &= (key >= key[resident].min(initial=np.inf)) | (extents.nbytes <= room)
        self._fill(chosen, key, contested)
        kept, most = extents.bytes_by_layer(chosen), extents.bytes_by_layer(candidate)
        return chosen if (kept >= np.minimum(self.budget.floor, most)).all() else self._pack_floors(key, candidate)

    def _pack_floors(self, key: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        """``_pack`` where floors bind: each layer's best extents, up to its floor, come before all others."""
        first = within_floor(self.budget.extents, key, self.budget.floor, candidate)
        chosen = np.zeros_like(candidate)
        self._fill(chosen, np.where(first, np.inf, key), candidate)
        return chosen

    def _fill(self, chosen: np.ndarray, key: np.ndarray, candidate: np.ndarray) -> None:
        """Add candidates to ``chosen``, largest key first, until the next one exceeds the budget; then smaller ones that still
        fit."""
        nbytes = self.budget.extents.nbytes
        index = np.flatnonzero(candidate)
        order, left = index[np.argsort(-key[index], kind="stable")], self.budget.nbytes - self.budget.extents.total(chosen)
        while (order := order[nbytes[order] <= left]).size:
            fits = np.cumsum(nbytes[order]) <= left
            chosen[order[fits]] = True
            left -= int(nbytes[order[fits]].sum())
            order = order[~fits]

    def _affordable(self, promote: np.ndarray, saved: np.ndarray, max_bytes: float) -> np.ndarray:
        """The extents of ``promote`` that save most per byte, at most ``max_bytes`` together."""
        index = np.flatnonzero(promote)
        ranking = index[np.argsort(-saved[index], kind="stable")]
        kept = np.zeros_like(promote)
        kept[ranking[np.cumsum(self.budget.extents.nbytes[ranking]) <= max_bytes]] = True
        return kept
