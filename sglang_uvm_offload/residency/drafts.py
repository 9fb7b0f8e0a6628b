"""Draft models with offloaded experts. Their residents are chosen once, after the warm-up, from what drafts use."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import Mover
from sglang_uvm_offload.residency.observer import Observer
from sglang_uvm_offload.residency.residents import BroadcastDecision
from sglang_uvm_offload.residency.selection import best_residents, hit_rate
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)


@dataclass
class _Draft:
    model: ModelExperts
    observer: Observer
    chosen_at: RoutingCounts
    """The counts when residents were last chosen, or at the start."""
    residents: np.ndarray
    """``bool[extents]``: those that the last move makes."""


@dataclass(frozen=True)
class DraftMove:
    """The residents that a draft model is to have: ``after``, ``bool[extents]``, for the routing ``seen``."""

    model: ModelExperts
    seen: RoutingCounts
    after: np.ndarray

    def make(self, mover: Mover) -> str | None:
        """Runs where the target's moves do; returns the fault that ended moving, if any."""
        started = time.perf_counter()
        routed, share = self.seen.routed(), self.model.resident_share
        reached = hit_rate(routed, share(self.model.resident_extents()))
        moved = mover.move(self.model.by_layer(self.after), show=False)
        logger.info(
            "Expert offload: residents of the draft model chosen from %d of its steps: hit rate of these %.1f %% before, "
            "%.1f %% after; %s moved in %.2f s",
            sum(self.seen.steps),
            100 * reached,
            100 * hit_rate(routed, share(self.model.resident_extents())),
            size(moved),
            time.perf_counter() - started,
        )
        return mover.fault


class Drafts:
    """Those of one rank: multi-layer speculation loads a model for each layer. All ranks that hold shards of the same experts
    call ``choose`` before the same step."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self.due_at: int | None = None
        """Of how many tokens residents are chosen; None: not again."""

    def begin(self, models: Iterable[ModelExperts]) -> None:
        """The server begins to serve: what ran before, to capture graphs, is none of what drafts use."""
        for model in models:
            if model.draft and model.counters is not None and model.offloaded_bytes().any():
                observer = Observer(model.counters, model)
                self._drafts.append(_Draft(model, observer, observer.ledger.counted, model.resident_extents()))

    @property
    def any(self) -> bool:
        """Whether a draft model has offloaded experts."""
        return bool(self._drafts)

    def due(self, tokens: int) -> bool:
        return self.any and self.due_at is not None and tokens >= self.due_at

    def choose(self, broadcast_decision: BroadcastDecision) -> list[DraftMove]:
        """The residents for the routing since they were last chosen. Waits for the device."""
        self.due_at = None
        return [self._chosen(draft, broadcast_decision) for draft in self._drafts]

    def _chosen(self, draft: _Draft, broadcast_decision: BroadcastDecision) -> DraftMove:
        model, before = draft.model, draft.residents
        now = model.resident_extents()
        if now.shape != before.shape:  # an update of the weights has replaced tensors
            before = now
        draft.observer.catch_up()
        total = draft.observer.ledger.counted
        seen, draft.chosen_at = total.since(draft.chosen_at), total
        draft.residents = broadcast_decision(lambda: best_residents(model, seen, before))
        return DraftMove(model, seen, draft.residents)

    def ledgers(self) -> Sequence[Ledger]:
        """Totals up to the last step launched. Waits for the device."""
        for draft in self._drafts:
            draft.observer.catch_up()
        return [draft.observer.ledger for draft in self._drafts]
