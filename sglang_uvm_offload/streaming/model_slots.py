"""The slots of one model on one rank: which layers have slots, and how slots follow the model between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.memory.layout import round_up
from sglang_uvm_offload.memory.slots import (
    MAX_ALIGNED,
    MAX_EXPERTS,
    MAX_POOL_EXPERTS,
    MAX_TENSORS,
    NO_TENSORS,
    BlockLists,
    ExpertSlots,
    Gain,
    Guess,
    Requests,
    Rows,
    SlotLayer,
)
from sglang_uvm_offload.policy.slot_policy import WHOLE
from sglang_uvm_offload.routing.counts import Phase

logger = logging.getLogger(__name__)


class LayerSlots:
    """The slots of one layer, for the code that computes it."""

    def __init__(self, layer: ExpertLayer, served: SlotLayer, device: ExpertSlots, after: Callable[[], object] = tuple):
        """``after`` is called once the layer is resolved."""
        assert layer.pool is not None
        self.first_slot = served.first_slot
        """The row of the first slot, counted from the layer's first row."""
        self.num_rows = layer.pool.num_rows
        """Rows of each tensor, counted from the layer's first row."""
        self.row_bytes = {row.address: row.nbytes for row in served.rows}
        """Bytes per row of the tensor at each address."""
        self.layer_id = layer.layer_id
        self._layer, self._device, self._after = layer, device, after
        self._rows: dict[int, torch.Tensor] = {}

    def all_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The layer's tensor ``[num_experts, ...]`` with all ``num_rows`` rows."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._rows:
            self._rows[address] = self._layer.rows_from(address).view(-1)
        rows = self._rows[address].view(tensor.dtype)
        return rows.as_strided((self.num_rows, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset())

    def resolve(self, ids: torch.Tensor, lists: BlockLists, later: frozenset[int] = NO_TENSORS) -> None:
        """See ``memory.slots.ExpertSlots.resolve``."""
        self._device.resolve(self._layer.index, ids, lists, later)
        self._after()

    def align(
        self, ids: torch.Tensor, block_size: int, num_padded: int, later: frozenset[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Resolve up to ``MAX_ALIGNED`` ``ids`` and return an aligner's result: the order, the blocks and
        ``padded[num_padded]``. Returns None and does nothing for more ids, or if slots cannot make lists."""
        pairs, rows = ids.numel(), ids.numel() * block_size
        if not self._device.aligns or not 0 < pairs <= MAX_ALIGNED:
            return None
        order, blocks, padded = (ids.new_empty(count, dtype=torch.int32) for count in (rows, pairs, num_padded))
        self.resolve(ids, BlockLists(blocks, padded, block_size, order=order), later)
        return order, blocks, padded

    def await_fills(self) -> bool:
        """See ``memory.slots.ExpertSlots.await_fills``."""
        return self._device.await_fills()


class ModelSlots:
    """The slots of one model. All methods run on the thread that launches its steps."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        make: Callable[[Sequence[SlotLayer | None], Sequence[int]], ExpertSlots],
        without: Callable[[ExpertLayer], str | None] = lambda layer: None,
        guess: Callable[[int, torch.Tensor], Guess | None] | None = None,
    ):
        """``make`` creates the device's slots from the layers (None for a layer without slots) and the number of slots per
        pool. ``without`` returns why a layer's runner cannot use slots, None if it can. ``guess`` guesses the experts of the
        layer at an index from the previous layer's input ``[rows, width]``; None if it cannot."""
        self.layers = layers
        self.reasons = [_without_slots(layer) or without(layer) for layer in layers]
        """Why each layer has no slots; None if it has."""
        self._pools = list(dict.fromkeys(layer.pool for layer in layers if layer.pool is not None))
        self._served = [None if why else self._slot_layer(layer) for layer, why in zip(layers, self.reasons, strict=True)]
        self._device = make(self._served, [pool.num_slots for pool in self._pools]) if any(self._served) else None
        self._room = self._rooms()
        self._guess = guess
        self._input: torch.Tensor | None = None
        """The input of the current layer."""
        self._at: dict[int, LayerSlots] = {}
        self._index_tensors()
        self._generations = [layer.generation for layer in layers]
        self._stale = False
        self._offloaded: list[np.ndarray] = []
        """Each layer's ``offloaded_bytes_by_expert`` as last sent to the device."""

    @property
    def any(self) -> bool:
        """Whether any layer has slots."""
        return self._device is not None

    def at(self, address: int) -> LayerSlots | None:
        """The slots of the layer that owns the tensor at this address; None for others, such as a stream buffer."""
        return self._at.get(address)

    @property
    def looks_ahead(self) -> bool:
        """Whether lookahead is on, so that ``begin_layer`` and ``end_layer`` must be called."""
        return self._guess is not None

    def begin_layer(self, hidden: torch.Tensor | None) -> None:
        """Begin a layer that computes from ``hidden[rows, width]``; None if that is not a router's input."""
        self._input = hidden

    def end_layer(self, index: int) -> None:
        """End the layer, whose work is now enqueued on the calling stream."""
        self._input = None
        if self._device is not None:
            self._device.end_layer(index)

    def gain(self) -> Gain | None:
        """See ``memory.slots.ExpertSlots.gain``; also None after guessing has stopped."""
        return None if self._device is None or self._guess is None else self._device.gain()

    def _look_ahead(self, index: int) -> None:
        """Look ahead for a layer once the previous one is resolved. A failure ends only the guessing, because a model may have
        an unknown kind of router."""
        hidden, self._input = self._input, None
        if self._guess is None or hidden is None or index >= len(self.layers) or self.reasons[index] is not None:
            return
        assert self._device is not None
        try:
            guess = self._guess(index, hidden)
            if guess is not None:
                self._device.look_ahead(index, guess)
        except Exception as error:
            self._device.end_layer(index)
            self._guess = None
            logger.exception("Expert offload: slot lookahead stopped: %s: %s", type(error).__name__, error)

    def bytes_written(self) -> None:
        """Mark the slots stale, because expert weights may have changed, or will before the next step."""
        self._stale = True

    def brings(self, index: int) -> bool:
        """Whether steps that stream copy the offloaded experts of the layer at ``index`` into slots. The pool must hold two
        layers, because one is computed while the next one arrives."""
        return self.has_room(index) and bool(self.layers[index].offloaded_bytes)

    def has_room(self, index: int) -> bool:
        """Whether the layer's pool has slots for all experts of two layers."""
        return self.reasons[index] is None and self._room[index]

    def bring(self, index: int, beside: int | None) -> None:
        """See ``memory.slots.ExpertSlots.bring``."""
        assert self._device is not None
        self._device.bring(index, beside)

    def may_bring(self) -> bool:
        """See ``memory.slots.ExpertSlots.may_bring``."""
        return self._device is None or self._device.may_bring()

    def await_brought(self) -> None:
        """See ``memory.slots.ExpertSlots.await_brought``."""
        if self._device is not None:
            self._device.await_brought()

    def begin_step(self, valid_rows: int, phase: Phase, requests: Requests = (), *, streams: bool = False) -> None:
        """Begin a step. Call this before each launch, after the counters' ``begin_step``. ``requests`` are a prefill's."""
        if self._device is None:
            return
        self._follow_tensors()
        if self._stale:
            self._stale = False  # before the reset, because loaders set it from other threads
            self._device.reset()
        self._follow_residency()
        if valid_rows:
            self._device.begin_step(None if phase is Phase.DECODE else requests, brings=streams and any(self._room))

    def _follow_tensors(self) -> None:
        generations = [layer.generation for layer in self.layers]
        if generations == self._generations:
            return
        self._generations, self._stale = generations, True
        for index, layer in enumerate(self.layers):
            if self.reasons[index] is not None:
                continue
            reason = _without_slots(layer)
            if reason is None and self._slot_layer(layer) != self._served[index]:
                reason = "its tensors were replaced, and graphs may have captured the old ones"
            if reason is not None:
                self.reasons[index] = reason
                logger.warning("Expert offload: MoE layer %d no longer uses its slots: %s", layer.layer_id, reason)
        self._index_tensors()

    def _index_tensors(self) -> None:
        self._at = {}
        for index, (served, reason) in enumerate(zip(self._served, self.reasons, strict=True)):
            if served is not None and reason is None and self._device is not None:
                slots = LayerSlots(self.layers[index], served, self._device, partial(self._look_ahead, index + 1))
                self._at |= dict.fromkeys(slots.row_bytes, slots)

    def _rooms(self) -> list[bool]:
        served = zip(self.layers, self._served, strict=True)
        return [bool(one and layer.pool and 2 * layer.shard.routed <= layer.pool.num_slots) for layer, one in served]

    def _slot_layer(self, layer: ExpertLayer) -> SlotLayer:
        """The layer's rows and slots. Raises ``ValueError`` if its pool is new."""
        assert layer.pool is not None
        rows = [Rows(*row) for row in layer.slot_rows()]
        return SlotLayer(rows, layer.num_experts, self._pools.index(layer.pool), layer.pool.first_slot(layer.index))

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


NOT_ASKED = "none were requested, or there was no room"


def _without_slots(layer: ExpertLayer) -> str | None:
    """Why a layer has no slots, None if it has."""
    if reason := cannot_share(layer):
        return reason
    if not layer.num_slots:
        return NOT_ASKED
    assert layer.pool is not None
    return None if layer.pool.num_slots else "its tensors were replaced after slots were placed"


def cannot_share(layer: ExpertLayer) -> str | None:
    """Why slots cannot serve a loaded layer, None if they can."""
    if not layer.tensors:
        return "none of its experts is large enough to be offloaded"
    if layer.pool is None or layer.without_pool is not None:
        return layer.without_pool or ("it belongs to no slot pool" if layer.num_slots else NOT_ASKED)
    if len(layer.slot_rows()) > MAX_TENSORS:
        return f"its experts are in {len(layer.slot_rows())} tensors, but slots support at most {MAX_TENSORS}"
    if layer.num_experts > MAX_EXPERTS:
        return f"it has {layer.num_experts} experts, but slots support at most {MAX_EXPERTS} a layer"
    if layer.pool.num_layers * round_up(layer.num_experts, 16) > MAX_POOL_EXPERTS:
        return f"its pool may have {layer.pool.num_layers} layers, but slots support at most {MAX_POOL_EXPERTS} experts a pool"
    return None
