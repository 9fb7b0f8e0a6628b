"""Which experts are resident when a model loads: the first N, those that were asked for, or those that a profile shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.residency.selection import hottest, rank_share
from sglang_uvm_offload.routing.profile import Profile


def ids_from(earlier: Sequence[int], first: int) -> int:
    """What the layer ids of a pipeline stage count from, where its first MoE layer says ``first`` and earlier stages have the
    layers ``earlier``. SGLang's models number decoder layers; its Transformers fallback numbers the MoE layers of each stage
    from 0."""
    return earlier[-1] + 1 if earlier and first <= earlier[-1] else 0


class InitialPlacement:
    """Places the layers of the target model, one after the other in the order in which they are built. A layer that the ids or
    the profile do not know gets the first N: whether they fit the model is known once all of it is built."""

    def __init__(self, config: OffloadConfig, profile: Profile | None, earlier: Callable[[], Sequence[int]] = tuple):
        """``earlier``: the MoE layers of earlier pipeline stages, asked for at the first layer."""
        self.config = config
        self.profile = profile
        self._earlier = earlier
        self._next: int | None = None
        self._from = 0

    def resident(self, layer_id: int, num_experts: int, num_shared: int, ep_rank: int, ep_size: int) -> np.ndarray:
        """``bool[num_experts]`` of the local experts of decoder layer ``layer_id``, the last ``num_shared`` of them fused
        shared ones."""
        if self._next is None:
            earlier = self._earlier()
            self._next, self._from = len(earlier), ids_from(earlier, layer_id)
        index, self._next = self._next, self._next + 1
        layer_id += self._from
        routed = num_experts - num_shared
        first = ep_rank * routed
        resident = np.zeros(num_experts, dtype=bool)
        chosen, past = self.config.resident_ids, self.profile
        if chosen is not None and chosen.has_layer(index):
            ids = chosen.of_layer(index)
            resident[[i - first for i in ids if first <= i < first + routed]] = True
            return resident
        resident[: rank_share(self.config.num_resident, ep_rank, ep_size)] = True
        if past is not None and layer_id in past.model.moe_layers and first + routed <= past.model.num_experts:
            seen = past.part([layer_id], [range(first, first + routed)], num_experts)
            slots = np.arange(num_experts)[None] < routed
            resident = hottest(seen, resident[None], ~slots, slots)[0]
        return resident
