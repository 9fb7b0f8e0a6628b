"""Experts in pages: which pages a resident set needs, and how neighbours become one span."""

from itertools import pairwise

import numpy as np
import pytest
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES, ExpertLayout, check_spans, whole_blocks
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Span


def mask(size, *ids):
    out = np.zeros(size, dtype=bool)
    out[list(ids)] = True
    return out


def spans(layout, *ids):
    return layout.spans(layout.resident_pages(mask(layout.num_experts, *ids)))


def test_neighbouring_experts_become_one_span():
    layout = ExpertLayout(8, 2 * PAGE_BYTES)
    assert spans(layout, 1, 2, 5) == [Span(2 * PAGE_BYTES, 4 * PAGE_BYTES), Span(10 * PAGE_BYTES, 2 * PAGE_BYTES)]


def test_every_byte_of_a_resident_expert_is_covered_and_a_shared_page_belongs_to_both():
    layout = ExpertLayout(4, PAGE_BYTES * 3 // 2)
    pages = layout.resident_pages(mask(4, 1))
    assert pages.tolist() == [False, True, True, False, False, False]
    assert layout.resident_pages(mask(4, 0)).tolist() == [True, True, False, False, False, False]


def test_pages_of_a_union_are_the_union_of_pages():
    rng = np.random.default_rng(0)
    for _ in range(200):
        layout = ExpertLayout(int(rng.integers(1, 40)), int(rng.integers(PAGE_BYTES, 5 * PAGE_BYTES)))
        one, other = rng.random(layout.num_experts) < 0.4, rng.random(layout.num_experts) < 0.4
        joined = layout.resident_pages(one) | layout.resident_pages(other)
        assert (layout.resident_pages(one | other) == joined).all()


def test_spans_end_with_the_tensor():
    layout = ExpertLayout(3, PAGE_BYTES + 4096)
    assert spans(layout, 0, 1, 2) == [Span(0, layout.nbytes)]


def test_spans_cover_exactly_the_marked_pages():
    rng = np.random.default_rng(1)
    for _ in range(200):
        layout = ExpertLayout(int(rng.integers(1, 40)), int(rng.integers(PAGE_BYTES, 5 * PAGE_BYTES)))
        pages = rng.random(layout.num_pages) < 0.5
        covered = np.zeros(layout.num_pages, dtype=bool)
        found = layout.spans(pages)
        for span in found:
            covered[span.offset // PAGE_BYTES : -(-span.end // PAGE_BYTES)] = True
        assert (covered == pages).all()
        assert all(a.end < b.offset for a, b in pairwise(found)), "neighbours were not joined"


def test_an_expert_below_a_page_is_not_placeable():
    assert not ExpertLayout(256, PAGE_BYTES - 1).placeable
    assert ExpertLayout(256, PAGE_BYTES).placeable


def test_a_range_takes_whole_blocks():
    assert whole_blocks(1) == BLOCK_BYTES
    assert whole_blocks(BLOCK_BYTES) == BLOCK_BYTES
    assert whole_blocks(BLOCK_BYTES + 1) == 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    "span",
    [Span(0, 0), Span(-PAGE_BYTES, PAGE_BYTES), Span(0, 4 * PAGE_BYTES), Span(1, PAGE_BYTES), Span(0, PAGE_BYTES + 1)],
)
def test_spans_outside_the_range_or_off_the_pages_are_refused(span):
    managed = ManagedRange(0, 3 * PAGE_BYTES - 512, "w13")
    check_spans(managed, [Span(2 * PAGE_BYTES, PAGE_BYTES - 512)])
    with pytest.raises(ValueError, match="w13"):
        check_spans(managed, [Span(0, PAGE_BYTES), span])


def test_a_resident_mask_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"\(3,\)"):
        ExpertLayout(4, PAGE_BYTES).resident_pages(mask(3, 0))


def test_offloaded_experts_keep_vram_where_they_share_a_block_with_residents():
    assert ExpertLayout(8, 2 * BLOCK_BYTES).stranded_bytes(4) == 0
    halves = ExpertLayout(8, BLOCK_BYTES // 2)
    assert halves.stranded_bytes(0) == halves.stranded_bytes(8) == 0
    assert halves.stranded_bytes(4) == BLOCK_BYTES  # each of 8 halves with a chance of 1/4


def test_what_offloaded_experts_are_expected_to_keep_is_what_the_simulated_driver_leaves_them():
    rng, memory, layout = np.random.default_rng(0), SimulatedDriver(), ExpertLayout(64, 3 << 20)
    managed = memory.allocate(layout.nbytes, "w13")
    memory.place(managed, [Span(0, layout.nbytes)], Location.DEVICE)
    kept = []
    for _ in range(20):
        pages = layout.resident_pages(rng.permutation(64) < 40)
        memory.device_bytes = None
        memory.place(managed, [Span(0, layout.nbytes)], Location.DEVICE)
        memory.place(managed, layout.spans(~pages), Location.HOST)
        in_use = np.add.reduceat(pages, np.arange(0, pages.size, BLOCK_BYTES // PAGE_BYTES), dtype=np.int64) > 0
        unused = int((~in_use).sum()) * BLOCK_BYTES
        memory.device_bytes = memory.device_used
        memory.allocate_plain(unused, "what needs VRAM")
        assert memory.traffic.evicted_bytes == 0
        kept.append(memory.device_used - unused - memory.device_resident)
        memory.free_plain(unused)
    assert layout.stranded_bytes(40) == pytest.approx(np.mean(kept), rel=0.1)
