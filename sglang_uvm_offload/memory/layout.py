"""The layout of one tensor's experts in blocks: the only module that does block arithmetic.

A tensor ``[E, ...]`` begins on a 2 MiB boundary, expert after expert without padding, so kernels without a stride argument keep
working. A block that two experts share serves both, or neither. No block holds experts of two layers.

Residency is by the block because the driver's is: advice whose edges are not on blocks splits them, and a split block is
neither reclaimed when its pages have moved to the host nor kept in order of use (``uvm_va_range.c:1243``,
``uvm_va_block.c:3515``, ``uvm_pmm_gpu.c:2089`` of NVIDIA's open kernel modules, 580.95.05).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sglang_uvm_offload.memory.protocol import ManagedRange, Span

PAGE_BYTES = 64 << 10
"""The smallest page that the GPU maps with a large entry. Experts below it stay in plain VRAM."""

BLOCK_BYTES = 2 << 20
"""The unit that the driver allocates, maps with one entry, and evicts (``uvm_va_block``)."""

MOVE_BYTES = 16 << 20
"""The most that is on its way at a time. The driver moves a span of several blocks in two passes: the first unmaps and copies
every block, the second maps them again (``uvm_migrate.c``, ``uvm_migrate``). A kernel that reads a block between the two
waits for a fault. A span in one block takes one pass."""


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def whole_blocks(nbytes: int) -> int:
    """The bytes that a range takes: whole blocks, so no two tensors share one."""
    return round_up(nbytes, BLOCK_BYTES)


@dataclass(frozen=True)
class ExpertLayout:
    """``num_experts`` experts of ``expert_bytes`` bytes each, in order, from offset 0 of a managed range.

    Neighbouring blocks that hold parts of the same experts form an *extent*: they are worth the same, so they move together.
    Arrays are ``[extents]``, or ``[parts]``: a part is the bytes of one expert in one extent, in order of their offsets.
    """

    num_experts: int
    expert_bytes: int
    block_bytes: int = BLOCK_BYTES
    group: int = 1
    """So many experts are whole blocks, and one extent; 1: extents are as small as blocks allow."""

    @classmethod
    def grouped(cls, num_experts: int, expert_bytes: int, block_bytes: int, group: int) -> ExpertLayout:
        """With groups, if their experts are whole blocks."""
        return cls(num_experts, expert_bytes, block_bytes, 1 if group * expert_bytes % block_bytes else group)

    @property
    def nbytes(self) -> int:
        """Of the experts."""
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
        """int64: what each extent takes in VRAM, in whole blocks."""
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
        """``bool[extents]``: those that hold a byte of an expert in ``experts`` (``bool[num_experts]``)."""
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
        """Bytes of VRAM that ``extents`` (``bool[extents]``) take."""
        return int(self.extent_bytes[extents].sum())

    def budget(self, num_experts: int) -> int:
        """Bytes of VRAM that any choice of ``num_experts`` residents may take: what the first ones take."""
        return round_up(num_experts * self.expert_bytes, self.block_bytes)

    def spans(self, extents: np.ndarray) -> list[Span]:
        """The marked extents (``bool[extents]``) as spans, in order, with neighbours merged."""
        edges = np.flatnonzero(np.diff(extents.astype(np.int8), prepend=0, append=0))
        ends = np.minimum(self._edges, self.nbytes)
        return [Span(int(self._edges[a]), int(ends[b] - self._edges[a])) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def blocks(self, extents: np.ndarray) -> np.ndarray:
        """int64: the offsets of the blocks of the marked extents (``bool[extents]``)."""
        return np.arange(0, self.nbytes, self.block_bytes)[self.block_mask(extents)]

    def block_mask(self, extents: np.ndarray) -> np.ndarray:
        """``bool[blocks]``: those of the marked extents (``bool[extents]``)."""
        return np.repeat(extents, self.extent_bytes // self.block_bytes)

    def whole(self, blocks: np.ndarray) -> np.ndarray:
        """``bool[extents]``: those of which all blocks are in ``blocks`` (``bool[blocks]``)."""
        return np.logical_and.reduceat(blocks, self._edges[:-1] // self.block_bytes)

    @cached_property
    def _edges(self) -> np.ndarray:
        """The offset at which each extent begins, and the end of the last block."""
        begins, unit = np.arange(0, self.nbytes, self.block_bytes), self.group * self.expert_bytes
        assert self.group == 1 or unit % self.block_bytes == 0, self
        first = begins // unit
        last = (np.minimum(begins + self.block_bytes, self.nbytes) - 1) // unit
        differs = (np.diff(first, prepend=-1) != 0) | (np.diff(last, prepend=-1) != 0)
        return np.append(begins[differs], round_up(self.nbytes, self.block_bytes))

    @cached_property
    def _cuts(self) -> np.ndarray:
        """The offset at which each part begins, and the end of the last expert."""
        experts = np.arange(self.num_experts + 1) * self.expert_bytes
        return np.union1d(self._edges[:-1], experts)


MOST_ROWS = 8192
"""Rows of one layer at most, where it has fewer experts: address space, of which CUDA's managed ranges have 128 TiB."""
SMALL_ALIGNMENT = 16
"""Where experts below ``PAGE_BYTES`` may begin. Triton compiles kernels anew for addresses that are no multiples of it."""


