"""The structures that are passed to and from the compiled library."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Span
from sglang_uvm_offload.memory.slots import AHEAD_ROWS, MAX_TENSORS, NO_TENSORS, Rows

ENDS_PROCESS = (700, 702, 710, 714, 715, 716, 717, 718, 719)
"""Sticky kernel errors, after which every call of the process fails according to the CUDA runtime's documentation: illegal
address, launch timeout, assert, hardware stack, illegal instruction, misaligned address, address space, program counter,
launch failure."""


class CudaFailure(RuntimeError):
    """A CUDA call returned ``error``, which the driver describes as ``reason``. ``span`` is the index of the failing span, or
    None."""

    def __init__(self, call: str, error: int, reason: str, span: int | None):
        super().__init__(f"{call} failed: {reason}")
        self.call = call
        self.reason = reason
        self.span = span
        self.error = error

    def on(self, name: str, span: Span, call: str = "") -> ManagedMemoryError:
        """This failure as an error on the bytes ``span`` of the range ``name``. ``call`` replaces the CUDA function's name."""
        return ManagedMemoryError(call or self.call, name, span, self.reason, ends_process=self.error in ENDS_PROCESS)


class _Span(ctypes.Structure):
    _fields_ = [("offset", c_size_t), ("nbytes", c_size_t)]


class Counted(NamedTuple):
    """The routing of one layer in one step, to be counted."""

    layer: int
    """The layer's index in the counts."""
    ids: torch.Tensor
    """``[rows, top_k]``, contiguous within a row."""
    in_place: bool
    """Whether the layer reads its experts in place, which counts as activations."""


class _Counted(ctypes.Structure):
    _fields_ = [("ids", c_void_p), *((name, c_int) for name in ("rows", "row_stride", "layer", "in_place"))]


class _Failure(ctypes.Structure):
    _fields_ = [("error", c_int), ("span", c_int), ("call", c_char * 40), ("reason", c_char * 216)]


class _Copy(ctypes.Structure):
    _fields_ = [
        *(("source", c_void_p), ("target", c_void_p), ("nbytes", c_size_t)),
    ]


class _Pool(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("num_slots", "layers", "width")),
        *((name, c_void_p) for name in ("worth", "slot_of", "taken")),
    ]


_STATE = ("last", "lately", "long", "classes", "fills", "turn", "share", "came", "counts")


class _Slots(ctypes.Structure):
    _fields_ = [
        ("pool", _Pool),
        *((name, c_int) for name in ("at", "first_slot", "num_experts", "width")),
        *((name, c_void_p) for name in _STATE),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("count", c_int),
        ("copied", c_uint),
        ("base", c_void_p * MAX_TENSORS),
        ("nbytes", c_size_t * MAX_TENSORS),
    ]


class _Routing(ctypes.Structure):
    _fields_ = [
        *(("ids", c_void_p), ("kind", c_int), ("rows", c_int), ("k", c_int), ("order", c_void_p)),
        *(("blocks", c_void_p), ("num_blocks", c_int), ("padded", c_void_p), ("num_padded", c_int)),
        *((name, c_int) for name in ("block_size", "read_rows", "brings")),
        *(("control", c_void_p), ("requests", c_void_p)),
    ]


class _Ahead(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("rows", "first")),
        *((name, c_void_p) for name in ("resolved", "came", "words", "gain")),
    ]


class _Guess(ctypes.Structure):
    _fields_ = [
        ("ids", c_void_p),
        *((name, c_int) for name in ("kind", "rows", "k", "first_expert")),
        ("control", c_void_p),
    ]


_NOTHING_AHEAD = _Ahead()


class AheadState(NamedTuple):
    """Where a layer's experts are copied ahead of its routing. Initially zero."""

    first: int
    """The slot of the first of ``AHEAD_ROWS`` rows."""
    resolved: torch.Tensor
    """int32 ``[1]``: the last step that resolved the layer."""
    came: torch.Tensor
    """int32 ``[AHEAD_ROWS + blocks]``, per layer."""
    words: torch.Tensor
    """int64 ``[CudaOps.ahead_words]``, shared by all layers that use the same half."""
    gain: torch.Tensor
    """int64 ``[CudaOps.gain_kinds]``, per model. The first ones are those of ``Gain``."""


