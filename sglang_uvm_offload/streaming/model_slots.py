"""The slots of one model on one rank: which layers have them, and what they must be told between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.memory.slots import MAX_EXPERTS, MAX_TENSORS, ExpertSlots, Rows, SlotLayer
from sglang_uvm_offload.policy.slot_policy import WHOLE
from sglang_uvm_offload.routing.counts import Phase

logger = logging.getLogger(__name__)


class LayerSlots:
    """The slots of one layer, as the code that computes it finds them."""

    def __init__(self, index: int, layer: SlotLayer, device: ExpertSlots):
        self.num_rows = layer.num_experts + layer.num_slots
        """Of each of its tensors."""
        self.row_bytes = {row.address: row.nbytes for row in layer.rows}
        """The bytes of a row, of the tensor at each address."""
        self._index, self._device = index, device

    def resolve(self, ids: torch.Tensor, blocks: torch.Tensor, padded: torch.Tensor, block_size: int) -> None:
        """As ``memory.slots.ExpertSlots.resolve``."""
        self._device.resolve(self._index, ids, blocks, padded, block_size)


class ModelSlots:
    """All methods run on the thread that launches the model's steps."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        make: Callable[[Sequence[SlotLayer | None]], ExpertSlots],
        without: Callable[[ExpertLayer], str | None] = lambda layer: None,
    ):
        """``make``: the slots of the layers, on the device; None for a layer without. ``without``: why the code that computes a
        layer cannot use slots, None if it can."""
        self.layers = layers
        self.reasons = [_without_slots(layer) or without(layer) for layer in layers]
        """Of each layer, why it has no slots; None where it has."""
        self._served = [None if reason else _slot_layer(layer) for layer, reason in zip(layers, self.reasons, strict=True)]
        self._device = make(self._served) if any(self._served) else None
        self._at: dict[int, LayerSlots] = {}
        self._index_tensors()
        self._generations = [layer.generation for layer in layers]
        self._stale = False
        self._offloaded: list[np.ndarray] = []
        """Of each layer ``offloaded_bytes_by_expert`` as the device knows it."""

    @property
    def any(self) -> bool:
        """Whether any layer has slots."""
        return self._device is not None

    def at(self, address: int) -> LayerSlots | None:
        """The slots of the layer that has a tensor at this address; None for others, such as a stream buffer."""
        return self._at.get(address)

    def bytes_written(self) -> None:
        """Bytes of experts may have changed, or will before the next step: what slots hold is stale."""
        self._stale = True

    def keep(self, index: int, ids: torch.Tensor, copies: Mapping[int, int]) -> None:
        """The layer at ``index`` computes a prefill with the experts ``ids[rows, top_k]`` from copies in VRAM: fill its slots
        from these. ``copies``: the address of a tensor's copy, by that of the tensor; those without are in VRAM themselves."""
        served = self._served[index]
        if self._device is not None and served is not None and self.reasons[index] is None:
            self._device.keep(index, ids, [copies.get(row.address, row.address) for row in served.rows])

    def slot_of(self, index: int) -> torch.Tensor | None:
        """As ``memory.slots.ExpertSlots.slot_of``, for the layer at ``index``. None where it uses no slots (any more)."""
        return None if self._device is None or self.reasons[index] is not None else self._device.slot_of(index)

    def begin_step(self, valid_rows: int, phase: Phase, ends: Sequence[int] = ()) -> None:
        """Call it before each step is launched, after the counters' ``begin_step``. ``ends``, of a prefill: behind the last
        row of each prompt that ends in it."""
        if self._device is None:
            return
        self._follow_tensors()
        if self._stale:
            self._stale = False  # first: loaders write from threads of their own
            self._device.reset()
        self._follow_residency()
        if valid_rows:
            self._device.begin_step(None if phase is Phase.DECODE else ends)

    def _follow_tensors(self) -> None:
        generations = [layer.generation for layer in self.layers]
        if generations == self._generations:
            return
        self._generations, self._stale = generations, True
        for index, layer in enumerate(self.layers):
            if self.reasons[index] is not None:
                continue
            reason = _without_slots(layer)
            if reason is None and _slot_layer(layer) != self._served[index]:
                reason = "its tensors were replaced, and graphs may have captured the old ones"
            if reason is not None:
                self.reasons[index] = reason
                logger.warning("Expert offload: MoE layer %d uses its slots no more: %s", layer.layer_id, reason)
        self._index_tensors()

    def _index_tensors(self) -> None:
        self._at = {}
        for index, (served, reason) in enumerate(zip(self._served, self.reasons, strict=True)):
            if served is not None and reason is None and self._device is not None:
                slots = LayerSlots(index, served, self._device)
                self._at |= dict.fromkeys(slots.row_bytes, slots)

    def _follow_residency(self) -> None:
        offloaded = [layer.offloaded_bytes_by_expert for layer in self.layers]
        if len(self._offloaded) == len(offloaded) and all(a is b for a, b in zip(self._offloaded, offloaded, strict=True)):
            return
        assert self._device is not None
        width = max(layer.num_experts for layer in self.layers)
        share = np.zeros((len(self.layers), width), dtype=np.uint8)
        for row, layer, away, reason in zip(share, self.layers, offloaded, self.reasons, strict=True):
            if reason is None:
                row[: layer.num_experts] = -(-WHOLE * away // max(layer.expert_bytes, 1))
        self._device.set_share(share)
        self._offloaded = offloaded


def _slot_layer(layer: ExpertLayer) -> SlotLayer:
    return SlotLayer([Rows(*row) for row in layer.slot_rows()], layer.num_experts, layer.num_slots)


def _without_slots(layer: ExpertLayer) -> str | None:
    """Why a layer has none, None if it has."""
    if not layer.num_slots:
        return "none were asked for"
    if layer.slots_missing is not None:
        return f"{layer.slots_missing} has no rows for them"
    if not layer.tensors:
        return "none of its experts is large enough to be offloaded"
    if len(layer.slot_rows()) > MAX_TENSORS:
        return f"its experts are in {len(layer.slot_rows())} tensors, and slots serve at most {MAX_TENSORS}"
    if max(layer.num_experts, layer.num_slots) > MAX_EXPERTS:
        return f"it has {layer.num_experts} experts and {layer.num_slots} slots, and at most {MAX_EXPERTS} of each are served"
    return None
