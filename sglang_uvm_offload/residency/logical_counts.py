"""The routing that one rank counted, by the checkpoint's expert, however often SGLang rearranged the places."""

from __future__ import annotations

import dataclasses

import numpy as np

from sglang_uvm_offload.expert_location import by_expert
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import RoutingCounts

MEMORY_STEPS = 4096.0
"""The time constant, in steps, with which counts fade from one rearrangement to the next: traffic changes."""


class LogicalCounts:
    """Translates each interval's counts by the location of its time."""

    def __init__(self, model: ModelExperts):
        self._model = model
        self._until: np.ndarray | None = None
        """Int64 ``[layers, phase, kind, num_logical]``: up to the last rearrangement; None before the first."""
        self._since: np.ndarray | None = None
        """The counts by place then."""

    def of(self, counted: RoutingCounts) -> RoutingCounts:
        """``counted`` (by place, since the start) by the checkpoint's expert. The experts must lie where they lay while it was
        counted."""
        new = counted.counts if self._since is None else counted.counts - self._since
        found = by_expert(new, self._model.locations, self._model.num_logical)
        return RoutingCounts(found if self._until is None else self._until + found, counted.steps)

    def rearranged(self, own: RoutingCounts, counted: RoutingCounts) -> None:
        """Experts lie elsewhere now. ``own``: what ``of`` returned before; ``counted``: what the counts by place go on from."""
        self._until, self._since = own.counts, counted.counts


class RecentCounts:
    """The counts of about the last ``MEMORY_STEPS`` steps at the time of a rearrangement, by the checkpoint's expert."""

    def __init__(self) -> None:
        self._total: RoutingCounts | None = None
        self._recent: RoutingCounts | None = None

    def fade_and_add(self, total: RoutingCounts) -> RoutingCounts:
        """The recent counts, now that those since the start are ``total``."""
        new = total if self._total is None else total.since(self._total)
        if self._recent is not None:
            keep, past = float(np.exp(-sum(new.steps) / MEMORY_STEPS)), self._recent
            steps = (round(past.steps[0] * keep) + new.steps[0], round(past.steps[1] * keep) + new.steps[1])
            new = RoutingCounts(np.rint(past.counts * keep).astype(np.int64) + new.counts, steps)
        self._total, self._recent = total, new
        return new


def rederived(counted: RoutingCounts, by_place: np.ndarray, model: ModelExperts, changed: np.ndarray) -> RoutingCounts:
    """``counted`` with the counts of routed experts replaced by ``by_place`` in the layers ``changed`` (``bool[layers]``)."""
    counts = counted.counts.copy()
    for index in np.flatnonzero(changed):
        places = len(model.layers[index].location.places)
        counts[index, :, :, :places] = by_place[index, :, :, :places]
    return dataclasses.replace(counted, counts=counts)
