"""The layout of one tensor's experts in blocks. All block arithmetic is in this module.

A tensor ``[E, ...]`` begins on a 2 MiB boundary and stores its experts without padding, so kernels without a stride argument
keep working. Two experts that share a block are resident there together or not at all. No block holds experts of two layers.

Residency is per block because the driver's is. Advice that does not end on block boundaries splits blocks, and a split block is
neither reclaimed after its pages moved to the host nor kept in LRU order (``uvm_va_range.c:1243``, ``uvm_va_block.c:3515``,
``uvm_pmm_gpu.c:2089`` of NVIDIA's open kernel modules, 580.95.05).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sglang_uvm_offload.memory.protocol import ManagedRange, Span

PAGE_BYTES = 64 << 10
"""The smallest page with a large GPU page table entry. Smaller experts stay in plain VRAM."""

BLOCK_BYTES = 2 << 20
"""The unit that the driver allocates, maps with one entry, and evicts (``uvm_va_block``)."""

MOVE_BYTES = 16 << 20
"""The most bytes moved at a time. The driver moves a span of several blocks in two passes: the first unmaps and copies every
block, the second maps them again (``uvm_migrate.c``, ``uvm_migrate``). A kernel that reads a block in between faults and waits.
A span within one block takes a single pass."""


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def whole_blocks(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks, because no two tensors share one."""
    return round_up(nbytes, BLOCK_BYTES)


