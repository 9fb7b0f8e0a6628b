"""What is resident when a model loads: the first N experts, those that a flag names, or in the room of N a profile's best."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.experts.layer import ChooseExtents
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.residency.model import ModelExperts, extents_of
from sglang_uvm_offload.residency.selection import hottest, rank_share
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.profile import Profile


@dataclass(frozen=True)
class LayerPlacement:
    """What of each tensor is resident at load, and which experts stay resident for good (``bool[num_experts]``; None: none)."""

    choose: ChooseExtents
    kept: np.ndarray | None = None


EVERYTHING = LayerPlacement(lambda layout: np.ones(layout.num_extents, dtype=bool))
"""For the layers of a draft model, unless a flag offloads some of its experts."""


class InitialPlacement:
    """Places the layers of the target model, one after the other. A layer that the ids or the profile lack gets the first N
    experts."""

    def __init__(self, config: OffloadConfig, profile: Profile | None, first: int = 0):
        """``first``: how many MoE layers earlier pipeline stages have."""
        self.config = config
        self.profile = profile
        self._first = self._next = first
        self._layers: list[int] = []

    def with_residents(self, num_resident: int) -> InitialPlacement:
        """The same with another number, from the first layer on."""
        return InitialPlacement(dataclasses.replace(self.config, num_resident=num_resident), self.profile, self._first)

    def profile_counts(self, model: ModelExperts) -> RoutingCounts | None:
        """The profile's counts for the layers of ``model``, by place; None without a profile."""
        if self.profile is None:
            return None
        rows = self.profile.model.rows([layer.layer_id for layer in model.layers])
        return self.profile.part(rows, model.locations, model.width)

    def of_layer(self, shard: LayerShard) -> LayerPlacement:
        index, self._next = self._next, self._next + 1
        layer_id, num_experts = shard.layer_id, shard.num_experts
        nth = self._layers.count(layer_id)
        self._layers.append(layer_id)
        shared, where = np.arange(num_experts) >= shard.routed, shard.located()
        chosen, past = self.config.resident_ids, self.profile
        named = np.zeros(num_experts, dtype=bool)
        if chosen is not None and chosen.has_layer(index):
            named[: shard.routed] = np.isin(where.ids, list(chosen.of_layer(index)))
            if self.config.adapt != "continuous":
                return LayerPlacement(lambda layout: layout.holding(named))
        kept, number = named.copy(), rank_share(self.config.num_resident, shard.ep_rank, shard.ep_size)
        named[np.flatnonzero(~named & ~shared)[: max(number - int(named.sum()), 0)]] = True
        row = None if past is None else past.model.row(layer_id, nth)
        if past is not None and row is not None and where.ids.max(initial=-1) < past.model.num_experts:
            seen = past.part([row], [where], num_experts)
            return LayerPlacement(lambda layout: _hottest_of(seen, layout, named, kept | shared), kept)
        return LayerPlacement(lambda layout: layout.holding(named), kept)


def _hottest_of(seen: RoutingCounts, layout: ExpertLayout, first: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """``bool[extents]``: the ones of a tensor that should serve the most activations, in the room of the experts ``first``.
    Extents of the experts ``kept``, and the edge, are there already."""
    movable = ~(layout.holding(kept) | layout.edge)
    there = layout.holding(first) & movable
    capacity = np.array([layout.taken_by(there)])
    return hottest(seen, extents_of([[layout]], layout.num_experts), capacity, there, movable)