def whole_rows(sizes: Iterable[tuple[int, int]]) -> int:
    """The fewest rows that take whole units in every kind of tensor, each a (bytes of a row, bytes of a unit)."""
    return math.lcm(*(unit // math.gcd(nbytes, unit) for nbytes, unit in sizes))


def rows_a_layer(num_experts: int, expert_bytes: Iterable[int], block_bytes: int) -> int | None:
    """The fewest rows from one layer's first expert to the next layer's with which no block holds experts of two layers, in
    ranges of all layers that have rows of these sizes, a kind of tensor each. None if that takes too many."""
    units = [(nbytes, block_bytes if nbytes >= PAGE_BYTES else SMALL_ALIGNMENT) for nbytes in expert_bytes]
    rows = round_up(num_experts, whole_rows(units))
    return rows if rows <= max(num_experts, MOST_ROWS) else None


MOST_GROUPED, GROUPED_BLOCKS = 8, 2
"""Experts of a group at most, and blocks of each in a tensor at most. Of larger experts less is in VRAM in part, and their
groups lose or gain by what else is in VRAM (benchmarks/results/blocks/blocks.md)."""


def experts_of_a_group(routed: int, expert_bytes: Sequence[int], block_bytes: int) -> int:
    """How many of a layer's ``routed`` experts are whole blocks in all of its tensors, where residents pay by as many; else
    1."""
    group = whole_rows((nbytes, block_bytes) for nbytes in expert_bytes)
    pays = group <= MOST_GROUPED and max(expert_bytes, default=0) <= GROUPED_BLOCKS * block_bytes
    return group if pays and routed % group == 0 else 1


def enclosing(span: Span, block_bytes: int, range_bytes: int) -> Span:
    """The blocks of a range that hold a byte of ``span``."""
    begin = span.offset // block_bytes * block_bytes
    return Span(begin, min(round_up(span.end, block_bytes), range_bytes) - begin)


def batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The bytes of ``spans``, in order, in batches of at most ``MOVE_BYTES`` of whole blocks. Spans are cut between blocks."""
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
        raise ValueError(f"{span} is not inside {managed.name}, which has {managed.nbytes} bytes")


def check_block(managed: ManagedRange, offset: int, block_bytes: int) -> None:
    """Raise ``ValueError`` unless a block of ``managed`` begins at ``offset``."""
    if not 0 <= offset < managed.nbytes or offset % block_bytes:
        raise ValueError(f"{managed.name} has {managed.nbytes} bytes, and no block of {block_bytes} begins at {offset}")


def check_spans(managed: ManagedRange, spans: Sequence[Span], block_bytes: int) -> None:
    """Raise ``ValueError`` unless every span is a non-empty run of whole blocks inside ``managed`` (the end of the range may
    cut its last block short)."""
    for span in spans:
        check_inside(managed, span)
        if span.offset % block_bytes or (span.end % block_bytes and span.end != managed.nbytes):
            raise ValueError(f"{span} of {managed.name} does not begin and end on blocks of {block_bytes} bytes")
