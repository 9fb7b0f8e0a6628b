"""The experts of all layers of one shape, and the slots that they share: one managed range for each kind of tensor.

    kind:  [ layer 0: pitch rows | layer 1: pitch rows | ... | slots ]      a row has the bytes of one expert of that kind

Every kind has the same rows, so one number names an expert's row, or a slot's, in all tensors of a layer: counted from the
first row of layer ``l``, slot ``s`` is row ``(layers - l) * pitch + s``. A layer's *home* is its part of each range. Ranges
are address space until they are placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import ExpertLayout, enclosing, rows_a_layer
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Memory, Span


@dataclass(eq=False)
class _Kind:
    layout: ExpertLayout
    """The layout of one layer's tensor."""
    whole: ManagedRange
    kept: torch.Tensor
    """A tensor over the whole range, which keeps the range alive."""
    homes: dict[int, ExpertTensor] = field(default_factory=dict)
    """Each layer's home. What is placed there stays placed, whether a tensor holds it or not."""


class ExpertPool:
    """``expert_bytes`` has the bytes of an expert of each kind. ``group``: residents are chosen by groups of this many experts.
    Slots take no memory until ``place_slots``."""

    def __init__(
        self, memory: Memory, num_layers: int, num_experts: int, expert_bytes: Sequence[int], most_slots: int, group: int = 1
    ):
        """Raises ``ManagedMemoryError``, and ``ValueError`` with the reason why such layers cannot share slots."""
        pitch = rows_a_layer(num_experts, expert_bytes, memory.block_bytes)
        if pitch is None:
            sizes = ", ".join(map(str, expert_bytes))
            raise ValueError(f"rows of {sizes} bytes rarely begin on a block of memory in all tensors")
        self.memory = memory
        self.num_layers, self.pitch = num_layers, pitch
        self.most_slots, self.num_slots = most_slots, 0
        self._kinds: list[_Kind] = []
        for nbytes in expert_bytes:
            layout = ExpertLayout.grouped(num_experts, nbytes, memory.block_bytes, group)
            rows = 2 * num_layers * pitch + most_slots  # as many from each layer on
            whole = memory.allocate(rows * nbytes, f"experts of {nbytes} bytes of {num_layers} layers, and their slots")
            self._kinds.append(_Kind(layout, whole, memory.tensor(whole)))

    @property
    def num_rows(self) -> int:
        """The rows of a layer's tensor with all slots. Every layer has the same number, because DeepGEMM compiles a kernel for
        each number; the last ones may belong to nothing."""
        return self.num_layers * self.pitch + self.num_slots

    def first_slot(self, layer: int) -> int:
        """The row of slot 0, counted from the first row of the layer at index ``layer``."""
        return (self.num_layers - layer) * self.pitch

    def vacant_home(self, layer: int, expert_bytes: int) -> ExpertTensor | None:
        """The layer's free home for a tensor with experts of ``expert_bytes``; None if there is none. Its extents are where the
        last tensor left them, or not placed."""
        for kind in self._kinds:
            if kind.layout.expert_bytes == expert_bytes and (home := self._vacant(kind, layer)) is not None:
                return home
        return None

    def is_home(self, tensor: ExpertTensor) -> bool:
        return any(tensor in kind.homes.values() for kind in self._kinds)

    def leave(self, layer: int) -> None:
        """Take the VRAM away from the layer's free homes. Experts too small to be placed stay there."""
        for kind in self._kinds:
            home = kind.homes.get(layer)
            if home is not None and kind.layout.placeable and not self.memory.holds(home.managed):
                home.managed = self._part(kind, layer)
                try:
                    home.demote(np.zeros_like(home.resident))
                finally:
                    home.placed = False
                    self.memory.free(home.managed)

    def _vacant(self, kind: _Kind, layer: int) -> ExpertTensor | None:
        home = kind.homes.get(layer)
        if home is None:
            home = kind.homes[layer] = ExpertTensor(self.memory, kind.layout, self._part(kind, layer))
            if not kind.layout.placeable:
                self._place(kind, self._span(kind, layer), Location.DEVICE)
                home.placed = True
        elif self.memory.holds(home.managed):
            return None
        else:
            home.managed = self._part(kind, layer)
        return home

    def _part(self, kind: _Kind, layer: int) -> ManagedRange:
        name = f"experts of {kind.layout.expert_bytes} bytes of layer {layer} of {self.num_layers}"
        return self.memory.part(kind.whole, self._span(kind, layer), name)

    def _span(self, kind: _Kind, layer: int) -> Span:
        return Span(layer * self.pitch * kind.layout.expert_bytes, kind.layout.nbytes)

    def rows_from(self, home: ExpertTensor) -> torch.Tensor:
        """``uint8[num_rows, bytes]``: a layer's experts in its tensor, and all rows after them."""
        kind = self._kind_of(home)
        begin = home.address - kind.whole.address
        span = Span(begin, self.num_rows * kind.layout.expert_bytes)
        rows = self.memory.part(kind.whole, span, f"{home.managed.name} and slots")
        return self.memory.tensor(rows).view(-1, kind.layout.expert_bytes)

    def place_slots(self, number: int) -> None:
        """Make ``number`` slots, zeroed and in VRAM; ``move_slots`` moves them from then on. Call this once. Raises
        ``ManagedMemoryError``."""
        assert 0 < number <= self.most_slots, (number, self.most_slots)
        assert not self.num_slots
        self.num_slots = number
        self.move_slots(Location.DEVICE)

    def move_slots(self, location: Location) -> None:
        """Move the slots, and the layers' experts that are too small to be placed on their own."""
        for kind in self._kinds:
            if self.num_slots:
                self._place(kind, self._slots(kind), location)
            if not kind.layout.placeable:
                for layer in kind.homes:
                    self._place(kind, self._span(kind, layer), location)

    @property
    def slot_bytes(self) -> int:
        """The bytes of VRAM that the slots take."""
        spans = [self._in_blocks(kind, self._slots(kind)) for kind in self._kinds] if self.num_slots else []
        return sum(span.nbytes for span in spans)

    def _kind_of(self, home: ExpertTensor) -> _Kind:
        return next(kind for kind in self._kinds if home in kind.homes.values())

    def _slots(self, kind: _Kind) -> Span:
        nbytes = kind.layout.expert_bytes
        return Span(self.num_layers * self.pitch * nbytes, self.num_slots * nbytes)

    def _place(self, kind: _Kind, span: Span, location: Location) -> None:
        self.memory.place(kind.whole, [self._in_blocks(kind, span)], location)

    def _in_blocks(self, kind: _Kind, span: Span) -> Span:
        return enclosing(span, self.memory.block_bytes, kind.whole.nbytes)
