"""The ``Memory`` protocol, an abstraction of unified memory, and the types in its signatures.

Two modules implement it: ``cuda/memory`` (the CUDA driver) and ``cpu/memory`` (an emulation for machines without a GPU). All
higher layers run unchanged on either.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglang_uvm_offload.flags import flag_name

if TYPE_CHECKING:
    import numpy as np
    import torch


class Location(enum.Enum):
    """Where a page is: in the GPU's VRAM or in host RAM."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class Span:
    """The bytes ``[offset, offset + nbytes)`` of one managed range."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, eq=False)
class ManagedRange:
    """One managed allocation, or a part of one. ``address`` and ``nbytes`` stay constant until ``Memory.free``.

    The ``address`` of an allocation is a multiple of ``layout.BLOCK_BYTES``. ``name`` identifies the tensor in messages.
    """

    address: int
    nbytes: int
    name: str


class ManagedMemoryError(RuntimeError):
    """A call on managed memory failed. The range still has its contents from before the call.

    The message names the call, the tensor, the span in bytes, and the driver's reason.
    """

    def __init__(self, call: str, name: str, span: Span, reason: str, *, ends_process: bool = False):
        """``ends_process``: a kernel has failed, so this process can run no more kernels on its GPU."""
        super().__init__(f"{call} failed on {name} [{span.offset}, {span.end}) ({span.nbytes} bytes): {reason}")
        self.call = call
        self.span = span
        self.reason = reason
        self.ends_process = ends_process

    def with_outlook(self, goes_on: str) -> str:
        """The message followed by its consequence: the process ends, or ``goes_on``."""
        if not self.ends_process:
            return f"{self}. {goes_on}"
        return (
            f"{self}. A kernel of this process has failed, so SGLang will exit. If its log says that MoE TMA is enabled, try "
            f"{flag_name('tma')} off."
        )


@dataclass(frozen=True)
class MemoryInfo:
    """Free and total VRAM in bytes (from ``cudaMemGetInfo``), and the host RAM in bytes that this process may still take (see
    ``host_ram.host_available``), minus what is still to be populated."""

    device_free: int
    device_total: int
    host_available: int


class Memory(Protocol):
    """Unified memory of one GPU, as one process sees it.

        managed = memory.allocate(nbytes, "w13_weight")
        tensor = memory.tensor(managed)
        memory.place(managed, [Span(0, memory.block_bytes)], Location.DEVICE)

    Spans must lie inside their range and begin and end on multiples of ``block_bytes`` (or at the range's end). Methods
    validate all spans before using the first, so a ``ValueError`` means that nothing happened. After a ``ManagedMemoryError``,
    some spans may have moved.
    """

    name: str
    """"uvm" or "emulated"."""
    device_type: str
    """The torch device type of its tensors."""
    block_bytes: int
    """The granularity of advice and moves. It divides ``layout.BLOCK_BYTES``."""

    def allocate(self, nbytes: int, name: str) -> ManagedRange:
        """Reserve ``nbytes`` (> 0) of unpopulated managed memory, which the GPU can read wherever a page is (AccessedBy).
        Raises ``ManagedMemoryError`` if there is no room."""

    def part(self, managed: ManagedRange, span: Span, name: str) -> ManagedRange:
        """The bytes ``span`` of an allocation as a separate range, which takes no memory. The part lives as long as the last
        tensor over it and keeps the allocation alive. Only a part that begins on a block can be placed."""

    def tensor(self, managed: ManagedRange) -> torch.Tensor:
        """The range as a flat uint8 tensor on the compute device that shares its memory, with a storage of ``nbytes``. Freeing
        the last tensor over a range frees the range."""

    def place(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        """Make ``location`` the preferred location of the spans and move them there; never-written blocks are populated there
        with zeros. Blocks until they have arrived, so a thread that launches steps should not call this while serving. Callable
        from any thread, one at a time."""

    def loading(self) -> AbstractContextManager[None]:
        """Inside this block a model loads, and ``populate`` may run in the background. Leaving the block waits for everything
        to be populated, or raises the first ``ManagedMemoryError``. If the block raises, the rest stays unpopulated."""

    def populate(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        """Make host RAM the preferred location of the spans, and populate them there with zeros.

        While a model is ``loading``, this returns early and populates in the background, in the order of the calls. The whole
        range then prefers host RAM, so call ``place`` afterwards for what belongs in VRAM, but not on these spans before they
        are populated. Pages written in the meantime keep their contents, in host RAM. A range freed in the meantime is skipped.
        Raises the failure of an earlier call."""

    def wait_until_populated(self, address: int | None = None) -> None:
        """Wait until everything is populated or, with ``address``, until the range that begins there (if any) is, which is then
        populated next. Raises the first ``ManagedMemoryError``."""

    def in_vram(self, blocks: Sequence[tuple[ManagedRange, int]]) -> np.ndarray | None:
        """``bool[len(blocks)]``: whether each block (a range and the block's offset in it) is in VRAM, determined by reading
        some bytes of it; None if that cannot be determined. Reading brings back an evicted block that prefers the GPU, as in a
        step. Waits for the reads, so a thread that launches steps should not call this. May raise ``ManagedMemoryError``.

        Only reads are reliable. CUDA's queries for the preferred location and the last prefetch are wrong for some blocks if a
        call spans blocks that were earlier advised or prefetched one by one: some keep their old answer (``ops contract`` in
        benchmarks/results/2026-11-27-nvidia-h200 and 2026-11-26-nvidia-h200, driver 580.159.04)."""

    def free(self, managed: ManagedRange) -> None:
        """Free the range. Freeing it twice raises ``ValueError``."""

    def holds(self, managed: ManagedRange) -> bool:
        """Whether this range still exists. Another one may have reused its address."""

    def info(self) -> MemoryInfo:
        """The currently free memory."""
