"""Experts in blocks: which extents a set of experts needs, what each serves and takes, and how neighbours become one span."""

from itertools import pairwise

import numpy as np
import pytest

from sglang_uvm_offload.memory.layout import (
    BLOCK_BYTES,
    MOST_ROWS,
    MOVE_BYTES,
    PAGE_BYTES,
    SMALL_ALIGNMENT,
    ExpertLayout,
    batches,
    check_spans,
    enclosing,
    experts_of_a_group,
    rows_a_layer,
)
from sglang_uvm_offload.memory.protocol import ManagedRange, Span

MIB = 1 << 20


def mask(size, *ids):
    out = np.zeros(size, dtype=bool)
    out[list(ids)] = True
    return out


def spans(layout, *ids):
    return layout.spans(layout.holding(mask(layout.num_experts, *ids)))


def random_layouts():
    """Experts smaller and larger than a block, aligned and not, with a last block that is whole or not."""
    rng = np.random.default_rng(0)
    fixed = [(8, 4 * PAGE_BYTES), (8, 2 * PAGE_BYTES), (1, PAGE_BYTES), (40, PAGE_BYTES // 8)]
    drawn = [(int(rng.integers(1, 40)), int(rng.integers(PAGE_BYTES // 4, 9 * PAGE_BYTES))) for _ in range(40)]
    return [ExpertLayout(experts, nbytes, 2 * PAGE_BYTES) for experts, nbytes in fixed + drawn]


def test_blocks_that_hold_parts_of_the_same_experts_are_one_extent():
    assert ExpertLayout(4, 3 * BLOCK_BYTES).extent_bytes.tolist() == [3 * BLOCK_BYTES] * 4
    # 7 MiB: three blocks of the first, one that it shares with the second, two of that, the one shared with the third ...
    assert (ExpertLayout(4, 7 * MIB).extent_bytes // BLOCK_BYTES).tolist() == [3, 1, 3, 3, 1, 3]
    assert (ExpertLayout(4, 5 * MIB // 4).extent_bytes // BLOCK_BYTES).tolist() == [1, 1, 1]


def test_a_block_that_experts_share_is_needed_by_each_of_them():
    layout = ExpertLayout(4, 3 * MIB)
    assert spans(layout, 0) == [Span(0, 4 * MIB)]
    assert spans(layout, 1) == [Span(2 * MIB, 4 * MIB)]
    assert spans(layout, 3) == [Span(8 * MIB, 4 * MIB)]


def test_groups_of_experts_are_extents_of_whole_blocks():
    layout = ExpertLayout(10, 3 * MIB // 2, group=4)
    assert (layout.extent_bytes // BLOCK_BYTES).tolist() == [3, 3, 2]
    assert layout.part_expert.tolist() == list(range(10))
    assert layout.part_extent.tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert spans(layout, 5) == [Span(6 * MIB, 6 * MIB)]


@pytest.mark.parametrize(
    ("routed", "sizes", "group"),
    [
        *((128, [3 * MIB, 3 * MIB // 2], 4), (128, [7 * MIB // 2, 7 * MIB // 4], 8), (8, [MIB // 2, MIB // 4], 8)),
        *((128, [2 * MIB, 4 * MIB], 1), (126, [3 * MIB, 3 * MIB // 2], 1), (128, [5 * MIB, 5 * MIB // 2], 1)),
        *((128, [3 * MIB, MIB // 8], 1), (128, [], 1)),
    ],
    ids=str,
)
def test_a_group_is_the_fewest_experts_that_are_whole_blocks_in_all_tensors(routed, sizes, group):
    assert experts_of_a_group(routed, sizes, BLOCK_BYTES) == group


@pytest.mark.parametrize("layout", random_layouts(), ids=str)
def test_an_extent_is_whole_where_none_of_its_blocks_is_missing(layout):
    random = np.random.default_rng(2)
    extents = random.random(layout.num_extents) < 0.5
    blocks = layout.block_mask(extents)
    assert (layout.whole(blocks) == extents).all()
    blocks &= random.random(len(blocks)) < 0.8
    expected = [not (layout.block_mask(one) & ~blocks).any() for one in np.eye(layout.num_extents, dtype=bool)]
    assert layout.whole(blocks).tolist() == expected


@pytest.mark.parametrize("layout", random_layouts(), ids=str)
def test_every_byte_is_in_one_part_of_its_expert_and_its_extent(layout):
    ends = np.cumsum(layout.part_bytes)
    begins = ends - layout.part_bytes
    assert (layout.part_bytes > 0).all()
    assert (begins[0], ends[-1]) == (0, layout.nbytes)
    assert (begins // layout.expert_bytes == layout.part_expert).all()
    assert ((ends - 1) // layout.expert_bytes == layout.part_expert).all()
    edges = np.concatenate([[0], np.cumsum(layout.extent_bytes)])
    assert (begins >= edges[layout.part_extent]).all()
    assert (ends <= edges[layout.part_extent + 1]).all()
    assert (layout.extent_bytes % layout.block_bytes == 0).all()
    assert 0 <= edges[-1] - layout.nbytes < layout.block_bytes


@pytest.mark.parametrize("layout", random_layouts(), ids=str)
def test_extents_differ_from_their_neighbours_in_the_experts_they_hold(layout):
    held = [frozenset(layout.part_expert[layout.part_extent == extent].tolist()) for extent in range(layout.num_extents)]
    assert all(one != other for one, other in pairwise(held))


@pytest.mark.parametrize("layout", random_layouts(), ids=str)
def test_bytes_by_expert_and_spans_are_those_of_the_marked_extents(layout):
    rng = np.random.default_rng(layout.nbytes)
    extents = rng.random(layout.num_extents) < 0.5
    found = layout.spans(extents)
    byte = np.zeros(layout.num_experts, dtype=np.int64)
    for span in found:
        for expert in range(layout.num_experts):
            begin, end = expert * layout.expert_bytes, (expert + 1) * layout.expert_bytes
            byte[expert] += max(0, min(end, span.end) - max(begin, span.offset))
    assert layout.bytes_in(extents).tolist() == byte.tolist()
    assert all(a.end < b.offset for a, b in pairwise(found)), "neighbours were not joined"
    check_spans(ManagedRange(0, layout.nbytes, "w13"), found, layout.block_bytes)
    assert 0 <= layout.taken_by(extents) - sum(span.nbytes for span in found) < layout.block_bytes


def test_an_expert_below_a_page_is_not_placeable():
    assert not ExpertLayout(256, PAGE_BYTES - 1).placeable
    assert ExpertLayout(256, PAGE_BYTES).placeable


@pytest.mark.parametrize("span", [Span(0, 0), Span(-8, 8), Span(0, 32), Span(1, 8), Span(0, 9), Span(16, 4)], ids=str)
def test_spans_outside_the_range_or_off_the_blocks_are_refused(span):
    managed = ManagedRange(0, 23, "w13")
    check_spans(managed, [Span(16, 7)], 8)
    with pytest.raises(ValueError, match="w13"):
        check_spans(managed, [Span(0, 8), span], 8)


def test_a_set_of_experts_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"\(3,\)"):
        ExpertLayout(4, PAGE_BYTES).holding(mask(3, 0))


def whole(layout, nbytes):
    return -(-nbytes // layout.block_bytes) * layout.block_bytes


@pytest.mark.parametrize("layout", random_layouts(), ids=str)
def test_any_extents_are_whole_blocks(layout):
    extents = np.random.default_rng(layout.nbytes).random(layout.num_extents) < 0.5
    found = layout.spans(extents)
    check_spans(ManagedRange(0, layout.nbytes, "w13"), found, layout.block_bytes)
    assert sum(whole(layout, span.nbytes) for span in found) == layout.taken_by(extents)
    assert layout.blocks(extents).tolist() == [at for span in found for at in range(span.offset, span.end, layout.block_bytes)]


@pytest.mark.parametrize("layout", random_layouts(), ids=str)
def test_the_budget_of_n_experts_is_what_the_first_n_take(layout):
    for n in range(layout.num_experts + 1):
        first = layout.holding(np.arange(layout.num_experts) < n)
        assert layout.budget(n) == layout.taken_by(first)


SIZES = [
    (128, [2 * BLOCK_BYTES], 128),
    (128, [3 * MIB, 3 * MIB // 2], 128),  # every fourth row begins on a block in both
    (6, [3 * MIB, 3 * MIB // 2], 8),
    (5, [BLOCK_BYTES, 12], 8),
    (5, [BLOCK_BYTES, 4096], 5),
    (7, [4], 8),
    (1, [BLOCK_BYTES + 512], 4096),
    (160, [BLOCK_BYTES + 256], MOST_ROWS),
    (160, [BLOCK_BYTES + 128], None),
    (MOST_ROWS + 1, [BLOCK_BYTES], MOST_ROWS + 1),
]


@pytest.mark.parametrize(("experts", "sizes", "rows"), SIZES, ids=str)
def test_layers_are_the_fewest_rows_apart_that_begin_on_a_block(experts, sizes, rows):
    assert rows_a_layer(experts, sizes, BLOCK_BYTES) == rows
    if rows is None:
        return

    def fits(number):
        begins = [number * nbytes % (BLOCK_BYTES if nbytes >= PAGE_BYTES else SMALL_ALIGNMENT) for nbytes in sizes]
        return number >= experts and not any(begins)

    assert fits(rows)
    assert not any(fits(number) for number in range(rows))


@pytest.mark.parametrize(
    ("span", "blocks"),
    [
        (Span(0, 1), Span(0, 8)),
        (Span(7, 2), Span(0, 16)),
        (Span(8, 8), Span(8, 8)),
        (Span(9, 12), Span(8, 15)),
        (Span(16, 7), Span(16, 7)),
    ],
    ids=str,
)
def test_the_blocks_around_a_span_end_with_their_range(span, blocks):
    assert enclosing(span, 8, 23) == blocks
    check_spans(ManagedRange(0, 23, "w13"), [blocks], 8)


def test_batches_hold_all_bytes_in_order_and_few_blocks():
    random = np.random.default_rng(1)
    for _ in range(200):
        edges = np.cumsum(random.integers(1, 40, size=2 * random.integers(1, 6))) * 8 * PAGE_BYTES
        spans = [Span(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        found = list(batches(spans))
        covered = [page for batch in found for piece in batch for page in range(piece.offset, piece.end, PAGE_BYTES)]
        assert covered == [page for span in spans for page in range(span.offset, span.end, PAGE_BYTES)]
        for batch in found:
            blocks = [block for it in batch for block in range(it.offset // BLOCK_BYTES, -(-it.end // BLOCK_BYTES))]
            assert len(blocks) <= MOVE_BYTES // BLOCK_BYTES
            ends = {span.end for span in spans}
            assert all(piece.end % BLOCK_BYTES == 0 or piece.end in ends for piece in batch)
    assert list(batches([])) == []
