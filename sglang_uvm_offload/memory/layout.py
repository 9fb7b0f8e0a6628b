"""The layout of one tensor's experts in pages: the only module that does 2 MiB arithmetic.

A tensor ``[E, ...]`` lies in one managed range that starts on a 2 MiB boundary, expert after expert without padding, so kernels
without a stride argument keep working. Residency has a resolution of one 64 KiB page, the smallest page that the GPU maps with
a large entry. Two neighbouring experts may share a page, which is in VRAM if either of them is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.memory.protocol import ManagedRange, Span

PAGE_BYTES = 64 << 10
"""The resolution of residency: GPU page tables have entries for 4 KiB, 64 KiB and 2 MiB."""

BLOCK_BYTES = 2 << 20
"""The unit that the driver allocates, maps with one entry, and evicts (``uvm_va_block``)."""


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def whole_blocks(nbytes: int) -> int:
    """The bytes that a range takes: whole blocks, so no two tensors share one."""
    return round_up(nbytes, BLOCK_BYTES)


@dataclass(frozen=True)
class ExpertLayout:
    """``num_experts`` experts of ``expert_bytes`` bytes each, in order, from offset 0 of a managed range."""

    num_experts: int
    expert_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_experts * self.expert_bytes

    @property
    def num_pages(self) -> int:
        return round_up(self.nbytes, PAGE_BYTES) // PAGE_BYTES

    @property
    def placeable(self) -> bool:
        """Whether an expert fills at least a page, so that experts can be placed one at a time."""
        return self.expert_bytes >= PAGE_BYTES

    def resident_pages(self, resident: np.ndarray) -> np.ndarray:
        """``bool[num_pages]``: the pages that hold a byte of an expert in ``resident`` (``bool[num_experts]``)."""
        if resident.shape != (self.num_experts,):
            raise ValueError(f"resident has shape {resident.shape}, not ({self.num_experts},)")
        return self._experts_on(PAGE_BYTES, np.flatnonzero(resident)) > 0

    def stranded_bytes(self, num_resident: int) -> int:
        """VRAM that pages of offloaded experts keep after many changes of residents; the expected value for random residents.
        A page that moves to the host keeps its VRAM until the driver takes back the whole block, which requires that none of
        the block's pages is resident (``uvm_pmm_gpu.c`` of NVIDIA's open kernel modules, 580.95.05)."""
        everyone = np.arange(self.num_experts)
        on_page, on_block = (self._experts_on(unit, everyone) for unit in (PAGE_BYTES, BLOCK_BYTES))
        beside = np.repeat(on_block, BLOCK_BYTES // PAGE_BYTES)[: self.num_pages] - on_page
        offloaded = 1 - num_resident / self.num_experts
        return round(PAGE_BYTES * float((offloaded**on_page * (1 - offloaded**beside)).sum()))

    def _experts_on(self, unit: int, ids: np.ndarray) -> np.ndarray:
        """How many of the experts ``ids`` have a byte in each run of ``unit`` bytes."""
        edges = np.zeros(round_up(self.nbytes, unit) // unit + 1, dtype=np.int64)
        np.add.at(edges, ids * self.expert_bytes // unit, 1)
        np.subtract.at(edges, -(-(ids + 1) * self.expert_bytes // unit), 1)
        return np.cumsum(edges[:-1])

    def spans(self, pages: np.ndarray) -> list[Span]:
        """The marked pages as spans, in order, with neighbours merged."""
        edges = np.flatnonzero(np.diff(pages.astype(np.int8), prepend=0, append=0))
        return [
            Span(int(a) * PAGE_BYTES, min(int(b) * PAGE_BYTES, self.nbytes) - int(a) * PAGE_BYTES)
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]


def check_spans(managed: ManagedRange, spans: Sequence[Span]) -> None:
    """Raise ``ValueError`` unless every span is a non-empty run of whole pages inside ``managed`` (the end of the range may cut
    its last page short)."""
    for span in spans:
        if span.nbytes <= 0 or span.offset < 0 or span.end > managed.nbytes:
            raise ValueError(f"{span} is not inside {managed.name}, which has {managed.nbytes} bytes")
        if span.offset % PAGE_BYTES or (span.end % PAGE_BYTES and span.end != managed.nbytes):
            raise ValueError(f"{span} of {managed.name} does not begin and end on pages of {PAGE_BYTES} bytes")
