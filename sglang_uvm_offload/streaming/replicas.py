"""Views of a layer's expert tensors in each stream buffer, and pointing the layer at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import HeldTensor, held_tensors
from sglang_uvm_offload.memory.layout import whole_blocks
from sglang_uvm_offload.memory.staging import Part


def buffer_bytes(layer: ExpertLayer) -> int:
    """The size in bytes of a stream buffer for the layer's managed tensors, each in whole blocks."""
    return sum(whole_blocks(tensor.layout.nbytes) for tensor in layer.tensors)


class _Place(NamedTuple):
    held: HeldTensor
    address: int
    """The address of the tensor's data in managed memory."""
    replicas: list[torch.Tensor]
    """The tensor in each buffer."""


class Replicas:
    """A layer's tensors in each buffer, valid for its current tensors (its ``generation``). Keeps none of them alive."""

    def __init__(self, layer: ExpertLayer, buffers: Sequence[torch.Tensor]):
        self.layer = layer
        self.generation = layer.generation
        self.parts: list[Part] = []
        """The layer's managed tensors. Empty if the layer exceeds a buffer or has lost a tensor."""
        self._places: list[_Place] = []
        if buffer_bytes(layer) > buffers[0].numel() or not all(layer.memory.holds(tensor.managed) for tensor in layer.tensors):
            return
        offset, offsets = 0, {}
        for mine in layer.tensors:
            self.parts.append(Part(mine.managed, mine.layout.nbytes, offset))
            offsets[mine.address] = offset
            offset += whole_blocks(mine.layout.nbytes)
        # Not all are [num_experts, ...]: CuteDSL's kernels take a view of the scales with the experts in the last dimension.
        for held in held_tensors(layer.holders):
            tensor = held.tensor
            start = offsets.get(tensor.untyped_storage().data_ptr())
            if start is None:
                continue  # in plain VRAM
            first = start // tensor.element_size() + tensor.storage_offset()
            typed = [buffer.view(tensor.dtype) for buffer in buffers]
            views = [each.as_strided(tensor.shape, tensor.stride(), first) for each in typed]
            self._places.append(_Place(held, tensor.data_ptr(), views))

    def valid(self) -> bool:
        """Whether the layer still has the tensors for which this was made."""
        return self.generation == self.layer.generation and all(self.layer.memory.holds(part.managed) for part in self.parts)

    def put(self, buffer: int) -> list[torch.Tensor] | None:
        """Point the layer at a buffer. Returns its own tensors for ``put_back``. Returns None and does nothing if a tensor has
        been replaced."""
        own = []
        for place in self._places:
            tensor = _at(place)
            if tensor is None or tensor.data_ptr() != place.address:
                return None
            own.append(tensor)
        try:
            for place in self._places:
                place.held.put(place.replicas[buffer])
        except BaseException:  # re-raised after restoring the layer's own tensors
            self.put_back(buffer, own)
            raise
        return own

    def put_back(self, buffer: int, own: Sequence[torch.Tensor]) -> None:
        """Undo ``put``. Tensors that the layer's code replaced in the meantime stay replaced."""
        for place, tensor in zip(self._places, own, strict=True):
            now = _at(place)
            if now is not None and now.data_ptr() == place.replicas[buffer].data_ptr():
                place.held.put(tensor)


def _at(place: _Place) -> torch.Tensor | None:
    try:
        return place.held.tensor
    except (KeyError, AttributeError):  # deleted, or no longer a tensor
        return None
