"""One tensor ``[E, ...]`` of a MoE layer: in managed memory, each of its extents resident or offloaded, or in plain VRAM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Memory


class ExpertTensor:
    """``num_experts`` experts of ``expert_bytes`` bytes, and slots after them, in one managed range with a fixed address.

    The torch tensors over the range (``bytes``) keep it alive. It is freed with the last of them. It is address space until
    ``place``; whoever writes to it before then has the GPU populate what is written, in VRAM.
    """

    def __init__(self, memory: Memory, name: str, layout: ExpertLayout):
        self.memory = memory
        self.layout = layout
        self.managed: ManagedRange = memory.allocate(layout.range_bytes, name)
        self._fresh = True
        """Whether the tensor is still to be placed, so that what nothing has written will be zeros."""
        self.resident = np.zeros(layout.num_extents, dtype=bool)
        """``bool[extents]``: the extents in VRAM. One on its way does not count, nor one whose move failed, until a read finds
        it there."""
        self._has_host_room = np.zeros(layout.num_extents, dtype=bool)

    @property
    def address(self) -> int:
        return self.managed.address

    def bytes(self) -> torch.Tensor:
        """The experts as ``uint8[num_experts * expert_bytes]``. The slots follow them in the same storage."""
        return self.memory.tensor(self.managed)[: self.layout.nbytes]

    def write(self, write: Callable[[], object], zeros: bool) -> None:
        """Write first values, unless they are the zeros that new pages are. Others are written at once, also to a tensor that
        is not placed: written later they would replace what came after them."""
        if not (zeros and self._fresh):
            write()

    def place(self, resident: np.ndarray) -> None:
        """Populate every extent in VRAM or host RAM, as ``resident`` (``bool[extents]``) says, and the slots in VRAM, all
        zeroed; while a model is loading, host RAM when its turn comes. Call this before the first byte is written, so that
        offloaded bytes never pass through VRAM and resident ones never take host RAM."""
        if spans := self.layout.slot_spans:
            self.memory.place(self.managed, spans, Location.DEVICE)
        resident = resident | self.layout.edge
        if not resident.all():
            self.memory.populate(self.managed, self.layout.spans(~resident))
            self._has_host_room = self._has_host_room | ~resident
        self._bring(resident, Location.DEVICE)
        self._fresh = False

    def use_slots(self, num_slots: int) -> None:
        """Have this many of the slots that are reserved. Call it before ``place``."""
        self.layout = dataclasses.replace(self.layout, num_slots=num_slots)
        self.resident = np.zeros(self.layout.num_extents, dtype=bool)
        self._has_host_room = self.resident.copy()

    def place_slots(self, location: Location) -> None:
        """Move the slots, and the extent that the last expert shares with them."""
        if spans := self.layout.slot_spans:
            self.memory.place(self.managed, spans, location)
        self._bring(self.layout.edge, location)

    def demote(self, after: np.ndarray) -> int:
        """Move the extents that ``after`` lacks to host RAM, except the edge. Returns the bytes moved."""
        return self._bring(self._to_demote(after), Location.HOST)

    def promote(self, after: np.ndarray) -> int:
        """Move the extents that ``after`` adds to VRAM. Returns the bytes moved."""
        return self._bring(after & ~self.resident, Location.DEVICE)

    def host_bytes_to_demote(self, after: np.ndarray) -> int:
        """Host RAM that ``demote`` takes. An extent keeps its host pages when it moves back to VRAM."""
        return self.layout.taken_by(self._to_demote(after) & ~self._has_host_room)

    def reread(self, in_vram: np.ndarray) -> None:
        """``in_vram``: for each block of the extents that are not resident, whether a read has found it in VRAM. Extents with
        all their blocks there become resident."""
        blocks = self.layout.block_mask(self.resident)
        blocks[~blocks] = in_vram
        self.resident = self.layout.whole(blocks)

    @property
    def offloaded_bytes(self) -> np.ndarray:
        """``int64[num_experts]``: the bytes of each expert in host RAM."""
        return self.layout.bytes_in(~self.resident)

    @property
    def resident_bytes(self) -> int:
        """VRAM that resident extents take here, in whole blocks."""
        return self.layout.taken_by(self.resident)

    def offloaded_blocks(self) -> np.ndarray:
        """int64: the addresses of the blocks in host RAM."""
        return self.address + self.layout.blocks(~self.resident)

    def _to_demote(self, after: np.ndarray) -> np.ndarray:
        return self.resident & ~after & ~self.layout.edge

    def _bring(self, extents: np.ndarray, location: Location) -> int:
        if not extents.any():
            return 0
        self.resident = self.resident & ~extents
        self.memory.place(self.managed, self.layout.spans(extents), location)
        if location is Location.DEVICE:
            self.resident = self.resident | extents
        else:
            self._has_host_room = self._has_host_room | extents
        return self.layout.taken_by(extents)


class PlainTensor:
    """Experts too small to place, in ordinary memory, with slots after them. Identifies the storage of ``whole``
    (``uint8[layout.range_bytes]``) without keeping it alive."""

    def __init__(self, layout: ExpertLayout, whole: torch.Tensor):
        self.layout = layout
        # While the weak reference exists, no other storage gets this identity, even if this one is freed.
        self._storage = StorageWeakRef(whole.untyped_storage())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the storage."""
        return bool(tensor.untyped_storage()._cdata == self._storage.cdata)

    @property
    def slot_bytes(self) -> int:
        return self.layout.num_slots * self.layout.expert_bytes
