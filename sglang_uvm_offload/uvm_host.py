"""Unified memory emulated in host memory, for machines without a GPU.

It keeps for each page what the driver would know (location, preferred location, whether it holds host RAM and VRAM), evicts as
the driver would, refuses what the driver refuses, and counts bytes and modelled seconds. The bytes themselves stay where they
are: a CPU computes from them whatever their location. The behaviours come from the CUDA documentation and the open
kernel modules (tag 580.95.05, kernel-open/nvidia-uvm).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_uvm_offload.host_ram import host_available
from sglang_uvm_offload.layout import BLOCK_BYTES, PAGE_BYTES, check_spans, round_up, whole_blocks
from sglang_uvm_offload.uvm import Location, ManagedRange, MemoryFault, MemoryInfo, Span

UNSET, HOST, DEVICE = 0, 1, 2
_CODE = {Location.HOST: HOST, Location.DEVICE: DEVICE}
_LOCATION = {HOST: Location.HOST, DEVICE: Location.DEVICE}
_PAGES_PER_BLOCK = BLOCK_BYTES // PAGE_BYTES
_OS_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class LinkModel:
    """What PCIe costs, in bytes a second and seconds. The defaults are public leads for PCIe 5 x16 on an H100 (copy engine
    56 GB/s, reads by the SMs 35 GB/s) and assumptions for the two latencies; none was measured by this project."""

    copy_bytes_per_s: float = 56e9
    read_bytes_per_s: float = 35e9
    call_seconds: float = 10e-6
    fault_seconds: float = 30e-6

    def copy_seconds(self, nbytes: int) -> float:
        return nbytes / self.copy_bytes_per_s

    def read_seconds(self, nbytes: int) -> float:
        return nbytes / self.read_bytes_per_s


@dataclass
class Traffic:
    """Counters since the memory was made: bytes, calls, and modelled seconds of the link."""

    read_through_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    evicted_bytes: int = 0
    faulted_bytes: int = 0
    advise_calls: int = 0
    prefetch_calls: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Pages:
    """The driver's view of one range. All arrays are ``[pages]``; ``populated`` is ``[blocks]``."""

    managed: ManagedRange
    mapping: weakref.ref[_Mapping]
    where: np.ndarray
    holds_host: np.ndarray
    holds_device: np.ndarray
    preferred: np.ndarray
    prefetched: np.ndarray
    populated: np.ndarray = field(repr=False)


class _Mapping(mmap.mmap):
    """Anonymous memory that a weak reference can watch."""


