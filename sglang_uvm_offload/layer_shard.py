"""One rank's experts of a MoE layer, and which of the checkpoint's experts they are."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.expert_location import ExpertLocation


@dataclass(frozen=True)
class LayerShard:
    """The shard of decoder layer ``layer_id`` on one rank."""

    layer_id: int
    num_experts: int
    """Local experts, including fused shared ones."""
    num_shared: int = 0
    """Fused shared experts, which every token uses. They follow the routed ones."""
    ep_rank: int = 0
    ep_size: int = 1
    location: ExpertLocation | None = None
    """The location of the routed experts; None for the identity."""

    @property
    def routed(self) -> int:
        """Local routed experts."""
        return self.num_experts - self.num_shared

    @property
    def places(self) -> range:
        """The places of the local routed experts, out of ``num_places``."""
        first = self.ep_rank * self.routed
        return range(first, first + self.routed)

    @property
    def num_places(self) -> int:
        """Places for routed experts, over all ranks that share the layer."""
        return self.routed * self.ep_size

    def share_of(self, number: int) -> int:
        """This rank's part of ``number`` experts of a layer, split as evenly as possible."""
        return number * (self.ep_rank + 1) // self.ep_size - number * self.ep_rank // self.ep_size

    def located(self) -> ExpertLocation:
        return self.location or ExpertLocation.trivial(self.num_places, self.places)
