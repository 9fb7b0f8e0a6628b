"""What it takes to copy a layer's experts into a stream buffer, by the link and by VRAM at the same time."""

from __future__ import annotations

from typing import NamedTuple

from sglang_uvm_offload.plan.inputs import Assumptions
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.rates import vram_copy_rate


class LayerCopy(NamedTuple):
    """Seconds that the blocks for the link, and those for VRAM, are busy."""

    link: float
    vram: float

    @property
    def seconds(self) -> float:
        return max(self.link, self.vram)

    def slows(self, assumed: Assumptions) -> float:
        """Seconds that kernels lose which compute meanwhile."""
        return assumed.copy_slows * self.link + assumed.vram_copy_slows * self.vram


def layer_copy(offloaded: float, in_vram: float, link_rate: float, machine: Machine, assumed: Assumptions) -> LayerCopy:
    """``offloaded`` and ``in_vram`` bytes of a layer; ``link_rate`` bytes a second."""
    return LayerCopy(offloaded / link_rate, in_vram / vram_copy_rate(machine, assumed))