class HostMemory:
    """``uvm.Memory`` over ordinary memory. ``device_bytes`` is the VRAM to play, None for as much as is asked for."""

    name = "host"
    device_type = "cpu"

    def __init__(self, device_bytes: int | None = None, link: LinkModel | None = None):
        self.device_bytes = device_bytes
        self.link = link or LinkModel()
        self.traffic = Traffic()
        self.device_used = 0
        """Bytes of VRAM that managed pages and ``allocate_plain`` hold. A page keeps its VRAM after it moved to the host, until
        something else needs it."""
        self.device_peak = 0
        self.device_resident = 0
        """Bytes of managed pages that are in VRAM."""
        self.host_used = 0
        """Bytes of host RAM that managed pages hold. A page keeps its host copy's room after it moved to the GPU."""
        self.host_peak = 0
        self._plain = 0
        self._clock = 0
        self._ranges: dict[int, _Pages] = {}
        self._mappings: dict[int, _Mapping] = {}

    def allocate(self, nbytes: int, name: str) -> ManagedRange:
        if nbytes <= 0:
            raise ValueError(f"{name} has {nbytes} bytes")
        try:
            mapping = _Mapping(-1, whole_blocks(nbytes) + BLOCK_BYTES)
        except (OSError, OverflowError) as error:
            raise MemoryFault("allocate", name, Span(0, nbytes), str(error)) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        managed = ManagedRange(round_up(start, BLOCK_BYTES), nbytes, name)
        count = round_up(nbytes, PAGE_BYTES) // PAGE_BYTES
        codes = (np.zeros(count, dtype=np.int8) for _ in range(3))
        self._ranges[managed.address] = _Pages(
            managed,
            weakref.ref(mapping),
            next(codes),
            np.zeros(count, dtype=bool),
            np.zeros(count, dtype=bool),
            next(codes),
            next(codes),
            np.zeros(-(-count // _PAGES_PER_BLOCK), dtype=np.int64),
        )
        self._mappings[managed.address] = mapping
        return managed

    def tensor(self, managed: ManagedRange) -> torch.Tensor:
        self._pages(managed)
        mapping = self._mappings.pop(managed.address, None) or self._ranges[managed.address].mapping()
        assert mapping is not None, f"{managed.name} outlived its memory"
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        weakref.finalize(mapping, self._forget, managed.address).atexit = False
        return torch.frombuffer(mapping, dtype=torch.uint8, count=managed.nbytes, offset=managed.address - start)

    def prefer(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        pages = self._checked(managed, spans)
        for span in spans:
            pages.preferred[_slice(span)] = _CODE[location]
            self.traffic.advise_calls += 1
            self.traffic.seconds += self.link.call_seconds

    def prefetch(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        pages = self._checked(managed, spans)
        self._notice_writes(pages)
        for span in spans:
            where = _slice(span)
            self.traffic.prefetch_calls += 1
            self.traffic.seconds += self.link.call_seconds
            if location is Location.DEVICE:
                self._to_device(pages, where, "prefetch")
            else:
                self._to_host(pages, where)
            pages.prefetched[where] = _CODE[location]

    def preferred(self, managed: ManagedRange, span: Span) -> Location | None:
        return _shared(self._checked(managed, [span]).preferred[_slice(span)])

    def last_prefetch(self, managed: ManagedRange, span: Span) -> Location | None:
        return _shared(self._checked(managed, [span]).prefetched[_slice(span)])

    def synchronize(self) -> None:
        """Nothing is ever under way here."""

    def free(self, managed: ManagedRange) -> None:
        self._pages(managed)
        self._forget(managed.address)

    def holds(self, managed: ManagedRange) -> bool:
        pages = self._ranges.get(managed.address)
        return pages is not None and pages.managed is managed

    def info(self) -> MemoryInfo:
        host = host_available()
        if self.device_bytes is None:
            return MemoryInfo(host, host + self.device_used, host)
        return MemoryInfo(self.device_bytes - self.device_used, self.device_bytes, host)

    # What only an emulation can do or tell.

    def read(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        """A kernel on the GPU reads the spans (any bytes): local pages cost nothing, host pages are read over the
        link, and a page that prefers the GPU but was evicted faults back in (a GPU maps only local pages of a
        range that prefers it)."""
        pages = self._pages(managed)
        self._notice_writes(pages)
        for span in spans:
            where = slice(span.offset // PAGE_BYTES, -(-span.end // PAGE_BYTES))
            away = pages.where[where] != DEVICE
            thrashing = away & (pages.preferred[where] == DEVICE)
            through = int((away & ~thrashing).sum()) * PAGE_BYTES
            self.traffic.read_through_bytes += through
            self.traffic.seconds += self.link.read_seconds(through)
            for run in _runs(thrashing):
                faulted = slice(where.start + run.start, where.start + run.stop)
                self.traffic.faulted_bytes += (faulted.stop - faulted.start) * PAGE_BYTES
                self.traffic.seconds += self.link.fault_seconds
                self._to_device(pages, faulted, "read")

    def location(self, managed: ManagedRange, span: Span) -> Location | None:
        """Where the whole span really is, None where it is mixed or was never populated."""
        pages = self._pages(managed)
        self._notice_writes(pages)
        return _shared(pages.where[slice(span.offset // PAGE_BYTES, -(-span.end // PAGE_BYTES))])

    def allocate_plain(self, nbytes: int, name: str) -> None:
        """``cudaMalloc``: takes VRAM that is not managed, evicting managed blocks where it has to."""
        self._make_room(nbytes, "cudaMalloc", name, Span(0, nbytes), keep=None)
        self._plain += nbytes
        self._device_takes(nbytes)

    def free_plain(self, nbytes: int) -> None:
        if nbytes > self._plain:
            raise ValueError(f"{nbytes} bytes freed of {self._plain} plain ones")
        self._plain -= nbytes
        self.device_used -= nbytes

    def notice_writes(self) -> None:
        """Account for the host pages that were populated by being written."""
        for pages in list(self._ranges.values()):
            self._notice_writes(pages)

    @property
    def live_ranges(self) -> int:
        return len(self._ranges)

    def _pages(self, managed: ManagedRange) -> _Pages:
        if not self.holds(managed):
            raise ValueError(f"{managed.name} is not (or no longer) managed by this memory")
        return self._ranges[managed.address]

    def _checked(self, managed: ManagedRange, spans: Sequence[Span]) -> _Pages:
        pages = self._pages(managed)
        check_spans(managed, spans)
        return pages

    def _forget(self, address: int) -> None:
        pages = self._ranges.pop(address, None)
        self._mappings.pop(address, None)
        if pages is not None:
            self.device_resident -= int((pages.where == DEVICE).sum()) * PAGE_BYTES
            self.device_used -= int(pages.holds_device.sum()) * PAGE_BYTES
            self.host_used -= int(pages.holds_host.sum()) * PAGE_BYTES

    def _notice_writes(self, pages: _Pages) -> None:
        """First touch by the CPU populates in host RAM: found by asking the kernel which pages exist."""
        if pages.mapping() is None or not (pages.where == UNSET).any():
            return
        length = round_up(pages.managed.nbytes, PAGE_BYTES)
        present = np.zeros(length // _OS_PAGE, dtype=np.uint8)
        if _libc.mincore(ctypes.c_void_p(pages.managed.address), ctypes.c_size_t(length), present.ctypes.data_as(_bytes)):
            raise OSError(ctypes.get_errno(), f"mincore of {pages.managed.name}")
        written = (present & 1).reshape(-1, PAGE_BYTES // _OS_PAGE).any(axis=1) & (pages.where == UNSET)
        pages.where[written] = HOST
        self._hold_host(pages, np.flatnonzero(written))

    def _to_device(self, pages: _Pages, where: slice, call: str) -> None:
        away = np.flatnonzero(pages.where[where] != DEVICE) + where.start
        if not away.size:
            return
        nbytes = int((~pages.holds_device[away]).sum()) * PAGE_BYTES
        span = Span(where.start * PAGE_BYTES, (where.stop - where.start) * PAGE_BYTES)
        self._make_room(nbytes, call, pages.managed.name, span, keep=(pages, where))
        moved = int((pages.where[away] == HOST).sum()) * PAGE_BYTES
        pages.where[away] = DEVICE
        pages.holds_device[away] = True
        self.device_resident += away.size * PAGE_BYTES
        self._clock += 1
        pages.populated[np.unique(away // _PAGES_PER_BLOCK)] = self._clock
        self._device_takes(nbytes)
        self.traffic.to_device_bytes += moved
        self.traffic.seconds += self.link.copy_seconds(moved)

    def _to_host(self, pages: _Pages, where: slice) -> None:
        away = np.flatnonzero(pages.where[where] != HOST) + where.start
        moved = int((pages.where[away] == DEVICE).sum()) * PAGE_BYTES
        pages.where[away] = HOST
        self._hold_host(pages, away)
        self.device_resident -= moved
        self.traffic.to_host_bytes += moved
        self.traffic.seconds += self.link.copy_seconds(moved)

    def _hold_host(self, pages: _Pages, which: np.ndarray) -> None:
        self.host_used += int((~pages.holds_host[which]).sum()) * PAGE_BYTES
        self.host_peak = max(self.host_peak, self.host_used)
        pages.holds_host[which] = True

    def _device_takes(self, nbytes: int) -> None:
        self.device_used += nbytes
        self.device_peak = max(self.device_peak, self.device_used)

    def _make_room(self, nbytes: int, call: str, name: str, span: Span, keep: tuple[_Pages, slice] | None) -> None:
        """Take VRAM back until ``nbytes`` fit, a block at a time: from those without a page in it first, then from the least
        recently populated, whose pages go to the host. ``keep`` are pages being populated."""
        if self.device_bytes is None or self.device_used + nbytes <= self.device_bytes:
            return
        kept = range(0)
        if keep is not None:
            kept = range(keep[1].start // _PAGES_PER_BLOCK, -(-keep[1].stop // _PAGES_PER_BLOCK))
        candidates = []
        for pages in self._ranges.values():
            resident, held = (_by_block(flags) for flags in (pages.where == DEVICE, pages.holds_device))
            for block in np.flatnonzero(held):
                if keep is None or pages is not keep[0] or block not in kept:
                    order = (bool(resident[block]), int(pages.populated[block]), pages.managed.address, int(block))
                    candidates.append((order, int(held[block]) * PAGE_BYTES, pages))
        candidates.sort(key=lambda c: c[0])
        if self.device_used - sum(held_bytes for _, held_bytes, _ in candidates) + nbytes > self.device_bytes:
            raise MemoryFault(call, name, span, f"out of VRAM: {self.device_bytes - self.device_used} bytes are free")
        for (*_, block), held_bytes, pages in candidates:
            if self.device_used + nbytes <= self.device_bytes:
                return
            before = self.device_resident
            for run in _runs(pages.where[_block(block)] == DEVICE):
                first = block * _PAGES_PER_BLOCK
                self._to_host(pages, slice(first + run.start, first + run.stop))
            self.traffic.evicted_bytes += before - self.device_resident
            pages.holds_device[_block(block)] = False
            self.device_used -= held_bytes


def _slice(span: Span) -> slice:
    return slice(span.offset // PAGE_BYTES, -(-span.end // PAGE_BYTES))


def _block(block: int) -> slice:
    return slice(block * _PAGES_PER_BLOCK, (block + 1) * _PAGES_PER_BLOCK)


def _by_block(flags: np.ndarray) -> np.ndarray:
    """How many of each block's pages are flagged."""
    return np.add.reduceat(flags, np.arange(0, flags.size, _PAGES_PER_BLOCK), dtype=np.int64)


def _runs(mask: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _shared(codes: np.ndarray) -> Location | None:
    first = codes[0]
    return _LOCATION.get(int(first)) if (codes == first).all() else None


_libc = ctypes.CDLL(None, use_errno=True)
_bytes = ctypes.POINTER(ctypes.c_ubyte)
