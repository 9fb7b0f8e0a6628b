"""Which experts are resident when a model loads: the first N, the ids that a flag names, or a profile's best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.residency.selection import hottest, rank_share
from sglang_uvm_offload.routing.profile import Profile


def ids_from(earlier: Sequence[int], first: int) -> int:
    """The number to add to the layer ids of a pipeline stage whose first MoE layer has the id ``first``, after stages with the
    layers ``earlier``. SGLang's models number decoder layers; its Transformers fallback numbers the MoE layers of each stage
    from 0."""
    return earlier[-1] + 1 if earlier and first <= earlier[-1] else 0


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

    def resident(self, layer_id: int, num_experts: int, num_shared: int, ep_rank: int, ep_size: int) -> np.ndarray:
        """``bool[num_experts]``: the residents among the local experts of decoder layer ``layer_id``, of which the last
        ``num_shared`` are fused shared ones."""
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
