"""The ``Memory`` protocol, which abstracts a machine with unified memory, and the types in its signatures.

Two modules implement it: ``cuda/memory`` (the CUDA driver) and ``cpu/memory`` (an emulation for machines without a GPU). All
code above runs unchanged over either.
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
    """Where a page lives: in the GPU's VRAM or in host RAM."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class Span:
    """``nbytes`` bytes from ``offset`` on, inside one managed range."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, eq=False)
class ManagedRange:
    """One managed allocation, or a part of one. ``address`` and ``nbytes`` stay constant until ``Memory.free``.

    The ``address`` of an allocation is a multiple of ``layout.BLOCK_BYTES``; ``name`` names the tensor in messages.
    """

    address: int
    nbytes: int
    name: str


class ManagedMemoryError(RuntimeError):
    """A call on managed memory failed. The contents of the range are as before the call.

    The message names the call, the tensor, the span in bytes, and the driver's reason.
    """

    def __init__(self, call: str, name: str, span: Span, reason: str, *, ends_process: bool = False):
        """``ends_process``: a kernel has failed, so that this process can run no other on its GPU."""
        super().__init__(f"{call} failed on {name} [{span.offset}, {span.end}) ({span.nbytes} bytes): {reason}")
        self.call = call
        self.span = span
        self.reason = reason
        self.ends_process = ends_process

    def with_outlook(self, goes_on: str) -> str:
        """The message, and what follows: the process ends, or ``goes_on``."""
        if not self.ends_process:
            return f"{self}. {goes_on}"
        return (
            f"{self}. A kernel of this process has failed, so SGLang will end. If its log says that MoE TMA is enabled, "
            f"{flag_name('tma')} off serves without it."
        )


@dataclass(frozen=True)
class MemoryInfo:
    """Free and total bytes of VRAM (from ``cudaMemGetInfo``), and bytes of host RAM that this process may still take (the
    smaller of MemAvailable and the memory cgroup's room, less what is still to be populated)."""

    device_free: int
    device_total: int
    host_available: int


class Memory(Protocol):
    """Unified memory of one GPU as one process sees it.

    Spans must lie inside their range and begin and end on multiples of ``block_bytes`` (or at the range's end). Every method
    with spans validates all of them before it uses the first, so after a ``ValueError`` nothing has happened. After a
    ``ManagedMemoryError`` some spans may have moved.
    """

    name: str
    """"uvm" or "emulated"."""
    device_type: str
    """The torch device type of its tensors."""
    block_bytes: int
    """The unit in which memory is advised and moved. It divides ``layout.BLOCK_BYTES``."""

    def allocate(self, nbytes: int, name: str) -> ManagedRange:
        """Reserve ``nbytes`` (> 0) of managed memory, unpopulated, readable by the GPU wherever a page lives (AccessedBy).
        Raises ``ManagedMemoryError`` if there is no room."""

    def part(self, managed: ManagedRange, span: Span, name: str) -> ManagedRange:
        """The bytes ``span`` of an allocation as a range of its own, which takes no memory. It is gone with the last tensor
        over it, and keeps the allocation until then. Only a part that begins on a block can be placed."""

    def tensor(self, managed: ManagedRange) -> torch.Tensor:
        """The range as a flat uint8 tensor on the compute device, sharing the memory, with a storage of as many bytes. The
        range is freed with the last tensor over it."""

    def place(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        """Make ``location`` the preferred location of the spans and move them there; blocks that were never written are
        populated there, zeroed. Returns when they have arrived, so a thread that launches steps should not call it while it
        serves. Any one thread at a time may."""

    def loading(self) -> AbstractContextManager[None]:
        """A model loads in this block: ``populate`` need not wait. At the end of the block, all that it was called for is
        populated, or the first ``ManagedMemoryError`` is raised. If the block raises, what is not populated stays so."""

    def populate(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        """Make host RAM the preferred location of the spans, at once, and populate them there, zeroed. While a model is
        ``loading``, all of the range prefers host RAM from here on, so ``place`` afterwards what is to be in VRAM; and
        populating may go on after the return, in the order of the calls: whoever writes meanwhile keeps what was written, in
        host RAM. Until it is over, ``place`` none of the spans. A range that is freed meanwhile is left alone. Raises what a
        call before it failed with."""

    def wait_until_populated(self, address: int | None = None) -> None:
        """Wait for all that ``populate`` was called for; with an ``address``, for the range that begins there (if one does),
        which then comes next. Raises the first ``ManagedMemoryError``."""

    def in_vram(self, blocks: Sequence[tuple[ManagedRange, int]]) -> np.ndarray | None:
        """``bool[len(blocks)]``: whether the GPU finds each block (a range, and the offset of the block in it) in VRAM when it
        reads some bytes of it now; None where it cannot tell. A block that was evicted and prefers the GPU comes back by being
        read, as in a step. Waits for the reads, so a thread that launches steps should not call it. May raise
        ``ManagedMemoryError``.

        Only reads tell. CUDA's queries for the preferred location and for the last prefetch err where a call spans blocks that
        were advised or prefetched one by one before: some keep their old answer (``ops contract`` in
        benchmarks/results/2026-11-27-nvidia-h200 and 2026-11-26-nvidia-h200, driver 580.159.04)."""

    def free(self, managed: ManagedRange) -> None:
        """Free the range. Freeing it twice raises ``ValueError``."""

    def holds(self, managed: ManagedRange) -> bool:
        """Whether the range still exists: another one may have its address."""

    def info(self) -> MemoryInfo:
        """The memory that is free now."""
