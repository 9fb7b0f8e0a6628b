"""benchmarks/hot_first.py: orders, what residents serve by hand, what is counted of moves, and the committed table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import expert_orders, hot_first, hot_first_page
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES
from sglang_uvm_offload.memory.protocol import Location, Span

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "layout"

COUNTS = np.array([[6, 1, 1, 8]])
"""Of four experts of 1 MiB: blocks of 2 MiB hold experts 0 and 1, and 2 and 3."""


def used(counts: np.ndarray) -> np.ndarray:
    """``bool[steps, layers, experts]`` with these counts: each expert is used by the first steps."""
    return np.arange(counts.max())[:, None, None] < counts


def test_the_committed_table_is_that_of_the_committed_figures():
    assert (RESULTS / "layout.md").read_text() == hot_first_page.page(hot_first_page.read(RESULTS / "layout.json"))


def test_each_traffic_geometry_and_budget_was_served_in_each_order():
    groups = hot_first_page.groups(hot_first_page.read(RESULTS / "layout.json"))
    assert all(set(group) == set(expert_orders.ORDERS) for group in groups)
    traffics = {(group[expert_orders.CHECKPOINT].of, group[expert_orders.CHECKPOINT].on) for group in groups}
    assert len(groups) == len(traffics) * len(hot_first.GEOMETRIES) * len(hot_first.BUDGETS)
    assert {on for of, on in traffics if of == on} == {*hot_first.TRACES, hot_first.MIX}
    assert {on for of, on in traffics if of != on} == {*hot_first.TRACES[1:3], hot_first.MIX}


@pytest.mark.parametrize("name", expert_orders.ORDERS)
def test_an_order_has_each_expert_of_each_layer_once(name):
    activated = np.random.default_rng(0).random((100, 3, 20)) < 0.3
    order = expert_orders.ORDERS[name](activated)
    assert order.shape == (3, 20)
    assert (np.sort(order, axis=1) == np.arange(20)).all()


def test_experts_lie_by_the_steps_that_use_them_and_ties_as_in_the_checkpoint():
    order = expert_orders.hottest_first(used(COUNTS))
    assert order.tolist() == [[3, 0, 1, 2]]
    assert expert_orders.laid_out(COUNTS, order).tolist() == [[8, 6, 1, 1]]
    assert (expert_orders.laid_out(used(COUNTS), order).sum(axis=0) == [[8, 6, 1, 1]]).all()


def test_experts_used_together_are_neighbours_but_never_beside_a_colder_tier(monkeypatch):
    monkeypatch.setattr(expert_orders, "TIER", 4)
    monkeypatch.setattr(expert_orders, "WINDOW", 2)
    activated = np.zeros((8, 1, 6), dtype=bool)
    activated[0:4, 0, [0, 3]] = True
    activated[4:8, 0, [1, 2]] = True
    activated[0:2, 0, [4, 5]] = True
    assert expert_orders.hottest_first(activated).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert expert_orders.by_co_use(activated).tolist() == [[0, 3, 1, 2, 4, 5]]


def test_hot_experts_share_a_block_where_they_lie_hottest_first():
    order = expert_orders.hottest_first(used(COUNTS))
    as_is = hot_first.AtOnce.of(COUNTS, COUNTS, (1.0,), 0.5, BLOCK_BYTES)
    by_profile = hot_first.AtOnce.of(*[expert_orders.laid_out(COUNTS, order)] * 2, (1.0,), 0.5, BLOCK_BYTES)
    any_byte = hot_first.AtOnce.of(COUNTS, COUNTS, (1.0,), 0.5, PAGE_BYTES)
    assert as_is.fixed == (1 + 8) / 16
    assert by_profile.fixed == any_byte.fixed == (8 + 6) / 16
    assert by_profile.start == hot_first.Moved()  # the first two experts are the residents


def test_residents_are_fixed_by_the_first_counts_and_selected_again_by_the_judged_ones():
    found = hot_first.AtOnce.of(COUNTS, np.array([[4, 2, 1, 1]]), (1.0,), 0.5, BLOCK_BYTES)
    assert (found.fixed, found.reselected) == (2 / 8, 6 / 8)
    assert found.start == found.again == hot_first.Moved(calls=2, spans=2, nbytes=2 * BLOCK_BYTES)


def test_the_driver_gets_a_long_span_in_parts_and_neighbours_in_one():
    memory = hot_first.CountedMemory(BLOCK_BYTES)
    managed = memory.allocate(24 * BLOCK_BYTES, "experts")
    memory.place(managed, [Span(0, BLOCK_BYTES), Span(4 * BLOCK_BYTES, 2 * BLOCK_BYTES)], Location.DEVICE)
    assert memory.since() == hot_first.Moved(calls=1, spans=2, nbytes=3 * BLOCK_BYTES)
    memory.place(managed, [Span(0, 20 * BLOCK_BYTES)], Location.HOST)
    assert memory.since() == hot_first.Moved(calls=1, spans=3, nbytes=20 * BLOCK_BYTES)


def test_only_the_scored_steps_of_continuous_adaptation_count():
    hot, cold = np.zeros((400, 1, 8), dtype=bool), np.zeros((400, 1, 8), dtype=bool)
    hot[:, :, [0, 1]], cold[:, :, [6, 7]] = True, True
    share, moved = hot_first.following(hot, hot, (1.0,), 0.25, BLOCK_BYTES)
    assert (share, moved) == (1.0, hot_first.Moved())
    share, moved = hot_first.following(hot, cold[:1], (1.0,), 0.25, BLOCK_BYTES)
    assert (share, moved) == (0.0, hot_first.Moved())
    share, moved = hot_first.following(hot, cold, (1.0,), 0.25, BLOCK_BYTES)
    assert 0.5 < share < 1.0
    assert moved == hot_first.Moved(calls=2, spans=2, nbytes=2 * BLOCK_BYTES, decisions=1)
