"""SGLang rearranges experts while it serves (EPLB): counts follow them, and so do residents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang_uvm_offload.expert_location import ExpertLocation, by_expert, by_place
from sglang_uvm_offload.residency.logical_counts import RecentCounts, rederived
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.stage import Stage
from sglang_uvm_offload.routing.counts import RoutingCounts

GatherCounts = Callable[[np.ndarray], list[np.ndarray]]
"""Returns the argument of each of the ranks that share the experts of a layer between them."""


class Rearranging:
    """Every rank that shares the layers must call both methods before the same step."""

    def __init__(self, manager: OffloadManager):
        self.manager = manager
        self._recent = RecentCounts()

    def begin(self) -> None:
        """Call it before SGLang rearranges experts: account for all steps so far, and wait for the moves under way."""
        self.manager.wait_for_moves()
        self.manager.observer.catch_up()

    def end(self, locations: Sequence[ExpertLocation], gather: GatherCounts) -> None:
        """SGLang has rearranged experts since ``begin``: those of the target's layers are at ``locations`` now. Counts follow
        them, and so do residents, in the VRAM of each layer, where traffic or a profile chose them."""
        manager, chooser = self.manager, self.manager.chooser
        target, counted = manager.target, manager.ledger.counted
        own = manager.logical.of(counted)
        changed = np.array([bool((a.experts != b.experts).any()) for a, b in zip(target.locations, locations, strict=True)])
        earlier, tokens = chooser.chosen_at
        since = counted if earlier is None else counted.since(earlier)
        own_since = by_expert(since.counts, target.locations, target.num_logical)
        every, every_since = np.sum(gather(np.stack([own.counts, own_since])), axis=0)
        recent = self._recent.fade_and_add(RoutingCounts(every, own.steps))
        for layer, location in zip(target.layers, locations, strict=True):
            layer.location = location
        seen = rederived(counted, by_place(every, locations, target.width), target, changed)
        recent = RoutingCounts(by_place(recent.counts, locations, target.width), recent.steps)
        manager.logical.rearranged(own, seen)
        manager.observer.go_on_from(seen)
        if manager.residents.adaptation is not None:
            manager.follow_traffic(recent)
        chosen_from = chooser.chosen_from(recent, manager.placement.profile_counts(target))
        if chosen_from is not None and manager.stage not in (Stage.PAUSED, Stage.ASLEEP):
            self._follow_experts(chosen_from, changed)
        if earlier is not None:
            since = rederived(since, by_place(every_since, locations, target.width), target, changed)
            chooser.chosen_at = seen.since(since), tokens

    def _follow_experts(self, seen: RoutingCounts, changed: np.ndarray) -> None:
        """Move to the residents that are best for ``seen`` in the layers ``changed`` (``bool[layers]``)."""
        residents, layer = self.manager.residents, self.manager.target.extents.layer
        _, after = residents.decide(lambda before: np.where(changed[layer], residents.best_for(seen, before), before))
        residents.move_to(after)