@dataclass(frozen=True)
class ExpertLayout:
    """``num_experts`` experts of ``expert_bytes`` bytes each, in order, from offset 0 of a managed range.

        ExpertLayout(num_experts=128, expert_bytes=3 << 20).spans(extents)

    Neighbouring blocks that hold parts of the same experts form an *extent*. They are equally valuable, so they move together.
    A *part* is the bytes of one expert in one extent. Arrays are ``[extents]`` or ``[parts]``, ordered by offset.
    """

    num_experts: int
    expert_bytes: int
    block_bytes: int = BLOCK_BYTES
    group: int = 1
    """The number of experts that fill whole blocks and form one extent. With 1, extents are as small as blocks allow."""

    @classmethod
    def grouped(cls, num_experts: int, expert_bytes: int, block_bytes: int, group: int) -> ExpertLayout:
        """A layout in groups of ``group`` experts, if those fill whole blocks; else without groups."""
        return cls(num_experts, expert_bytes, block_bytes, 1 if group * expert_bytes % block_bytes else group)

    @property
    def nbytes(self) -> int:
        """The bytes of all experts."""
        return self.num_experts * self.expert_bytes

    @property
    def placeable(self) -> bool:
        """Whether an expert is large enough to be placed."""
        return self.expert_bytes >= PAGE_BYTES

    @property
    def num_extents(self) -> int:
        return len(self.extent_bytes)

    @cached_property
    def extent_bytes(self) -> np.ndarray:
        """int64: the VRAM bytes of each extent, in whole blocks."""
        return np.diff(self._edges)

    @cached_property
    def part_expert(self) -> np.ndarray:
        return self._cuts[:-1] // self.expert_bytes

    @cached_property
    def part_extent(self) -> np.ndarray:
        return np.searchsorted(self._edges, self._cuts[:-1], side="right") - 1

    @cached_property
    def part_bytes(self) -> np.ndarray:
        return np.diff(self._cuts)

    def holding(self, experts: np.ndarray) -> np.ndarray:
        """``bool[extents]``: the extents with any byte of ``experts`` (``bool[num_experts]``)."""
        if experts.shape != (self.num_experts,):
            raise ValueError(f"experts has shape {experts.shape}, not ({self.num_experts},)")
        held = np.zeros(self.num_extents, dtype=bool)
        held[self.part_extent[experts[self.part_expert]]] = True
        return held

    def bytes_in(self, extents: np.ndarray) -> np.ndarray:
        """``int64[num_experts]``: the bytes of each expert in ``extents`` (``bool[extents]``)."""
        inside = extents[self.part_extent]
        found = np.bincount(self.part_expert[inside], self.part_bytes[inside], minlength=self.num_experts)
        return found.astype(np.int64)

    def taken_by(self, extents: np.ndarray) -> int:
        """The VRAM bytes of ``extents`` (``bool[extents]``)."""
        return int(self.extent_bytes[extents].sum())

    def budget(self, num_experts: int) -> int:
        """The VRAM budget in bytes for ``num_experts`` residents, whichever they are: what the first ones take."""
        return round_up(num_experts * self.expert_bytes, self.block_bytes)

    def spans(self, extents: np.ndarray) -> list[Span]:
        """The marked extents (``bool[extents]``) as spans, in order, with neighbours merged."""
        edges = np.flatnonzero(np.diff(extents.astype(np.int8), prepend=0, append=0))
        ends = np.minimum(self._edges, self.nbytes)
        return [Span(int(self._edges[a]), int(ends[b] - self._edges[a])) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def blocks(self, extents: np.ndarray) -> np.ndarray:
        """int64: the block offsets of the marked extents (``bool[extents]``)."""
        return np.arange(0, self.nbytes, self.block_bytes)[self.block_mask(extents)]

    def block_mask(self, extents: np.ndarray) -> np.ndarray:
        """``bool[blocks]``: the blocks of the marked extents (``bool[extents]``)."""
        return np.repeat(extents, self.extent_bytes // self.block_bytes)

    def whole(self, blocks: np.ndarray) -> np.ndarray:
        """``bool[extents]``: the extents whose blocks are all in ``blocks`` (``bool[blocks]``)."""
        return np.logical_and.reduceat(blocks, self._edges[:-1] // self.block_bytes)

    @cached_property
    def _edges(self) -> np.ndarray:
        """The begin of each extent, then the end of the last block."""
        begins, unit = np.arange(0, self.nbytes, self.block_bytes), self.group * self.expert_bytes
        assert self.group == 1 or unit % self.block_bytes == 0, self
        first = begins // unit
        last = (np.minimum(begins + self.block_bytes, self.nbytes) - 1) // unit
        differs = (np.diff(first, prepend=-1) != 0) | (np.diff(last, prepend=-1) != 0)
        return np.append(begins[differs], round_up(self.nbytes, self.block_bytes))

    @cached_property
    def _cuts(self) -> np.ndarray:
        """The begin of each part, then the end of the last expert."""
        experts = np.arange(self.num_experts + 1) * self.expert_bytes
        return np.union1d(self._edges[:-1], experts)


MOST_ROWS = 8192
"""The most rows of a layer with fewer experts. Rows take address space, of which CUDA's managed ranges have 128 TiB."""
SMALL_ALIGNMENT = 16
"""The alignment of experts below ``PAGE_BYTES``. Triton recompiles kernels for addresses that are not multiples of it."""


def whole_rows(sizes: Iterable[tuple[int, int]]) -> int:
    """The fewest rows that fill whole units in every kind of tensor, given as (row bytes, unit bytes)."""
    return math.lcm(*(unit // math.gcd(nbytes, unit) for nbytes, unit in sizes))


def rows_a_layer(num_experts: int, expert_bytes: Iterable[int], block_bytes: int) -> int | None:
    """The fewest rows per layer with which no block holds experts of two layers, in ranges that span all layers. There is one
    range per entry of ``expert_bytes``, the row size of a kind of tensor. None if that takes too many rows."""
    units = [(nbytes, block_bytes if nbytes >= PAGE_BYTES else SMALL_ALIGNMENT) for nbytes in expert_bytes]
    rows = round_up(num_experts, whole_rows(units))
    return rows if rows <= max(num_experts, MOST_ROWS) else None


MOST_GROUPED, GROUPED_BLOCKS = 8, 2
"""The most experts of a group, and the most blocks of each in a tensor. Larger experts are less often partly resident, and
whether groups help them depends on what else is in VRAM (benchmarks/results/blocks/blocks.md)."""


def experts_of_a_group(routed: int, expert_bytes: Sequence[int], block_bytes: int) -> int:
    """The number of a layer's ``routed`` experts that fill whole blocks in all of its tensors; 1 if groups do not pay off."""
    group = whole_rows((nbytes, block_bytes) for nbytes in expert_bytes)
    pays = group <= MOST_GROUPED and max(expert_bytes, default=0) <= GROUPED_BLOCKS * block_bytes
    return group if pays and routed % group == 0 else 1


def enclosing(span: Span, block_bytes: int, range_bytes: int) -> Span:
    """The blocks of a range that contain ``span``."""
    begin = span.offset // block_bytes * block_bytes
    return Span(begin, min(round_up(span.end, block_bytes), range_bytes) - begin)


def batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Split ``spans``, in order and between blocks, into batches of at most ``MOVE_BYTES`` in whole blocks."""
    batch: list[Span] = []
    room = MOVE_BYTES // BLOCK_BYTES
    for span in spans:
        offset = span.offset
        while offset < span.end:
            block = offset // BLOCK_BYTES
            end = min(span.end, (block + room) * BLOCK_BYTES)
            batch.append(Span(offset, end - offset))
            room -= whole_blocks(end) // BLOCK_BYTES - block
            offset = end
            if not room:
                yield batch
                batch, room = [], MOVE_BYTES // BLOCK_BYTES
    if batch:
        yield batch


def check_inside(managed: ManagedRange, span: Span) -> None:
    """Raise ``ValueError`` unless the span is a non-empty run of bytes inside ``managed``."""
    if span.nbytes <= 0 or span.offset < 0 or span.end > managed.nbytes:
        raise ValueError(f"{span} is empty or outside {managed.name}, which has {managed.nbytes} bytes")


def check_block(managed: ManagedRange, offset: int, block_bytes: int) -> None:
    """Raise ``ValueError`` unless a block of ``managed`` begins at ``offset``."""
    if not 0 <= offset < managed.nbytes or offset % block_bytes:
        raise ValueError(f"no block of {block_bytes} bytes begins at {offset} in {managed.name} ({managed.nbytes} bytes)")


def check_spans(managed: ManagedRange, spans: Sequence[Span], block_bytes: int) -> None:
    """Raise ``ValueError`` unless every span is a non-empty run of whole blocks inside ``managed``, whose last block may be cut
    short by the end of the range."""
    for span in spans:
        check_inside(managed, span)
        if span.offset % block_bytes or (span.end % block_bytes and span.end != managed.nbytes):
            raise ValueError(f"{span} of {managed.name} is not aligned to blocks of {block_bytes} bytes")
