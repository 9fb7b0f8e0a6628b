"""One tensor ``[E, ...]`` of a MoE layer in ordinary memory, too small to place, with slots after its experts."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_uvm_offload.memory.layout import ExpertLayout


class PlainTensor:
    """Identifies the storage of ``whole`` (``uint8[layout.range_bytes]``) without keeping it alive."""

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
