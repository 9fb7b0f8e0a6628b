"""Bytes of a rank's experts, by how many of a layer's are in VRAM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from msgspec import Struct

from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import ExpertLayout


class ExpertSizes(Struct, frozen=True):
    """Bytes of a rank's experts over all its layers, by the number of a layer's residents or slots, over all ranks that share
    it: lists of one more than there are places."""

    resident: list[int]
    """VRAM of residents without slots behind them, in whole blocks."""
    beside_slots: list[int]
    """The same with slots: the block that the last expert shares with them is in VRAM always."""
    slots: list[int]
    """VRAM of slots, beyond the experts' blocks."""
    offloaded: list[int]
    """Host RAM of what is not resident."""

    @property
    def num_places(self) -> int:
        return len(self.resident) - 1

    def experts(self, residents: int, slots: int) -> int:
        """VRAM of the experts' blocks, with ``slots`` behind them."""
        return (self.beside_slots if slots else self.resident)[residents]

    def in_vram(self, residents: int, slots: int) -> int:
        return self.experts(residents, slots) + self.slots[slots]


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer on one of the ``ep_size`` ranks that share it."""

    layouts: tuple[ExpertLayout, ...]
    """Of the tensors of experts that are large enough to be placed."""
    routed: int
    """How many of them are routed; the others are always in VRAM."""
    ep_rank: int
    ep_size: int
    plain_bytes: int = 0
    """Of one expert in the other tensors, which have a row for each slot too."""


def expert_sizes(layers: Iterable[LayerExperts], num_places: int) -> ExpertSizes:
    """``num_places``: of a layer's routed experts over all ranks that share it."""
    out = np.zeros((4, num_places + 1), dtype=np.int64)
    for layer, count in Counter(layers).items():
        shard = LayerShard(0, layer.routed, ep_rank=layer.ep_rank, ep_size=layer.ep_size)
        share = np.array([shard.share_of(number) for number in range(num_places + 1)])
        for layout in layer.layouts:
            out += count * _of_tensor(layout, layer.routed)[:, np.minimum(share, layer.routed)]
        out[2] += count * layer.plain_bytes * share
    return ExpertSizes(*(row.tolist() for row in out))


@lru_cache(maxsize=256)
def _of_tensor(layout: ExpertLayout, routed: int) -> np.ndarray:
    """int64 ``[4, routed + 1]``, as the fields of ``ExpertSizes``, by the number of the first local experts, or of slots."""
    alone = ExpertLayout(layout.num_experts, layout.expert_bytes, layout.block_bytes)
    behind = ExpertLayout(layout.num_experts, layout.expert_bytes, layout.block_bytes, num_slots=1)
    out = np.zeros((4, routed + 1), dtype=np.int64)
    shared = np.arange(layout.num_experts) >= routed
    for number in range(routed + 1):
        first = (np.arange(layout.num_experts) < number) | shared
        held = alone.holding(first)
        out[0, number] = alone.taken_by(held)
        out[1, number] = behind.taken_by(behind.holding(first) | behind.edge)
        out[2, number] = ExpertLayout(layout.num_experts, layout.expert_bytes, layout.block_bytes, number).slot_bytes
        out[3, number] = alone.taken_by(~held)
    return out
