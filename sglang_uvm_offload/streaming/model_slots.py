"""The slots of one model on one rank: which layers have them, and what they must be told between steps."""

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
    """The slots of one layer, as the code that computes it finds them."""

    def __init__(self, layer: ExpertLayer, served: SlotLayer, device: ExpertSlots, after: Callable[[], object] = tuple):
        """``after``: called when the layer is resolved."""
        assert layer.pool is not None
        self.first_slot = served.first_slot
        """Its row, counted from the layer's first."""
        self.num_rows = layer.pool.num_rows
        """From the first row of each of its tensors on."""
        self.row_bytes = {row.address: row.nbytes for row in served.rows}
        """The bytes of a row, of the tensor at each address."""
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
        """As ``memory.slots.ExpertSlots.resolve``."""
        self._device.resolve(self._layer.index, ids, lists, later)
        self._after()

    def align(
        self, ids: torch.Tensor, block_size: int, num_padded: int, later: frozenset[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Resolve few ``ids``, and return what an aligner does: the order, the blocks, and ``padded[num_padded]``. None, and
        nothing is done, for more, or where slots make no lists."""
        pairs, rows = ids.numel(), ids.numel() * block_size
        if not self._device.aligns or not 0 < pairs <= MAX_ALIGNED:
            return None
        order, blocks, padded = (ids.new_empty(count, dtype=torch.int32) for count in (rows, pairs, num_padded))
        self.resolve(ids, BlockLists(blocks, padded, block_size, order=order), later)
        return order, blocks, padded

    def await_fills(self) -> bool:
        """As ``memory.slots.ExpertSlots.await_fills``."""
        return self._device.await_fills()


class ModelSlots:
    """All methods run on the thread that launches the model's steps."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        make: Callable[[Sequence[SlotLayer | None], Sequence[int]], ExpertSlots],
        without: Callable[[ExpertLayer], str | None] = lambda layer: None,
        guess: Callable[[int, torch.Tensor], Guess | None] | None = None,
    ):
        """``make``: the slots of the layers on the device, from the layers (None for one without) and the slots of each pool.
        ``without``: why the code that computes a layer cannot use slots, None if it can. ``guess``: the experts of the layer at
        an index, from the input ``[rows, width]`` of the layer before; None where there is nothing to guess from."""
        self.layers = layers
        self.reasons = [_without_slots(layer) or without(layer) for layer in layers]
        """Of each layer, why it has no slots; None where it has."""
        self._pools = list(dict.fromkeys(layer.pool for layer in layers if layer.pool is not None))
        self._served = [None if why else self._slot_layer(layer) for layer, why in zip(layers, self.reasons, strict=True)]
        self._device = make(self._served, [pool.num_slots for pool in self._pools]) if any(self._served) else None
        self._room = self._rooms()
        self._guess = guess
        self._input: torch.Tensor | None = None
        """Of the layer that is computed."""
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

    @property
    def looks_ahead(self) -> bool:
        """Whether ``begin_layer`` and ``end_layer`` are to be called."""
        return self._guess is not None

    def begin_layer(self, hidden: torch.Tensor | None) -> None:
        """A layer computes its experts from ``hidden[rows, width]``; None: from what no router sees."""
        self._input = hidden

    def end_layer(self, index: int) -> None:
        """It has been given to the calling stream."""
        self._input = None
        if self._device is not None:
            self._device.end_layer(index)

    def gain(self) -> Gain | None:
        """As ``memory.slots.ExpertSlots.gain``; None where nothing guesses any more."""
        return None if self._device is None or self._guess is None else self._device.gain()

    def _look_ahead(self, index: int) -> None:
        """The layer before is resolved. What fails ends guessing and nothing else: a model may have a router that is none of
        those known."""
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
            logger.exception("Expert offload: slots look ahead no more: %s: %s", type(error).__name__, error)

    def bytes_written(self) -> None:
        """Bytes of experts may have changed, or will before the next step: what slots hold is stale."""
        self._stale = True

    def brings(self, index: int) -> bool:
        """Whether steps that stream bring the offloaded experts of the layer at ``index`` into slots: where these hold those
        of two layers, as one is computed while the next one's come."""
        return self.has_room(index) and bool(self.layers[index].offloaded_bytes)

    def has_room(self, index: int) -> bool:
        """Whether the layer's pool has slots for the experts of two layers."""
        return self.reasons[index] is None and self._room[index]

    def bring(self, index: int, beside: int | None) -> None:
        """As ``memory.slots.ExpertSlots.bring``."""
        assert self._device is not None
        self._device.bring(index, beside)

    def may_bring(self) -> bool:
        """As ``memory.slots.ExpertSlots.may_bring``."""
        return self._device is None or self._device.may_bring()

    def await_brought(self) -> None:
        """As ``memory.slots.ExpertSlots.await_brought``."""
        if self._device is not None:
            self._device.await_brought()

    def begin_step(self, valid_rows: int, phase: Phase, requests: Requests = (), *, streams: bool = False) -> None:
        """Call it before each step is launched, after the counters' ``begin_step``. ``requests``: of a prefill."""
        if self._device is None:
            return
        self._follow_tensors()
        if self._stale:
            self._stale = False  # first: loaders write from threads of their own
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
                logger.warning("Expert offload: MoE layer %d uses its slots no more: %s", layer.layer_id, reason)
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
        """``ValueError`` for a layer in a pool that is new."""
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


NOT_ASKED = "none were asked for, or there was no room"


def _without_slots(layer: ExpertLayer) -> str | None:
    """Why a layer has none, None if it has."""
    if reason := cannot_share(layer):
        return reason
    if not layer.num_slots:
        return NOT_ASKED
    assert layer.pool is not None
    return None if layer.pool.num_slots else "its tensors are others than when slots were placed"


def cannot_share(layer: ExpertLayer) -> str | None:
    """Why no slots would serve a loaded layer, None if they would."""
    if not layer.tensors:
        return "none of its experts is large enough to be offloaded"
    if layer.pool is None or layer.without_pool is not None:
        return layer.without_pool or ("it has no part in a pool of slots" if layer.num_slots else NOT_ASKED)
    if len(layer.slot_rows()) > MAX_TENSORS:
        return f"its experts are in {len(layer.slot_rows())} tensors, and slots serve at most {MAX_TENSORS}"
    if layer.num_experts > MAX_EXPERTS:
        return f"it has {layer.num_experts} experts, and layers with at most {MAX_EXPERTS} are served"
    if layer.pool.num_layers * round_up(layer.num_experts, 16) > MAX_POOL_EXPERTS:
        return f"its pool may have {layer.pool.num_layers} layers, and slots serve at most {MAX_POOL_EXPERTS} experts of a pool"
    return None
