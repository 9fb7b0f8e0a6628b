"""Which experts are resident when a model loads: the first N, the ids that a flag names, or a profile's best."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.residency.selection import hottest, rank_share
from sglang_uvm_offload.routing.profile import Profile


class InitialPlacement:
    """Places the layers of the target model, one after the other in the order in which they are built."""

    def __init__(self, config: OffloadConfig, profile: Profile | None, layers_before: int = 0):
        """``layers_before``: the number of MoE layers in earlier pipeline stages, for a file that lists ids by layer."""
        self.config = config
        self.profile = profile
        self.layers_before = layers_before
        self._next = layers_before

    def resident(self, layer_id: int, num_experts: int, num_shared: int, ep_rank: int, ep_size: int) -> np.ndarray:
        """``bool[num_experts]``: the residents among the local experts of decoder layer ``layer_id``, of which the last
        ``num_shared`` are fused shared ones. Raises ``FlagError`` for a layer that the ids or the profile lack."""
        index, self._next = self._next, self._next + 1
        routed = num_experts - num_shared
        first = ep_rank * routed
        resident = np.zeros(num_experts, dtype=bool)
        if self.config.resident_ids is not None:
            if not self.config.resident_ids.has_layer(index):
                raise FlagError([f"{flag_name('resident_ids')}: the file has no list for MoE layer {index + 1} of the model"])
            ids = self.config.resident_ids.of_layer(index)
            resident[[i - first for i in ids if first <= i < first + routed]] = True
            return resident
        resident[: rank_share(self.config.num_resident, ep_rank, ep_size)] = True
        if self.profile is not None:
            held = self.profile.model
            if layer_id not in held.moe_layers or first + routed > held.num_experts:
                layer = f"experts {first} to {first + routed - 1} of decoder layer {layer_id}"
                raise FlagError([f"{flag_name('profile')}: the profile has no routing of {layer} of the model"])
            past = self.profile.part([layer_id], [range(first, first + routed)], num_experts)
            slots = np.arange(num_experts)[None] < routed
            resident = hottest(past, resident[None], ~slots, slots)[0]
        return resident
