"""The experts of a server that gives up its VRAM for a while: in host RAM, and then back where they were."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from sglang_uvm_offload.experts.layer import ExpertLayer, check_host_ram
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, Memory, Span
from sglang_uvm_offload.residency.mover import LayerExtents, Mover
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)


class Sleep:
    """Their bytes stay what they are, at the addresses that captured graphs have. Host RAM holds all of them meanwhile; where
    it has no room, they stay in VRAM."""

    def __init__(self, memory: Memory, mover: Mover):
        self._memory = memory
        self._mover = mover
        self._before: list[LayerExtents] | None = None
        """What was resident, None while awake."""

    @property
    def asleep(self) -> bool:
        return self._before is not None

    def begin(self, layers: Sequence[ExpertLayer]) -> None:
        """Moves all experts and slots of ``layers`` out of VRAM. Call it while no step and no move is under way."""
        if self.asleep:
            return
        self._before = [(layer, layer.resident_extents()) for layer in layers]
        nothing = [(layer, np.zeros_like(resident)) for layer, resident in self._before]
        edges = sum(layout.edge_bytes for layer in layers for layout in layer.layouts)
        needed = edges + sum(layer.host_bytes_to_demote(none) + layer.slot_bytes for layer, none in nothing)
        try:
            check_host_ram(self._memory, "demote", "the experts", needed)
            moved = self._mover.move(nothing, show=False)
            if self._mover.fault is not None:  # other ranks take host RAM at the same time, so also in the midst of it
                raise ManagedMemoryError("demote", "the experts", Span(0, needed), self._mover.fault)
            for layer in layers:
                layer.place_slots(Location.HOST)
        except ManagedMemoryError as fault:
            logger.error("Expert offload: experts stay in VRAM, also while the server gives up its memory: %s", fault)
            self._undo(self._before)
        else:
            logger.info("Expert offload: %s of experts have left VRAM, until the server resumes", size(moved))

    def _undo(self, before: Sequence[LayerExtents]) -> None:
        """Brings back at once what has left: after a fault the mover would not, when the server resumes."""
        try:
            for layer, extents in before:
                layer.place_slots(Location.DEVICE)
                layer.promote(extents)
        except ManagedMemoryError as fault:
            logger.error("Expert offload: some experts have left VRAM and do not come back: %s. Decoding may be slower.", fault)

    def end(self) -> None:
        """Brings back what ``begin`` moved. Where VRAM has no room, the experts stay in host RAM, and steps read them there."""
        before, self._before = self._before, None
        if before is None:
            return
        try:
            for layer, _ in before:
                layer.place_slots(Location.DEVICE)
        except ManagedMemoryError as fault:
            logger.error("Expert offload: slots stay in host RAM: %s. Serving goes on; decoding may be slower.", fault)
        # New weights may have come in tensors of other extents, which were placed when they were made.
        back = [(layer, extents) for layer, extents in before if extents.shape == layer.resident_extents().shape]
        # The driver may still hold the VRAM that they left, which then shows as taken.
        moved = self._mover.move(back, show=False, check_vram=False)
        logger.info("Expert offload: %s of experts are back in VRAM", size(moved))
