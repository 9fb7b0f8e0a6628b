"""What is resident when a model loads: the first N experts, those that a flag names, or in the room of N a profile's best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def ids_from(earlier: Sequence[int], first: int) -> int:
    """The number to add to the layer ids of a pipeline stage whose first MoE layer has the id ``first``, after stages with the
    layers ``earlier``. SGLang's models number decoder layers; its Transformers fallback numbers the MoE layers of each stage
    from 0."""
    return earlier[-1] + 1 if earlier and first <= earlier[-1] else 0


@dataclass(frozen=True)
class LayerPlacement:
    """What of each tensor is resident at load, and which experts stay resident for good (``bool[num_experts]``; None: none)."""

    choose: ChooseExtents
    kept: np.ndarray | None = None


EVERYTHING = LayerPlacement(lambda layout: np.ones(layout.num_extents, dtype=bool))
"""For the layers of a draft model, unless a flag offloads some of its experts."""


class InitialPlacement:
    """Places the layers of the target model one by one, as they are built. A layer that the ids or the profile lack gets the
    first N experts: whether they fit is checked once the whole model is built."""

    def __init__(self, config: OffloadConfig, profile: Profile | None, earlier: Callable[[], Sequence[int]] = tuple):
        """``earlier`` returns the MoE layers of earlier pipeline stages; it is called at the first layer."""
        self.config = config
        self.profile = profile
        self._earlier = earlier
        self._next: int | None = None
        self._from = 0
        self._layers: list[int] = []

    def profile_counts(self, model: ModelExperts) -> RoutingCounts | None:
        """The profile's counts for the layers of ``model``, by place; None without a profile."""
        if self.profile is None:
            return None
        rows = self.profile.model.rows([layer.layer_id for layer in model.layers])
        return self.profile.part(rows, model.locations, model.width)

    def of_layer(self, shard: LayerShard) -> LayerPlacement:
        if self._next is None:
            earlier = self._earlier()
            self._next, self._from = len(earlier), ids_from(earlier, shard.layer_id)
        index, self._next = self._next, self._next + 1
        layer_id, num_experts = shard.layer_id + self._from, shard.num_experts
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
