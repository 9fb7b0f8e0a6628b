"""Sizes of a rank's experts in VRAM and host RAM, by the number of a layer's residents or slots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from msgspec import Struct

from sglang_uvm_offload.flags import NEVER
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import ExpertLayout, experts_of_a_group, round_up


class ExpertSizes(Struct, frozen=True):
    """Bytes of a rank's experts over all its layers. Lists are indexed by the number of residents or slots of a layer over all
    ranks that share it, from 0 to the number of places."""

    resident: list[int]
    """VRAM of the residents, in whole blocks."""
    slots: list[int]
    """VRAM of the slots, which layers of one shape share in a pool. The index is their average number per layer."""
    offloaded: list[int]
    """Host RAM of the offloaded experts."""
    slots_to_stream: int = 0
    """The smallest number of slots per layer at which every pool holds the experts of two layers, so that steps may stream
    into slots; ``NEVER`` if no number suffices. Pools of too few layers to ever hold them do not count."""
    group: int = 1
    """How many experts of a layer, over all ranks that share it, together fill whole blocks. Residents chosen in groups waste
    no VRAM if the groups have this size."""

    def streams_into(self, slots: int) -> bool:
        """Whether steps stream into the slots, if each layer has this many, and need no buffers."""
        return 0 < self.slots_to_stream <= slots

    @property
    def num_places(self) -> int:
        return len(self.resident) - 1

    def in_vram(self, residents: int, slots: int) -> int:
        return self.resident[residents] + self.slots[slots]


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer on one of the ``ep_size`` ranks that share it."""

    layouts: tuple[ExpertLayout, ...]
    """The layouts of its expert tensors that are large enough to be placed in managed memory."""
    routed: int
    """How many of its experts are routed. The others are always in VRAM."""
    ep_rank: int
    ep_size: int
    plain_bytes: int = 0
    """Bytes of one expert in the other tensors, which slots copy too."""


def expert_sizes(layers: Iterable[LayerExperts], num_places: int) -> ExpertSizes:
    """The sizes of all ``layers``. ``num_places``: places for a layer's routed experts over all ranks that share it."""
    out = np.zeros((3, num_places + 1), dtype=np.int64)
    enough, groups = list[int](), list[int]()
    for layer, count in Counter(layers).items():
        shard = LayerShard(0, layer.routed, ep_rank=layer.ep_rank, ep_size=layer.ep_size)
        share = np.array([shard.share_of(number) for number in range(num_places + 1)])
        for layout in layer.layouts:
            out[[0, 2]] += count * _of_tensor(layout, layer.routed)[:, np.minimum(share, layer.routed)]
            out[1] += [round_up(count * int(number) * layout.expert_bytes, layout.block_bytes) for number in share]
        out[1] += count * layer.plain_bytes * share
        sizes = [layout.expert_bytes for layout in layer.layouts]
        groups += [layer.ep_size * experts_of_a_group(layer.routed, sizes, layer.layouts[0].block_bytes)] if sizes else []
        enough += np.flatnonzero(layer.routed * 2 <= count * share)[:1].tolist() if layer.routed and layer.layouts else []
    resident, slots, offloaded = out.tolist()
    return ExpertSizes(resident, slots, offloaded, max(enough, default=NEVER), math.lcm(*groups))


@lru_cache(maxsize=256)
def _of_tensor(layout: ExpertLayout, routed: int) -> np.ndarray:
    """int64 ``[2, routed + 1]``: bytes in VRAM and in host RAM if the first n local experts are resident, for each n."""
    out = np.zeros((2, routed + 1), dtype=np.int64)
    shared = np.arange(layout.num_experts) >= routed
    for number in range(routed + 1):
        held = layout.holding((np.arange(layout.num_experts) < number) | shared)
        out[:, number] = layout.taken_by(held), layout.taken_by(~held)
    return out
