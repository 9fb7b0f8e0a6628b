"""What a machine with unified memory can do: the ``Memory`` protocol and the nouns in its signatures.

Two machines implement it: ``cuda/memory`` (the CUDA driver) and ``cpu/memory`` (an emulation for machines without a GPU).
Everything above this module runs unchanged over either.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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
    """One managed allocation. ``address`` and ``nbytes`` stay as they are until ``Memory.free``.

    ``address`` is a multiple of ``layout.BLOCK_BYTES``; ``name`` says in messages which tensor lies here.
    """

    address: int
    nbytes: int
    name: str


class ManagedMemoryError(RuntimeError):
    """A call on managed memory failed. The contents of the range are as before the call.

    The message names the call, the tensor, the span in bytes, and the driver's reason.
    """

    def __init__(self, call: str, name: str, span: Span, reason: str):
        super().__init__(f"{call} failed on {name} [{span.offset}, {span.end}) ({span.nbytes} bytes): {reason}")
        self.call = call
        self.span = span
        self.reason = reason


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes free and in all in VRAM (as ``cudaMemGetInfo`` tells them), and bytes of host RAM this process may still
    take (the smaller of MemAvailable and what the memory cgroup leaves)."""

    device_free: int
    device_total: int
    host_available: int


class Memory(Protocol):
    """Unified memory of one GPU as one process sees it.

    Spans must lie inside their range and begin and end on multiples of ``layout.PAGE_BYTES`` (or at the range's
    end). Every method that takes spans validates all of them before it touches the first, so a ``ValueError`` means that
    nothing happened. A ``ManagedMemoryError`` means that the spans before the failing one have moved.
    """

    name: str
    """"uvm" or "emulated": what ``--expert-offload-backend`` calls it."""
    device_type: str
    """The kind of device, as torch names it, that its tensors are on."""

    def allocate(self, nbytes: int, name: str) -> ManagedRange:
        """Reserve ``nbytes`` (> 0) of managed memory, unpopulated, readable by the GPU wherever a page lives
        (AccessedBy). Raises ``ManagedMemoryError`` where the machine has no room."""

    def tensor(self, managed: ManagedRange) -> torch.Tensor:
        """The range as a flat uint8 tensor on the device that computes, sharing the memory. The range is freed when
        the last tensor over it is gone."""

    def place(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        """Make ``location`` the preferred location of the spans and bring them there, populating there (zeroed) what was
        never written. Returns before the bytes have moved where the machine can; ``synchronize`` waits for them."""

    def preferred(self, managed: ManagedRange, span: Span) -> Location | None:
        """The preferred location that all of the span shares, or None where it is mixed or unset."""

    def last_prefetch(self, managed: ManagedRange, span: Span) -> Location | None:
        """The location that all of the span was last asked to be brought to, or None. CUDA has no query for where pages
        really are (``cudaMemRangeGetAttribute`` returns advice and the last requested prefetch)."""

    def synchronize(self) -> None:
        """Wait until every move that this process asked for has finished. Raises ``ManagedMemoryError`` for one that failed
        late."""

    def free(self, managed: ManagedRange) -> None:
        """Give the range back. Freeing a range twice is a ``ValueError``."""

    def holds(self, managed: ManagedRange) -> bool:
        """Whether the range still is: another one may lie where it was."""

    def info(self) -> MemoryInfo:
        """What is free now."""
