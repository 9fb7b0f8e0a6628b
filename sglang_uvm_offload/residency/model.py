"""The MoE layers of one loaded model on one rank, as arrays over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.residency.ledger import stack
from sglang_uvm_offload.routing.counts import RoutingCounters


@dataclass(eq=False)
class ModelExperts:
    """A draft model's experts are all resident and only counted."""

    draft: bool
    layers: list[ExpertLayer] = field(default_factory=list)
    num_experts: int = 0
    """The most routed experts of any layer, over all ranks that share it."""
    counters: RoutingCounters | None = None

    @property
    def width(self) -> int:
        """The most local experts of any layer: the second dimension of the arrays below."""
        return max((layer.num_experts for layer in self.layers), default=1)

    def resident(self) -> np.ndarray:
        """``bool[layers, width]``: the experts in VRAM."""
        return stack([layer.resident for layer in self.layers], self.width)

    def always_resident(self) -> np.ndarray:
        """``bool[layers, width]``: the fused shared experts, which stay in VRAM."""
        return stack([layer.always_resident for layer in self.layers], self.width)

    def slots(self) -> np.ndarray:
        """``bool[layers, width]``: where there is an expert."""
        return stack([np.ones(layer.num_experts, dtype=bool) for layer in self.layers], self.width)
