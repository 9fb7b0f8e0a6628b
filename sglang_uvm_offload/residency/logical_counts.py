"""The routing that one rank counted, by the checkpoint's expert, however often SGLang rearranged the places."""

from __future__ import annotations

import dataclasses

import numpy as np

from sglang_uvm_offload.expert_location import by_expert
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import RoutingCounts


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


def rederived(counted: RoutingCounts, by_place: np.ndarray, model: ModelExperts, changed: np.ndarray) -> RoutingCounts:
    """``counted`` with the counts of routed experts replaced by ``by_place`` in the layers ``changed`` (``bool[layers]``)."""
    counts = counted.counts.copy()
    for index in np.flatnonzero(changed):
        places = len(model.layers[index].location.places)
        counts[index, :, :, :places] = by_place[index, :, :, :places]
    return dataclasses.replace(counted, counts=counts)
