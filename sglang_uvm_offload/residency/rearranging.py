"""Follows SGLang's rearrangements of experts while it serves (EPLB): maps counts and residents to the new places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sglang_uvm_offload.expert_location import ExpertLocation, by_expert, by_place
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import RoutingCounts

MEMORY_STEPS = 4096.0
"""The time constant, in steps, with which counts fade from one rearrangement to the next, because traffic changes."""

GatherCounts = Callable[[np.ndarray], list[np.ndarray]]
"""Gathers the argument from all ranks that share a layer's experts."""


class Rearranging:
    """All ranks that share the layers must call both methods before the same step."""

    def __init__(self, manager: OffloadManager):
        self.manager = manager
        self._total: RoutingCounts | None = None
        self._recent: RoutingCounts | None = None
        """Counts of all ranks by the checkpoint's expert, as of the last rearrangement: the total, and those of about the last
        ``MEMORY_STEPS`` steps."""

    def begin(self) -> None:
        """Account for all steps so far and wait for moves in progress. Call before SGLang rearranges experts."""
        self.manager.wait_for_moves()
        self.manager.ledger.catch_up()

    def end(self, locations: Sequence[ExpertLocation], gather: GatherCounts) -> None:
        """Call after SGLang rearranged the experts of the target's layers to ``locations``. Maps counts to the new places. If
        traffic or a profile chose the residents, chooses them again within each layer's VRAM."""
        manager, ledger, residents, target = self.manager, self.manager.ledger, self.manager.residents, self.manager.target
        own, counted, width = ledger.counted_by_expert(), ledger.counted, target.width
        changed = np.array([bool((a.experts != b.experts).any()) for a, b in zip(target.locations, locations, strict=True)])
        since = counted if residents.chosen_at is None else counted.since(residents.chosen_at)
        own_since = by_expert(since.counts, target.locations, target.num_logical)
        every, every_since = np.sum(gather(np.stack([own.counts, own_since])), axis=0)
        recent = self._fade_and_add(RoutingCounts(every, own.steps))
        for layer, location in zip(target.layers, locations, strict=True):
            layer.location = location
        seen = _rederived(counted, by_place(every, locations, width), target, changed)
        recent = RoutingCounts(by_place(recent.counts, locations, width), recent.steps)
        ledger.rearranged(own, seen)
        if residents.adaptation is not None:
            manager.follow_traffic(recent)
        chosen_from = residents.chosen_from(recent, manager.placement.profile_counts(target))
        if chosen_from is not None and manager.may_change:
            self._follow_experts(chosen_from, changed)
        if residents.chosen_at is not None:
            residents.chosen_at = seen.since(_rederived(since, by_place(every_since, locations, width), target, changed))

    def _follow_experts(self, seen: RoutingCounts, changed: np.ndarray) -> None:
        """Move to the best residents for ``seen`` in the layers that ``changed`` (``bool[layers]``)."""
        residents, layer = self.manager.residents, self.manager.target.extents.layer
        _, after = residents.decide(lambda before: np.where(changed[layer], residents.best_for(seen, before), before))
        residents.move_to(after)

    def _fade_and_add(self, total: RoutingCounts) -> RoutingCounts:
        """Update and return the recent counts. ``total``: the counts since the start."""
        new = total if self._total is None else total.since(self._total)
        if (past := self._recent) is not None:
            keep = float(np.exp(-sum(new.steps) / MEMORY_STEPS))
            steps = (round(past.steps[0] * keep) + new.steps[0], round(past.steps[1] * keep) + new.steps[1])
            new = RoutingCounts(np.rint(past.counts * keep).astype(np.int64) + new.counts, steps)
        self._total, self._recent = total, new
        return new


def _rederived(counted: RoutingCounts, by_place: np.ndarray, model: ModelExperts, changed: np.ndarray) -> RoutingCounts:
    """``counted`` with the counts of routed experts taken from ``by_place`` in the layers that ``changed``
    (``bool[layers]``)."""
    counts = counted.counts.copy()
    for index in np.flatnonzero(changed):
        places = len(model.layers[index].location.places)
        counts[index, :, :, :places] = by_place[index, :, :, :places]
    return dataclasses.replace(counted, counts=counts)
