"""Emulated memory that accounts for pages as NVIDIA's driver does, so that tests can check what a GPU would have done.

It tracks what the driver knows about each page (location, preferred location, whether it holds host RAM and VRAM), evicts and
runs out of VRAM as the driver does, and counts calls and bytes. Its behaviour follows the CUDA documentation and the open
kernel modules (tag 580.95.05, kernel-open/nvidia-uvm):

- The driver uses free VRAM before it reclaims any of its own (``uvm_pmm_gpu.c:1677``).
- A block whose pages have all moved to the host goes to the list of unused blocks, which are reclaimed first
  (``uvm_va_block.c:3515``, ``uvm_pmm_gpu.c:1460``), and leaves it when a page moves in. The least recently populated blocks are
  next.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.cpu.memory import CODE, DEVICE, HOST, UNSET, EmulatedMemory, units_of
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES, batches, check_block, check_spans, round_up
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, ManagedRange, MemoryInfo, Span

_PAGES_PER_BLOCK = BLOCK_BYTES // PAGE_BYTES
_OS_PAGE = mmap.PAGESIZE


@dataclass
class Traffic:
    """Counters since the memory was created."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    evicted_bytes: int = 0
    advise_calls: int = 0
    prefetch_calls: int = 0


class _Pages:
    """The driver's view of one range. Arrays are ``[pages]``, except the last two, which are ``[blocks]``."""

    def __init__(self, managed: ManagedRange):
        count = round_up(managed.nbytes, PAGE_BYTES) // PAGE_BYTES
        self.managed = managed
        self.where = np.full(count, UNSET, dtype=np.int8)
        self.preferred = np.full(count, UNSET, dtype=np.int8)
        self.holds_host = np.zeros(count, dtype=bool)
        self.holds_device = np.zeros(count, dtype=bool)
        blocks = -(-count // _PAGES_PER_BLOCK)
        self.populated = np.zeros(blocks, dtype=np.int64)
        self.unused = np.zeros(blocks, dtype=bool)


class SimulatedDriver(EmulatedMemory):
    """``device_bytes`` is the simulated VRAM; None: unlimited. ``block_bytes`` is the unit of residency that this memory
    reports; the driver's own blocks always have ``BLOCK_BYTES``."""

    def __init__(self, device_bytes: int | None = None, block_bytes: int = PAGE_BYTES) -> None:
        super().__init__(block_bytes)
        self.device_bytes = device_bytes
        self.traffic = Traffic()
        self.device_used = 0
        """Bytes of VRAM that managed pages and ``allocate_plain`` hold. A page that moves to the host keeps its VRAM until
        something else needs it."""
        self.device_peak = 0
        self.device_resident = 0
        """Bytes of managed pages in VRAM."""
        self.host_used = 0
        """Bytes of host RAM that managed pages hold. A page that moves to the GPU keeps its host RAM."""
        self.host_peak = 0
        self._queue: list[tuple[ManagedRange, list[Span]]] | None = None
        """Spans to populate while a model loads."""
        self._plain = 0
        self._clock = 0
        self._ranges: dict[ManagedRange, _Pages] = {}

    def allocate(self, nbytes: int, name: str) -> ManagedRange:
        managed = super().allocate(nbytes, name)
        self._ranges[managed] = _Pages(managed)
        return managed

    def place(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        check_spans(managed, spans, self.block_bytes)
        managed, spans = self._whole(managed, spans)
        pages = self._pages(managed)
        self._notice_writes(pages)
        for batch in batches(spans):
            if location is Location.HOST:
                self.prefer(managed, batch, location)
            for span in batch:
                self._prefetch(pages, span, location)
                super().place(managed, [span], location)
            if location is Location.DEVICE:
                self.prefer(managed, batch, location)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Populates as late as allowed."""
        self._queue = []
        try:
            yield
            self.wait_until_populated()
        finally:
            self._queue = None

    def populate(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        if self._queue is None:
            self.place(managed, spans, Location.HOST)
            return
        check_spans(managed, spans, self.block_bytes)
        self.prefer(managed, [Span(0, managed.nbytes)], Location.HOST)
        self._queue.append((managed, list(spans)))

    def _whole(self, managed: ManagedRange, spans: Sequence[Span]) -> tuple[ManagedRange, list[Span]]:
        """Returns the allocation that contains the range, and the spans within it."""
        whole = self._find(managed).whole
        if whole is None:
            return managed, list(spans)
        begin = managed.address - whole.address
        inside = [Span(begin + span.offset, round_up(span.nbytes, self.block_bytes)) for span in spans]
        return whole, [Span(span.offset, min(span.nbytes, whole.nbytes - span.offset)) for span in inside]

    def wait_until_populated(self, address: int | None = None) -> None:
        if self._queue is None:
            return
        queued = [one for one in self._queue if address in (None, one[0].address)]
        self._queue = [one for one in self._queue if one not in queued]
        for managed, spans in queued:
            if self.holds(managed):
                whole, inside = self._whole(managed, spans)
                self._notice_writes(self._pages(whole))
                for span in inside:
                    self._prefetch(self._pages(whole), span, Location.HOST)
                    super().place(whole, [span], Location.HOST)

    def in_vram(self, blocks: Sequence[tuple[ManagedRange, int]]) -> np.ndarray | None:
        for managed, offset in blocks:
            check_block(managed, offset, self.block_bytes)
        spans = [(managed, Span(offset, self.block_bytes)) for managed, offset in blocks]
        found = [self.location(managed, span) is Location.DEVICE for managed, span in spans]
        for managed, span in spans:
            self.read(managed, [span])
        return np.array(found, dtype=bool)

    def info(self) -> MemoryInfo:
        queued = [span for managed, spans in self._queue or [] for span in spans if self.holds(managed)]
        host = max(0, host_available() - sum(round_up(span.nbytes, self.block_bytes) for span in queued))
        if self.device_bytes is None:
            return MemoryInfo(host, host + self.device_used, host)
        return MemoryInfo(self.device_bytes - self.device_used, self.device_bytes, host)

    # What only a simulation can do or know.

    def prefer(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        """Advises the spans and moves nothing."""
        check_spans(managed, spans, self.block_bytes)
        managed, spans = self._whole(managed, spans)
        pages = self._pages(managed)
        for span in spans:
            pages.preferred[pages_of(span)] = CODE[location]
            self.traffic.advise_calls += 1

    def read(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        """Reads the spans (any bytes) as a GPU kernel would. An evicted page that prefers the GPU faults back in, because a GPU
        maps only local pages of a range that prefers it. Other pages stay where they are."""
        managed, spans = self._whole(managed, spans)
        pages = self._pages(managed)
        self._notice_writes(pages)
        for span in spans:
            where = pages_of(span)
            for run in _runs((pages.where[where] != DEVICE) & (pages.preferred[where] == DEVICE)):
                self._to_device(pages, slice(where.start + run.start, where.start + run.stop), "read")

    def location(self, managed: ManagedRange, span: Span) -> Location | None:
        """Returns where the whole span is, or None if it is mixed or was never populated."""
        managed, (span,) = self._whole(managed, [span])
        pages = self._pages(managed)
        self._notice_writes(pages)
        codes = pages.where[pages_of(span)]
        return next((location for location, code in CODE.items() if (codes == code).all()), None)

    def allocate_plain(self, nbytes: int, name: str) -> None:
        """Acts as ``cudaMalloc``: takes unmanaged VRAM and evicts managed blocks if it must."""
        self._make_room(nbytes, "cudaMalloc", name, Span(0, nbytes), keep=None)
        self._plain += nbytes
        self._device_takes(nbytes)

    def free_plain(self, nbytes: int) -> None:
        if nbytes > self._plain:
            raise ValueError(f"{nbytes} bytes freed of {self._plain} plain ones")
        self._plain -= nbytes
        self.device_used -= nbytes

    def notice_writes(self) -> None:
        """Accounts for host pages that writes populated."""
        for pages in list(self._ranges.values()):
            self._notice_writes(pages)

    @property
    def live_ranges(self) -> int:
        return len(self._ranges)

    def _prefetch(self, pages: _Pages, span: Span, location: Location) -> None:
        self.traffic.prefetch_calls += 1
        if location is Location.DEVICE:
            self._to_device(pages, pages_of(span), "place")
        else:
            self._to_host(pages, pages_of(span))

    def _pages(self, managed: ManagedRange) -> _Pages:
        self._find(managed)
        return self._ranges[managed]

    def _forget(self, managed: ManagedRange) -> None:
        super()._forget(managed)
        pages = self._ranges.pop(managed, None)
        if pages is not None:
            self.device_resident -= int((pages.where == DEVICE).sum()) * PAGE_BYTES
            self.device_used -= int(pages.holds_device.sum()) * PAGE_BYTES
            self.host_used -= int(pages.holds_host.sum()) * PAGE_BYTES

    def _notice_writes(self, pages: _Pages) -> None:
        """Finds pages that the CPU populated in host RAM by first touch: asks the kernel which pages exist."""
        if not (pages.where == UNSET).any():
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
        blocks = np.unique(away // _PAGES_PER_BLOCK)
        pages.populated[blocks] = self._clock
        pages.unused[blocks] = False
        self._device_takes(nbytes)
        self.traffic.to_device_bytes += moved

    def _to_host(self, pages: _Pages, where: slice) -> None:
        away = np.flatnonzero(pages.where[where] != HOST) + where.start
        moved = int((pages.where[away] == DEVICE).sum()) * PAGE_BYTES
        pages.where[away] = HOST
        self._hold_host(pages, away)
        self.device_resident -= moved
        empty = _by_block(pages.where == DEVICE) == 0
        pages.unused |= empty & (_by_block(pages.holds_device) > 0)
        self.traffic.to_host_bytes += moved

    def _hold_host(self, pages: _Pages, which: np.ndarray) -> None:
        self.host_used += int((~pages.holds_host[which]).sum()) * PAGE_BYTES
        self.host_peak = max(self.host_peak, self.host_used)
        pages.holds_host[which] = True

    def _device_takes(self, nbytes: int) -> None:
        self.device_used += nbytes
        self.device_peak = max(self.device_peak, self.device_used)

    def _make_room(self, nbytes: int, call: str, name: str, span: Span, keep: tuple[_Pages, slice] | None) -> None:
        """Reclaims VRAM block by block until ``nbytes`` fit: unused blocks first, then the least recently populated ones, whose
        pages move to the host. ``keep`` are pages that are being populated."""
        if self.device_bytes is None or self.device_used + nbytes <= self.device_bytes:
            return
        kept = range(0)
        if keep is not None:
            kept = range(keep[1].start // _PAGES_PER_BLOCK, -(-keep[1].stop // _PAGES_PER_BLOCK))
        candidates = []
        for pages in self._ranges.values():
            held = _by_block(pages.holds_device)
            for block in np.flatnonzero(held):
                if keep is None or pages is not keep[0] or block not in kept:
                    order = (not pages.unused[block], int(pages.populated[block]), pages.managed.address, int(block))
                    candidates.append((order, int(held[block]) * PAGE_BYTES, pages))
        candidates.sort(key=lambda c: c[0])
        if self.device_used - sum(held_bytes for _, held_bytes, _ in candidates) + nbytes > self.device_bytes:
            raise ManagedMemoryError(call, name, span, f"out of VRAM: {self.device_bytes - self.device_used} bytes are free")
        for (*_, block), held_bytes, pages in candidates:
            if self.device_used + nbytes <= self.device_bytes:
                return
            before = self.device_resident
            for run in _runs(pages.where[_block(block)] == DEVICE):
                first = block * _PAGES_PER_BLOCK
                self._to_host(pages, slice(first + run.start, first + run.stop))
            self.traffic.evicted_bytes += before - self.device_resident
            pages.holds_device[_block(block)] = False
            pages.unused[block], pages.populated[block] = False, 0
            self.device_used -= held_bytes


def pages_of(span: Span) -> slice:
    """Returns the pages that overlap the span."""
    return units_of(span, PAGE_BYTES)


def _block(block: int) -> slice:
    return slice(block * _PAGES_PER_BLOCK, (block + 1) * _PAGES_PER_BLOCK)


def _by_block(flags: np.ndarray) -> np.ndarray:
    """Returns how many pages of each block are flagged."""
    return np.add.reduceat(flags, np.arange(0, flags.size, _PAGES_PER_BLOCK), dtype=np.int64)


def _runs(mask: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


_libc = ctypes.CDLL(None, use_errno=True)
_bytes = ctypes.POINTER(ctypes.c_ubyte)
