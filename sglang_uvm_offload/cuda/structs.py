"""The structures that the compiled library takes and returns."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Span
from sglang_uvm_offload.memory.slots import MAX_TENSORS, Rows

ENDS_PROCESS = (700, 702, 710, 714, 715, 716, 717, 718, 719)
"""Errors of a kernel after which every call of the process fails, as the CUDA runtime's documentation of each says: illegal
address, launch timeout, assert, hardware stack, illegal instruction, misaligned address, address space, program counter,
launch failure."""


class CudaFailure(RuntimeError):
    """A CUDA call returned ``error``, the driver's description of which is ``reason``. ``span`` is the index of the failing
    span, or None."""

    def __init__(self, call: str, error: int, reason: str, span: int | None):
        super().__init__(f"{call} failed: {reason}")
        self.call = call
        self.reason = reason
        self.span = span
        self.error = error

    def on(self, name: str, span: Span, call: str = "") -> ManagedMemoryError:
        """As an error on the bytes ``span`` of the range ``name``. ``call``: what to name instead of the CUDA function."""
        return ManagedMemoryError(call or self.call, name, span, self.reason, ends_process=self.error in ENDS_PROCESS)


class _Span(ctypes.Structure):
    _fields_ = [("offset", c_size_t), ("nbytes", c_size_t)]


class Counted(NamedTuple):
    """The routing of one layer in one step, to count."""

    layer: int
    """Its index among those that are counted."""
    ids: torch.Tensor
    """``[rows, top_k]``, the ids of a row next to each other."""
    in_place: bool
    """Whether the layer reads its experts in place, which makes activations."""


class _Counted(ctypes.Structure):
    _fields_ = [("ids", c_void_p), *((name, c_int) for name in ("rows", "row_stride", "layer", "in_place"))]


class _Failure(ctypes.Structure):
    _fields_ = [("error", c_int), ("span", c_int), ("call", c_char * 40), ("reason", c_char * 216)]


class _Copy(ctypes.Structure):
    _fields_ = [
        *(("source", c_void_p), ("target", c_void_p), ("nbytes", c_size_t)),
        *(("expert_bytes", c_size_t), ("slot_of", c_void_p)),
    ]


class _Slots(ctypes.Structure):
    _fields_ = [
        *((name, c_int) for name in ("num_experts", "num_slots", "width")),
        *((name, c_void_p) for name in ("slot_of", "owner", "last", "lately", "long", "classes", "fills", "turn")),
        *((name, c_void_p) for name in ("share", "counts")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("count", c_int),
        *((name, c_void_p * MAX_TENSORS) for name in ("base", "copies")),
        ("nbytes", c_size_t * MAX_TENSORS),
    ]


class _Routing(ctypes.Structure):
    _fields_ = [
        *(("ids", c_void_p), ("kind", c_int), ("rows", c_int), ("k", c_int)),
        *(("blocks", c_void_p), ("num_blocks", c_int), ("padded", c_void_p), ("block_size", c_int)),
        *(("control", c_void_p), ("ends", c_void_p)),
    ]


@dataclass(frozen=True)
class SlotState:
    """The slots of one layer of E experts: its tensors, and the state of ``policy/slot_policy`` in VRAM. int32 unless stated,
    all zeros at first."""

    rows: list[Rows]
    slot_of: torch.Tensor
    """``[E]``: the slot, plus one; 0: none"""
    owner: torch.Tensor
    """``[slots]``: the expert, plus one; 0: none"""
    last: torch.Tensor
    lately: torch.Tensor
    long: torch.Tensor
    """``[E]`` each."""
    classes: torch.Tensor
    """``[2, E]``, plus one; 0: none yet"""
    fills: torch.Tensor
    """``[1 + 2 * max_fills]``: how many, and the expert and the slot of each."""
    turn: torch.Tensor
    """``[2]``: for the kernel's blocks."""
    share: torch.Tensor
    """uint8 ``[E]``, or more"""
    counts: torch.Tensor
    """int64 ``[2, 5, width]``"""

    @functools.cached_property
    def pointers(self) -> _Slots:
        names = [field[0] for field in _Slots._fields_ if field[1] is c_void_p]
        pointers = [getattr(self, name).data_ptr() for name in names]
        return _Slots(self.slot_of.numel(), self.owner.numel(), self.counts.size(2), *pointers)

    @functools.cached_property
    def in_place(self) -> _Rows:
        return self.rows_from([row.address for row in self.rows])

    def rows_from(self, copies: Sequence[int]) -> _Rows:
        """The tensors, whose slots are filled from rows at the addresses ``copies``."""
        addresses, sizes = [row.address for row in self.rows], [row.nbytes for row in self.rows]
        pointers = ((c_void_p * MAX_TENSORS)(*of) for of in (addresses, copies))
        return _Rows(len(self.rows), *pointers, (c_size_t * MAX_TENSORS)(*sizes))


class SlotStep(NamedTuple):
    """Where the kernels find what they must know of the step at hand, at addresses that stay."""

    control: torch.Tensor
    """That of the counters."""
    ends: torch.Tensor
    """int32 ``[1 + MAX_REQUESTS]``, of a prefill: how many requests, and the row behind each."""
