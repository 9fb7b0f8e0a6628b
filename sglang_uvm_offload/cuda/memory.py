"""Unified memory of a GPU: the ``Memory`` protocol over ``cudaMallocManaged``, advice and prefetch.

Every page of a range is mapped for the GPU wherever it is (AccessedBy, set once at allocation), so a move is one advice and one
prefetch per span. All calls fail on a stream that is capturing a CUDA graph: graphs have no nodes for advice or prefetch, and
blocks that move between replays need none.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sglang_uvm_offload.cuda.device import device_problems
from sglang_uvm_offload.cuda.numa import nearest_host_node
from sglang_uvm_offload.cuda.ops import device_ops
from sglang_uvm_offload.cuda.read_times import PLAIN_BYTES, ReadTimes
from sglang_uvm_offload.cuda.structs import CudaFailure
from sglang_uvm_offload.memory.host_ram import HOST_LEFT_BYTES, host_available
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, batches, check_block, check_inside, check_spans, whole_blocks
from sglang_uvm_offload.memory.populating import Populating
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, ManagedRange, MemoryInfo, Span
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

LOOK_BYTES = 48 << 20
"""How many bytes to populate between checks of the remaining host RAM. A check takes as long as populating a few MiB."""

READERS = 4
"""Threads that read a byte of each block to populate it. On an H200, 1, 2, 4 and 8 threads that wrote a byte of each 4 KiB page
populated 3.2, 4.9, 6.9 and 8.8 GB/s, and one that prefetched 5.4 (benchmarks/results/2026-11-27-nvidia-h200-2/probe.log).
Threads that read, followed by a prefetch, have not been measured. Not eight, because SGLang reads its checkpoint at the same
time."""


class _Owner:
    """Keeps a range alive. torch reads the address from it and holds it while a tensor over the range lives."""

    def __init__(self, managed: ManagedRange, whole: _Owner | None):
        """``whole`` is the owner of the allocation that the range is part of."""
        self.whole = whole
        self.__cuda_array_interface__ = {
            "shape": (managed.nbytes,),
            "typestr": "|u1",
            "data": (managed.address, False),
            "version": 3,
        }


@dataclass(eq=False)
class _Live:
    """A live range, and a weak reference to the owner that its tensors hold."""

    managed: ManagedRange
    owner: Callable[[], _Owner | None]
    whole: ManagedRange | None = None
    """The allocation that the range is part of."""


class CudaMemory:
    """``Memory`` of one GPU (``device`` is torch's index). The constructor builds the CUDA library if needed. It raises
    ``RuntimeError`` with all reasons why this GPU cannot be used."""

    name = "uvm"
    device_type = "cuda"
    block_bytes = BLOCK_BYTES

    def __init__(self, device: int = 0):
        if problems := device_problems(device):
            raise RuntimeError("this machine cannot keep experts in unified memory: " + "; ".join(problems))
        self.device = device
        self._ops = device_ops(device)
        self._process = os.getpid()
        self._live: dict[ManagedRange, _Live] = {}
        self._bases: dict[ManagedRange, int] = {}
        """The base pointer for the driver's free. Includes allocations freed under a live tensor, unlike ``_live``."""
        self._populating: Populating | None = None
        """Set while a model loads."""
        self._unchecked_bytes = 0
        """Bytes populated since the last check of the remaining host RAM."""
        self.host_node = self._use_host_node(nearest_host_node(device))
        """The NUMA node of host pages; None for the node of the thread that first touches a page."""

    def _use_host_node(self, node: int | None) -> int | None:
        """Put host pages on ``node``. Returns ``node``, or None if the driver refuses it, as in some sandboxes."""
        self._ops.use_host_node(self.device, node)
        if node is None:
            return None
        tried = self.allocate(BLOCK_BYTES, "a test of the NUMA node")
        try:
            self.place(tried, [Span(0, BLOCK_BYTES)], Location.HOST)
        except ManagedMemoryError as error:
            logger.warning("Expert offload: cannot put host pages on NUMA node %d of GPU %d: %s", node, self.device, error)
            self._ops.use_host_node(self.device, None)
            return None
        finally:
            self.free(tried)
        logger.info("Expert offload: offloaded experts of GPU %d are on its NUMA node %d", self.device, node)
        return node

    def allocate(self, nbytes: int, name: str) -> ManagedRange:
        if nbytes <= 0:
            raise ValueError(f"{name} has {nbytes} bytes")
        try:
            base, address = self._ops.allocate(self.device, whole_blocks(nbytes), BLOCK_BYTES, self._caller())
        except CudaFailure as failure:
            raise failure.on(name, Span(0, nbytes)) from failure
        managed = ManagedRange(address, nbytes, name)
        self._bases[managed] = base
        self._live[managed] = _Live(managed, lambda: None)
        return managed

    def part(self, managed: ManagedRange, span: Span, name: str) -> ManagedRange:
        self._find(managed)
        check_inside(managed, span)
        part = ManagedRange(managed.address + span.offset, span.nbytes, name)
        self._live[part] = _Live(part, lambda: None, managed)
        return part

    def tensor(self, managed: ManagedRange) -> torch.Tensor:
        return torch.as_tensor(self._owner_of(managed), device=f"cuda:{self.device}")

    def _owner_of(self, managed: ManagedRange) -> _Owner:
        live = self._find(managed)
        owner = live.owner()
        if owner is None:
            owner = _Owner(managed, None if live.whole is None else self._owner_of(live.whole))
            live.owner = weakref.ref(owner)
            # Not at exit: tensors in globals outlive the exit handlers, and the driver frees everything then anyway.
            weakref.finalize(owner, self._last_tensor_gone, managed).atexit = False
        return owner

    def place(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        self._find(managed)
        check_spans(managed, spans, BLOCK_BYTES)
        for batch in batches(spans):
            try:
                self._ops.place(self.device, managed.address, [_whole(span) for span in batch], location, self._caller())
            except CudaFailure as failure:
                raise _failed_on(failure, managed, batch, location) from failure

    @contextmanager
    def loading(self) -> Iterator[None]:
        # By default a new thread uses GPU 0, where its first call would create a context and take VRAM.
        populating = Populating(self._populate, begin=lambda: torch.cuda.set_device(self.device))
        self._populating = populating
        try:
            yield
            populating.wait()
        finally:
            self._populating = None
            populating.drop()

    def populate(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        owner = self._find(managed).owner
        if self._populating is None or owner() is None:  # without a tensor, ``free`` frees immediately
            self.place(managed, spans, Location.HOST)
            return
        check_spans(managed, spans, BLOCK_BYTES)
        self._populating.check()
        if not spans:
            return
        # One call instead of one per span, because each waits for the address space lock that populating holds.
        try:
            self._ops.prefer_host(self.device, managed.address, whole_blocks(managed.nbytes), self._caller())
        except CudaFailure as failure:
            raise _failed_on(failure, managed, [Span(0, managed.nbytes)], Location.HOST) from failure
        self._populating.add(managed, owner, spans)

    def _populate(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        nbytes = sum(span.nbytes for span in spans)
        self._unchecked_bytes += nbytes
        if self._unchecked_bytes > LOOK_BYTES:
            left, self._unchecked_bytes = host_available(), nbytes
            if left < HOST_LEFT_BYTES:  # the OOM killer would soon act
                reason = f"only {size(left)} of host RAM is left, but {size(HOST_LEFT_BYTES)} must stay free"
                raise ManagedMemoryError("populate", managed.name, spans[0], reason)
        try:
            self._ops.populate(self.device, managed.address, [_whole(span) for span in spans], READERS)
        except CudaFailure as failure:
            raise _failed_on(failure, managed, spans, Location.HOST) from failure

    def wait_until_populated(self, address: int | None = None) -> None:
        populating = self._populating
        if populating is None:
            return
        if address is None:
            return populating.wait()
        for managed in [each for each in list(self._live) if each.address == address]:
            populating.wait_for(managed)

    def in_vram(self, blocks: Sequence[tuple[ManagedRange, int]]) -> np.ndarray | None:
        owners = [self._find(managed).owner() for managed, _ in blocks]
        for managed, offset in blocks:
            check_block(managed, offset, BLOCK_BYTES)
        try:
            found = self._read_times.in_vram([managed.address + offset for managed, offset in blocks])
        except CudaFailure as failure:
            raise failure.on("an eviction check", Span(0, 0)) from failure
        del owners  # kept the ranges alive while the GPU read them
        return found

    def free(self, managed: ManagedRange) -> None:
        """Free the range once its last tensor is gone, immediately if there is none. Tensors stay valid until then."""
        live = self._find(managed)
        self._forget(managed)
        if live.owner() is None:
            self._give_back(managed)

    def holds(self, managed: ManagedRange) -> bool:
        return managed in self._live

    def info(self) -> MemoryInfo:
        try:
            free, total = self._ops.memory_info(self.device)
        except CudaFailure as failure:
            raise failure.on("the device", Span(0, 0)) from failure
        awaited = 0 if self._populating is None else self._populating.nbytes
        return MemoryInfo(free, total, max(0, host_available() - awaited))

    @cached_property
    def _read_times(self) -> ReadTimes:
        in_host_ram = self.allocate(BLOCK_BYTES, "the reference block in host RAM")
        self.place(in_host_ram, [Span(0, BLOCK_BYTES)], Location.HOST)
        try:
            return ReadTimes(self._ops, self.device, in_host_ram.address)
        except RuntimeError as error:  # torch is out of memory
            self.free(in_host_ram)
            raise ManagedMemoryError("allocate", "the reference block in VRAM", Span(0, PLAIN_BYTES), str(error)) from error

    def _find(self, managed: ManagedRange) -> _Live:
        if not self.holds(managed):
            raise ValueError(f"{managed.name} is not (or no longer) managed by this memory")
        return self._live[managed]

    def _forget(self, managed: ManagedRange) -> None:
        """Forget the range and its parts."""
        live = self._live.pop(managed, None)
        if live is not None and live.whole is None:
            for part in [each.managed for each in list(self._live.values()) if each.whole is managed]:
                self._live.pop(part, None)

    def _caller(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def _last_tensor_gone(self, managed: ManagedRange) -> None:
        self._forget(managed)
        self._give_back(managed)

    def _give_back(self, managed: ManagedRange) -> None:
        """Free an allocation in the driver. Does nothing for a part, whose memory belongs to the allocation."""
        # A forked child has the tensors but not the GPU; the range belongs to its parent.
        if os.getpid() != self._process or (base := self._bases.pop(managed, None)) is None:
            return
        try:
            self._ops.free(self.device, base)
        except CudaFailure as failure:
            raise failure.on(managed.name, Span(0, managed.nbytes)) from failure


def _failed_on(failure: CudaFailure, managed: ManagedRange, spans: Sequence[Span], location: Location) -> ManagedMemoryError:
    """The error of a call that should have moved ``spans`` to ``location``. A failure without a span concerns all of them."""
    begin, end = min(span.offset for span in spans), max(span.end for span in spans)
    everything = Span(begin, end - begin)
    span = everything if failure.span is None else spans[failure.span]
    return failure.on(managed.name, span, f"{failure.call} to {location.value}")


def _whole(span: Span) -> Span:
    """Extend a span that ends with its range to the end of its last block, which nothing else uses."""
    return Span(span.offset, whole_blocks(span.nbytes))
