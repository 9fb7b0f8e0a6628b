"""Tests once, on a few bytes, whether a CUDA graph replays the overlap that slots use: kernels that start before their
predecessors end, and a stream that forks and joins. If not, SGLang's own capture would end the server."""

from __future__ import annotations

import logging

import torch

from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.cuda.structs import CudaFailure
from sglang_uvm_offload.memory.slots import BlockLists, Guess, Rows, SlotLayer
from sglang_uvm_offload.policy.slot_policy import WHOLE
from sglang_uvm_offload.routing.counts import Phase

logger = logging.getLogger(__name__)

_LAYERS, _EXPERTS, _SLOTS, _BYTES = 3, 2, 72, 64
"""Enough slots that some are reserved for lookahead."""


def with_overlap(slots: CudaSlots) -> CudaSlots:
    """``slots``, with overlap disabled if the test fails."""
    try:
        works = _replays()
        reason = "a test graph replayed wrong bytes"
    except (RuntimeError, CudaFailure) as failure:
        works, reason = False, str(failure)
    if not works:
        slots.overlaps = False
        logger.warning("Expert offload: slots: no overlap: all misses of a layer are filled before its first GEMM: %s", reason)
    return slots


def _replays() -> bool:
    """Whether each layer finds exactly its experts in the slots of both tensors."""
    trial = _Trial()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads of the rank may call CUDA meanwhile
        trial.forward()
    trial.begin()
    graph.replay()
    return trial.is_right()


class _Trial:
    """Layers with two experts and one row per expert in each of two tensors, all of which miss."""

    def __init__(self) -> None:
        rows = _LAYERS * _EXPERTS + _SLOTS
        values = torch.arange(1, rows + 1, dtype=torch.uint8).view(rows, 1).expand(rows, _BYTES).contiguous()
        self._tensors = [values.cuda() for _ in range(2)]
        self._counters = CudaRoutingCounters(_LAYERS, _EXPERTS)
        served = [SlotLayer(self._rows(at), _EXPERTS, 0, (_LAYERS - at) * _EXPERTS) for at in range(_LAYERS)]
        self._slots = CudaSlots(self._counters, served, [_SLOTS], ahead=True)
        self._slots.set_share(torch.full((_LAYERS, _EXPERTS), WHOLE, dtype=torch.uint8).numpy())
        self._ids = torch.arange(_EXPERTS, dtype=torch.int32).view(1, _EXPERTS).cuda()
        self._lists = [torch.zeros(_LAYERS, size, dtype=torch.int32).cuda() for size in (_EXPERTS, _EXPERTS, 1)]

    def _rows(self, layer: int) -> list[Rows]:
        return [Rows(tensor.data_ptr() + layer * _EXPERTS * _BYTES, _BYTES) for tensor in self._tensors]

    def begin(self) -> None:
        self._counters.begin_step(1, Phase.DECODE)
        self._slots.begin_step()

    def forward(self) -> None:
        for layer in range(_LAYERS):
            order, blocks, padded = (each[layer] for each in self._lists)
            later = frozenset([self._rows(layer)[1].address])
            self._slots.resolve(layer, self._ids, BlockLists(blocks, padded, 1, order=order), later)
            if layer + 1 < _LAYERS:
                self._slots.look_ahead(layer + 1, Guess(lambda: self._ids, lambda logits: logits, 0))
            self._slots.await_fills()
            self._slots.end_layer(layer)

    def is_right(self) -> bool:
        _, blocks, padded = (each.cpu() for each in self._lists)
        if padded.view(-1).tolist() != [_EXPERTS] * _LAYERS:
            return False
        first = torch.arange(_LAYERS).view(-1, 1) * _EXPERTS
        taken, own = (blocks + first).long().flatten(), (torch.arange(_EXPERTS) + first).flatten()
        inside = bool(((taken >= _LAYERS * _EXPERTS) & (taken < _LAYERS * _EXPERTS + _SLOTS)).all())
        return inside and all(bool((tensor.cpu()[taken] == tensor.cpu()[own]).all()) for tensor in self._tensors)
