"""One tensor ``[E, ...]`` of a MoE layer in managed memory, each of its extents resident or offloaded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Memory


class ExpertTensor:
    """``num_experts`` experts of ``expert_bytes`` bytes each in one managed range with a fixed address.

    The torch tensors over the range (``bytes``) keep it alive. It is freed with the last of them. It is address space until
    ``place``; whoever writes to it before then has the GPU populate what is written, in VRAM.
    """

    def __init__(self, memory: Memory, layout: ExpertLayout, managed: ManagedRange):
        """``managed`` has ``layout.nbytes`` bytes."""
        self.memory = memory
        self.layout = layout
        self.managed = managed
        self.placed = False
        """Until then, what nothing has written will be zeros."""
        self.written = False
        """Whether anything but zeros may have been written before it was placed."""
        self.resident = np.zeros(layout.num_extents, dtype=bool)
        """``bool[extents]``: the extents in VRAM. One on its way does not count, nor one whose move failed, until a read finds
        it there."""
        self._has_host_room = np.zeros(layout.num_extents, dtype=bool)
        self._was_in_vram = np.zeros(layout.num_extents, dtype=bool)
        """Those that are or were there, in whole or in part."""

    @classmethod
    def allocated(cls, memory: Memory, name: str, layout: ExpertLayout) -> ExpertTensor:
        """A tensor in a managed range of its own."""
        return cls(memory, layout, memory.allocate(layout.nbytes, name))

    def regroup(self, layout: ExpertLayout) -> None:
        """Change the extents, before the tensor is placed."""
        assert not self.placed
        self.layout = layout
        self.resident = np.zeros(layout.num_extents, dtype=bool)
        self._has_host_room, self._was_in_vram = self.resident.copy(), self.resident.copy()

    @property
    def address(self) -> int:
        return self.managed.address

    def bytes(self) -> torch.Tensor:
        """The experts as ``uint8[num_experts * expert_bytes]``."""
        return self.memory.tensor(self.managed)

    def write(self, write: Callable[[], object], zeros: bool) -> None:
        """Write the first values, unless they are zeros, which new pages hold already. Others are written at once, even to a
        tensor that is not placed: if they were written later, they would overwrite what followed them."""
        if self.placed or not zeros:
            self.written = True
            write()

    def place(self, resident: np.ndarray) -> None:
        """Populate every extent in VRAM or host RAM, as ``resident`` (``bool[extents]``) says, all zeroed; while a model is
        loading, host RAM when its turn comes. Call this before the first byte is written, so that offloaded bytes never pass
        through VRAM and resident ones never take host RAM."""
        self._was_in_vram = self._was_in_vram | self.written
        if not resident.all():
            self.memory.populate(self.managed, self.layout.spans(~resident))
            self._has_host_room = self._has_host_room | ~resident
        self._bring(resident, Location.DEVICE)
        self.placed = True

    def demote(self, after: np.ndarray) -> int:
        """Move the extents that ``after`` lacks to host RAM. Returns the bytes moved."""
        return self._bring(self.resident & ~after, Location.HOST)

    def promote(self, after: np.ndarray) -> int:
        """Move the extents that ``after`` adds to VRAM. Returns the bytes moved."""
        return self._bring(after & ~self.resident, Location.DEVICE)

    def host_bytes_to_demote(self, after: np.ndarray) -> int:
        """The bytes of host RAM that ``demote`` takes. An extent keeps its host pages when it moves back to VRAM."""
        return self.layout.taken_by(self.resident & ~after & ~self._has_host_room)

    def reread(self, in_vram: np.ndarray) -> None:
        """``in_vram``: for each block of the extents that are not resident, whether a read has found it in VRAM. Extents with
        all their blocks there become resident."""
        blocks = self.layout.block_mask(self.resident)
        blocks[~blocks] = in_vram
        self.resident = self.layout.whole(blocks)

    @property
    def offloaded_bytes(self) -> np.ndarray:
        """``int64[num_experts]``: each expert's bytes in host RAM."""
        return self.layout.bytes_in(~self.resident)

    @property
    def resident_bytes(self) -> int:
        """The bytes of VRAM that resident extents take, in whole blocks."""
        return self.layout.taken_by(self.resident)

    @property
    def reclaimable_bytes(self) -> int:
        """The most VRAM, in whole blocks, that the driver keeps for extents that left it. ``RankStatus`` explains it."""
        return self.layout.taken_by(self._was_in_vram & ~self.resident)

    def offloaded_blocks(self) -> np.ndarray:
        """int64: the addresses of the blocks in host RAM."""
        return self.address + self.layout.blocks(~self.resident)

    def _bring(self, extents: np.ndarray, location: Location) -> int:
        if not extents.any():
            return 0
        self.resident = self.resident & ~extents
        if location is Location.DEVICE:  # also if it fails on the way
            self._was_in_vram = self._was_in_vram | extents
        self.memory.place(self.managed, self.layout.spans(extents), location)
        if location is Location.DEVICE:
            self.resident = self.resident | extents
        else:
            self._has_host_room = self._has_host_room | extents
        return self.layout.taken_by(extents)
