"""The MoE layers of one loaded model on one rank, as arrays over all of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_uvm_offload.expert_location import ExpertLocation
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.pool import ExpertPool
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.policy import ranking
from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounters, RoutingCounts


@dataclass(eq=False)
class ModelExperts:
    """The MoE layers of a target or draft model. Each model has its own counters."""

    draft: bool
    layers: list[ExpertLayer] = field(default_factory=list)
    counters: RoutingCounters | None = None
    _layouts: list[tuple[ExpertLayout, ...]] = field(default_factory=list)
    _extents: Extents | None = None
    _pools: dict[tuple[int, ...], ExpertPool] = field(default_factory=dict)
    """By a layer's number of experts, its group size, and the bytes of one expert in each tensor."""

    def add_layer(self, memory: Memory, shard: LayerShard) -> ExpertLayer:
        """Add a layer. Call for each MoE layer in order while the model is built. Its experts are only address space until they
        are placed."""
        self.layers.append(ExpertLayer(memory, shard, len(self.layers)))
        return self.layers[-1]

    def pools(self) -> list[ExpertPool]:
        """The layers' pools, in order."""
        return list(dict.fromkeys(layer.pool for layer in self.layers if layer.pool is not None))

    def pool_for(self, layer: ExpertLayer, expert_bytes: tuple[int, ...]) -> ExpertPool | str:
        """``experts.layer.PoolOf`` for one of the layers."""
        key = (layer.num_experts, layer.group, *expert_bytes)
        if key not in self._pools:
            most = sum(each.shard.routed for each in self.layers)
            try:
                shape = (len(self.layers), layer.num_experts, expert_bytes, most, layer.group)
                self._pools[key] = ExpertPool(layer.memory, *shape)
            except ValueError as error:
                return str(error)
        return self._pools[key]

    def place_slots(self) -> None:
        """Allocate the slots of each pool, which its layers share. Call once all tensors are in their pools and the number of
        slots is known. Raises ``ManagedMemoryError``."""
        kept = self.pools()
        self._pools = {key: pool for key, pool in self._pools.items() if pool in kept}
        for pool in kept:
            if number := sum(layer.num_slots for layer in self.layers if layer.pool is pool):
                pool.place_slots(number)

    @property
    def num_places(self) -> int:
        """The largest number of places for routed experts in a layer, over all ranks that share it."""
        return max((layer.shard.num_places for layer in self.layers), default=0)

    @property
    def num_logical(self) -> int:
        """The largest number of routed experts in a layer of the checkpoint."""
        return max((layer.location.num_experts for layer in self.layers), default=0)

    @property
    def locations(self) -> list[ExpertLocation]:
        return [layer.location for layer in self.layers]

    @property
    def width(self) -> int:
        """The largest number of local experts in a layer: the second dimension of the arrays below."""
        return max((layer.num_experts for layer in self.layers), default=1)

    @property
    def expert_bytes(self) -> np.ndarray:
        """``int64[layers]``: bytes of one expert in managed memory."""
        return np.array([layer.expert_bytes for layer in self.layers], dtype=np.int64)

    @property
    def extents(self) -> Extents:
        """The extents of all layers. A new object once the layers' tensors have been replaced, as by a weight update."""
        layouts = [layer.layouts for layer in self.layers]
        if self._extents is None or not all(map(operator.is_, layouts, self._layouts)):
            self._layouts, self._extents = layouts, extents_of(layouts, self.width)
        return self._extents

    def resident_extents(self) -> np.ndarray:
        """``bool[extents]``: the extents in VRAM."""
        return np.concatenate([np.zeros(0, dtype=bool), *(layer.resident_extents() for layer in self.layers)])

    def offloaded_bytes(self) -> np.ndarray:
        """``int64[layers, width]``: bytes of each expert that a step reads over PCIe if it activates the expert."""
        return self._stacked([layer.offloaded_bytes_by_expert for layer in self.layers])

    def share_in_vram(self, offloaded: np.ndarray) -> np.ndarray:
        """float ``[layers, width]``: the share of each expert's bytes that is in VRAM if ``offloaded`` bytes are not. 1 for
        experts without placed bytes."""
        return 1.0 - offloaded / np.maximum(self.expert_bytes, 1)[:, None]

    def movable(self) -> np.ndarray:
        """``bool[extents]``: the extents that hold no part of an expert that must stay in VRAM."""
        return ~self.extents.holding(self._stacked([layer.kept for layer in self.layers]))

    def candidates(self) -> np.ndarray:
        """``bool[layers, width]``: the experts that can be offloaded."""
        return self._stacked([~layer.always_resident & bool(layer.tensors) for layer in self.layers])

    def by_layer(self, extents: np.ndarray) -> list[tuple[ExpertLayer, np.ndarray]]:
        """Each layer with its part of ``bool[extents]``."""
        ends = np.searchsorted(self.extents.layer, np.arange(1, len(self.layers)))
        return list(zip(self.layers, np.split(extents, ends), strict=True)) if self.layers else []

    def best_residents(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """``bool[extents]``: the extents that should serve the most activations, with as many bytes in each layer as
        ``resident`` has."""
        movable = self.movable()
        capacity = self.extents.bytes_by_layer(resident & movable)
        return hottest(seen, self.extents, capacity, resident, movable) | (resident & ~movable)

    def hit_rate(self, seen: RoutingCounts, resident: np.ndarray) -> float:
        """The share of the routed tokens in ``seen`` that ``resident`` (``bool[extents]``) serves; 0 without routed tokens."""
        routed = seen.routed()
        served = routed * self.share_in_vram(self.extents.bytes_by_expert(~resident))
        return float(served.sum() / total) if (total := routed.sum()) else 0.0

    def _stacked(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """``[layers, width]``, padded with 0 or False beyond a layer's own experts."""
        out = np.zeros((len(rows), self.width), dtype=rows[0].dtype if rows else bool)
        for padded, row in zip(out, rows, strict=True):
            padded[: row.size] = row
        return out


def hottest(
    seen: RoutingCounts, extents: Extents, capacity: np.ndarray, resident: np.ndarray, movable: np.ndarray
) -> np.ndarray:
    """``bool[extents]``: the movable extents that should serve the most activations, within ``capacity`` bytes per layer (int64
    ``[layers]``). Ties go to ``resident`` extents."""
    scores = ranking.score(seen.counts[:, Phase.DECODE, ACTIVATIONS], seen.steps[1], seen.counts[:, Phase.PREFILL, ROUTED])
    return ranking.best(extents, extents.density(scores), capacity, resident, movable)


def extents_of(layouts: Sequence[Sequence[ExpertLayout]], width: int) -> Extents:
    """The extents of layers with these tensors. Arrays over experts are ``width`` wide."""
    flat = [(index, layout) for index, layer in enumerate(layouts) for layout in layer]
    before = np.cumsum([0, *(layout.num_extents for _, layout in flat)])
    return Extents(
        (len(layouts), width),
        layer=_joined([np.full(layout.num_extents, index) for index, layout in flat]),
        nbytes=_joined([layout.extent_bytes for _, layout in flat]),
        part_extent=_joined([layout.part_extent + first for first, (_, layout) in zip(before[:-1], flat, strict=True)]),
        part_expert=_joined([layout.part_expert + index * width for index, layout in flat]),
        part_bytes=_joined([layout.part_bytes for _, layout in flat]),
    )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
