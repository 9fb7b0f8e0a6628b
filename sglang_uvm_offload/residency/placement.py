"""Chooses the residents at load: the first N experts, those that a flag names, or a profile's best in the same VRAM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.experts.layer import ChooseExtents
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.residency.model import ModelExperts, extents_of, hottest
from sglang_uvm_offload.residency.slot_split import pays_in_groups
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.profile import Profile


@dataclass(frozen=True)
class LayerPlacement:
    """Which extents of each tensor are resident at load, and which experts always stay (``bool[num_experts]``; None for
    none)."""

    choose: ChooseExtents
    kept: np.ndarray | None = None
    slots: int = 0
    grouped: bool = False
    """Whether residents are chosen by groups of experts, as ``ExpertLayer.place`` explains."""


EVERYTHING = LayerPlacement(lambda layout: np.ones(layout.num_extents, dtype=bool))


@dataclass(frozen=True)
class InitialPlacement:
    """The residents of the target model, for which the ids and the profile were checked (``plugin/rank/built_model``)."""

    config: OffloadConfig
    profile: Profile | None
    first: int = 0
    """The number of MoE layers in earlier pipeline stages."""
    converted_later: bool = False
    """Whether other tensors replace the experts' tensors after loading. Only those then move into the slots' pools."""
    keeps_first: bool = False
    """Whether the first of a layer's N experts always stays resident if the layer has no slots, because its kernels read it in
    every step, even if no token uses it."""

    def of_draft(self, number: int) -> InitialPlacement:
        """The placement of a draft model: the first ``number`` experts of each layer."""
        return InitialPlacement(dataclasses.replace(self.config, num_resident=number, slots=0, resident_ids=None), None)

    def profile_counts(self, model: ModelExperts) -> RoutingCounts | None:
        """The profile's counts for the layers of ``model``, by place. None without a profile."""
        if self.profile is None:
            return None
        rows = self.profile.model.rows([layer.layer_id for layer in model.layers])
        return self.profile.part(rows, model.locations, model.width)

    def of_layers(self, shards: Sequence[LayerShard]) -> list[LayerPlacement]:
        """The placement of each layer. ``shards``: those of all layers, in order."""
        rows = None if self.profile is None else self.profile.model.rows([shard.layer_id for shard in shards])
        return [self._of_layer(shard, index, -1 if rows is None else rows[index]) for index, shard in enumerate(shards)]

    def _of_layer(self, shard: LayerShard, index: int, row: int) -> LayerPlacement:
        """``row``: the layer's row in the profile."""
        config, num_experts = self.config, shard.num_experts
        slots = 0 if config.num_resident >= shard.num_places else shard.share_of(config.slots)
        shared, where = np.arange(num_experts) >= shard.routed, shard.located()
        named = np.zeros(num_experts, dtype=bool)
        if config.resident_ids is not None:
            named[: shard.routed] = np.isin(where.ids, list(config.resident_ids.of_layer(self.first + index)))
            if config.adapt != "continuous":
                return LayerPlacement(lambda layout: layout.holding(named), slots=slots)
        number = shard.share_of(config.num_resident)
        named[0] |= self.keeps_first and number > named.sum() and not slots
        others = np.flatnonzero(~named & ~shared)

        def first(layout: ExpertLayout) -> np.ndarray:
            """``bool[num_experts]``: the named experts and then the first ones, in whole groups."""
            resident = named.copy()
            resident[others[: max(number // layout.group * layout.group - int(named.sum()), 0)]] = True
            return resident

        grouped = config.resident_ids is None and pays_in_groups(number, slots)
        if self.profile is not None:
            seen = self.profile.part([row], [where], num_experts)
            kept = named | shared
            return LayerPlacement(lambda layout: _hottest_of(seen, layout, first(layout), kept), named, slots, grouped)
        return LayerPlacement(lambda layout: layout.holding(first(layout)), named, slots, grouped)


def _hottest_of(seen: RoutingCounts, layout: ExpertLayout, first: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """``bool[extents]``: the extents of a tensor that should serve the most activations, in as many bytes as the experts
    ``first`` take, leaving out those of the experts ``kept``, which are resident anyway."""
    movable = ~layout.holding(kept)
    there = layout.holding(first) & movable
    capacity = np.array([layout.taken_by(there)])
    return hottest(seen, extents_of([[layout]], layout.num_experts), capacity, there, movable)
