"""Unified memory emulated in ordinary memory, for machines without a GPU.

The bytes of a range never move: a CPU computes from them whatever their location. The location that ``place`` requested is
recorded for each block. Nothing is ever full.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.memory.layout import (
    BLOCK_BYTES,
    PAGE_BYTES,
    check_block,
    check_inside,
    check_spans,
    round_up,
    whole_blocks,
)
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, ManagedRange, MemoryInfo, Span

_MAP_NORESERVE = 0x4000
"""From Linux's ``asm-generic/mman-common.h``; Python 3.11 has no name for it."""

UNSET, HOST, DEVICE = 0, 1, 2
CODE = {Location.HOST: HOST, Location.DEVICE: DEVICE}


class _Bytes(np.ndarray):
    """A range's bytes. Its tensors hold them, and a weak reference can watch them."""

    whole: np.ndarray | None
    """The bytes of the allocation that the range is part of."""


@dataclass(eq=False)
class _Live:
    """A live range: the last requested location of each block, and the bytes that its tensors hold."""

    managed: ManagedRange
    placed: np.ndarray
    held: Callable[[], _Bytes | None]
    whole: ManagedRange | None = None
    """The allocation that the range is part of; None if it is one itself."""


class EmulatedMemory:
    """``Memory`` over ordinary memory. Its blocks are small, so that small checkpoints have many."""

    name = "emulated"
    device_type = "cpu"

    def __init__(self, block_bytes: int = PAGE_BYTES) -> None:
        self.block_bytes = block_bytes
        self._live: dict[ManagedRange, _Live] = {}
        self._without_tensor: dict[ManagedRange, _Bytes] = {}
        """The bytes of allocations that no tensor keeps alive yet."""

    def allocate(self, nbytes: int, name: str) -> ManagedRange:
        if nbytes <= 0:
            raise ValueError(f"{name} has {nbytes} bytes")
        try:
            # Private: pages of shared memory take the kernel longer to give. Address space alone takes nothing.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            mapping = mmap.mmap(-1, whole_blocks(nbytes) + BLOCK_BYTES, flags=flags)
        except (OSError, OverflowError) as error:
            raise ManagedMemoryError("allocate", name, Span(0, nbytes), str(error)) from error
        everything = np.frombuffer(mapping, dtype=np.uint8)
        first = everything.ctypes.data
        managed = ManagedRange(round_up(first, BLOCK_BYTES), nbytes, name)
        blocks = round_up(nbytes, self.block_bytes) // self.block_bytes
        begin = managed.address - first
        held = _bytes(everything[begin : begin + nbytes], None)
        self._live[managed] = _Live(managed, np.full(blocks, UNSET, dtype=np.int8), weakref.ref(held))
        self._without_tensor[managed] = held
        return managed

    def part(self, managed: ManagedRange, span: Span, name: str) -> ManagedRange:
        placed = self._find(managed).placed
        check_inside(managed, span)
        part = ManagedRange(managed.address + span.offset, span.nbytes, name)
        self._live[part] = _Live(part, placed[units_of(span, self.block_bytes)], lambda: None, managed)
        return part

    def tensor(self, managed: ManagedRange) -> torch.Tensor:
        return torch.frombuffer(self._held(managed), dtype=torch.uint8)

    def _held(self, managed: ManagedRange) -> _Bytes:
        live = self._find(managed)
        held = live.held()
        if held is None:
            assert live.whole is not None, f"{managed.name} outlived its memory"
            whole = self._held(live.whole)
            begin = managed.address - live.whole.address
            held = _bytes(whole[begin : begin + managed.nbytes], whole)
            live.held = weakref.ref(held)
        elif self._without_tensor.pop(managed, None) is None:  # another tensor; each copy of experts takes one
            return held
        weakref.finalize(held, self._forget, managed).atexit = False
        return held

    def place(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        placed = self._find(managed).placed
        check_spans(managed, spans, self.block_bytes)
        for span in spans:
            placed[units_of(span, self.block_bytes)] = CODE[location]

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def populate(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        self.place(managed, spans, Location.HOST)

    def wait_until_populated(self, address: int | None = None) -> None:
        """Nothing to do: pages are populated at once."""

    def in_vram(self, blocks: Sequence[tuple[ManagedRange, int]]) -> np.ndarray | None:
        found = []
        for managed, offset in blocks:
            placed = self._find(managed).placed
            check_block(managed, offset, self.block_bytes)
            found.append(placed[offset // self.block_bytes] == DEVICE)
        return np.array(found, dtype=bool)

    def free(self, managed: ManagedRange) -> None:
        self._find(managed)
        self._forget(managed)

    def holds(self, managed: ManagedRange) -> bool:
        return managed in self._live

    def info(self) -> MemoryInfo:
        """VRAM is host RAM here: the free VRAM is the free host RAM, and the total adds the blocks placed in VRAM."""
        host = host_available()
        allocations = [live for live in list(self._live.values()) if live.whole is None]
        used = sum(int((live.placed == DEVICE).sum()) for live in allocations) * self.block_bytes
        return MemoryInfo(host, host + used, host)

    def _find(self, managed: ManagedRange) -> _Live:
        if not self.holds(managed):
            raise ValueError(f"{managed.name} is not (or no longer) managed by this memory")
        return self._live[managed]

    def _forget(self, managed: ManagedRange) -> None:
        self._live.pop(managed, None)
        self._without_tensor.pop(managed, None)
        for part in [live.managed for live in list(self._live.values()) if live.whole is managed]:
            self._live.pop(part, None)


def units_of(span: Span, unit: int) -> slice:
    """The runs of ``unit`` bytes that contain a byte of the span."""
    return slice(span.offset // unit, -(-span.end // unit))


def _bytes(array: np.ndarray, whole: np.ndarray | None) -> _Bytes:
    held = array.view(_Bytes)
    held.whole = whole
    return held
