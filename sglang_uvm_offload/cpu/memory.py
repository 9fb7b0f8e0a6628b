"""Unified memory emulated in ordinary memory, for machines without a GPU.

The bytes of a range never move: a CPU computes from them whatever their location. The location that ``place`` requested is
recorded for each block. Nothing is ever full.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES, check_block, check_spans, round_up, whole_blocks
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, ManagedRange, MemoryInfo, Span

UNSET, HOST, DEVICE = 0, 1, 2
CODE = {Location.HOST: HOST, Location.DEVICE: DEVICE}


class _Mapping(mmap.mmap):
    """Anonymous memory that a weak reference can watch."""


@dataclass(eq=False)
class _Live:
    """A live range: the last requested location of each block, and the mapping that its tensors hold."""

    managed: ManagedRange
    placed: np.ndarray
    mapping: weakref.ref[_Mapping]


class EmulatedMemory:
    """``Memory`` over ordinary memory. Its blocks are small, so that small checkpoints have many."""

    name = "emulated"
    device_type = "cpu"

    def __init__(self, block_bytes: int = PAGE_BYTES) -> None:
        self.block_bytes = block_bytes
        self._live: dict[int, _Live] = {}
        self._without_tensor: dict[int, _Mapping] = {}
        """By address: mappings that no tensor keeps alive yet."""

    def allocate(self, nbytes: int, name: str) -> ManagedRange:
        if nbytes <= 0:
            raise ValueError(f"{name} has {nbytes} bytes")
        try:
            # Private: pages of shared memory take the kernel longer to give.
            mapping = _Mapping(-1, whole_blocks(nbytes) + BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ManagedMemoryError("allocate", name, Span(0, nbytes), str(error)) from error
        managed = ManagedRange(round_up(_address(mapping), BLOCK_BYTES), nbytes, name)
        blocks = round_up(nbytes, self.block_bytes) // self.block_bytes
        self._live[managed.address] = _Live(managed, np.full(blocks, UNSET, dtype=np.int8), weakref.ref(mapping))
        self._without_tensor[managed.address] = mapping
        return managed

    def tensor(self, managed: ManagedRange) -> torch.Tensor:
        live = self._find(managed)
        mapping = self._without_tensor.pop(managed.address, None)
        if mapping is not None:  # the first tensor; each copy to a stream buffer takes another one
            weakref.finalize(mapping, self._forget, managed.address).atexit = False
        mapping = mapping or live.mapping()
        assert mapping is not None, f"{managed.name} outlived its memory"
        offset = managed.address - _address(mapping)
        return torch.frombuffer(mapping, dtype=torch.uint8, count=managed.nbytes, offset=offset)

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
        """Nothing is ever on its way."""

    def in_vram(self, blocks: Sequence[tuple[ManagedRange, int]]) -> np.ndarray | None:
        found = []
        for managed, offset in blocks:
            placed = self._find(managed).placed
            check_block(managed, offset, self.block_bytes)
            found.append(placed[offset // self.block_bytes] == DEVICE)
        return np.array(found, dtype=bool)

    def free(self, managed: ManagedRange) -> None:
        self._find(managed)
        self._forget(managed.address)

    def holds(self, managed: ManagedRange) -> bool:
        live = self._live.get(managed.address)
        return live is not None and live.managed is managed

    def info(self) -> MemoryInfo:
        """VRAM is host RAM here: the free VRAM is the free host RAM, and the total adds the blocks placed in VRAM."""
        host = host_available()
        used = sum(int((live.placed == DEVICE).sum()) for live in list(self._live.values())) * self.block_bytes
        return MemoryInfo(host, host + used, host)

    def _find(self, managed: ManagedRange) -> _Live:
        if not self.holds(managed):
            raise ValueError(f"{managed.name} is not (or no longer) managed by this memory")
        return self._live[managed.address]

    def _forget(self, address: int) -> None:
        self._live.pop(address, None)
        self._without_tensor.pop(address, None)


def units_of(span: Span, unit: int) -> slice:
    """The runs of ``unit`` bytes that contain a byte of the span."""
    return slice(span.offset // unit, -(-span.end // unit))


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