@dataclass(frozen=True)
class PoolState:
    """The slots that L layers share, and what they hold: the state of ``policy/slot_policy`` in VRAM. W is the largest number
    of experts of a layer, rounded up to a multiple of ``CudaOps.pool_chunk``."""

    num_slots: int
    worth: torch.Tensor
    """uint8 ``[L, W]``, initially ``NOT_HELD``."""
    slot_of: torch.Tensor
    """int32 ``[L, W]``: the expert's slot plus one, 0 for none."""
    taken: torch.Tensor
    """int32 ``[1]``"""

    @functools.cached_property
    def pointers(self) -> _Pool:
        return _Pool(self.num_slots, *self.worth.shape, *(each.data_ptr() for each in (self.worth, self.slot_of, self.taken)))


@dataclass(frozen=True)
class SlotState:
    """A layer of E experts with slots: its tensors, and the state of ``policy/slot_policy`` in VRAM. int32 unless stated,
    initially zero."""

    rows: list[Rows]
    num_experts: int
    pool: PoolState
    at: int
    """The layer's index in the pool."""
    first_slot: int
    """The row of slot 0."""
    last: torch.Tensor
    lately: torch.Tensor
    long: torch.Tensor
    """``[E]`` each."""
    classes: torch.Tensor
    """``[2, E]``: class plus one, 0 for none yet."""
    fills: torch.Tensor
    """``[1 + 2 * max_fills]``: the number of fills, then the expert and the slot of each."""
    turn: torch.Tensor
    """``[2]``: used by the kernel's thread blocks."""
    share: torch.Tensor
    """uint8 ``[E]`` or longer."""
    came: torch.Tensor
    """uint8 ``[E]``: whether the expert was brought for the last step that brought any."""
    counts: torch.Tensor
    """int64 ``[2, 4, width]``"""
    ahead: AheadState | None = None

    @functools.cached_property
    def pointers(self) -> _Slots:
        sizes = self.at, self.first_slot, self.num_experts, self.counts.size(2)
        return _Slots(self.pool.pointers, *sizes, *(getattr(self, name).data_ptr() for name in _STATE))

    @functools.cached_property
    def ahead_pointers(self) -> _Ahead:
        if self.ahead is None:
            return _NOTHING_AHEAD
        first, *tensors = self.ahead
        return _Ahead(AHEAD_ROWS, first, *(each.data_ptr() for each in tensors))

    def tensors(self, later: frozenset[int] = NO_TENSORS) -> tuple[_Rows, _Rows]:
        """Descriptors for copying rows: of all tensors except those at the addresses ``later``, and of the latter."""
        if later not in self._tensors:
            late = sum(1 << i for i, row in enumerate(self.rows) if row.address in later)
            self._tensors[later] = _rows(self.rows, (1 << len(self.rows)) - 1 - late), _rows(self.rows, late)
        return self._tensors[later]

    @functools.cached_property
    def _tensors(self) -> dict[frozenset[int], tuple[_Rows, _Rows]]:
        return {}


def _rows(rows: list[Rows], copied: int) -> _Rows:
    addresses, sizes = [row.address for row in rows], [row.nbytes for row in rows]
    return _Rows(len(rows), copied, (c_void_p * MAX_TENSORS)(*addresses), (c_size_t * MAX_TENSORS)(*sizes))


class SlotStep(NamedTuple):
    """What kernels need to know of the current step, at fixed addresses."""

    control: torch.Tensor
    """The counters' control words."""
    requests: torch.Tensor
    """int32 ``[1 + 2 * MAX_REQUESTS]`` of a prefill: the number of requests, then the ``[begin, end)`` rows of each."""
    brings: bool = False
    """Whether the step brings experts into slots."""
