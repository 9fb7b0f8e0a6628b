"""Counts by place and by the checkpoint's expert: what one becomes in the other."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.expert_location import ExpertLocation, by_expert, by_place

REPLICATED = np.array([2, 0, 1, 2, 3, 2])
"""Six places on two ranks for four experts; expert 2 lies at three of them."""
RANKS = [ExpertLocation(REPLICATED, places) for places in (range(3), range(3, 6))]


def test_an_expert_has_the_counts_of_all_its_replicas():
    ranks = [np.array([[1, 2, 3, 9]]), np.array([[10, 20, 30, 9]])]  # the last of each is a fused shared expert
    assert by_expert(ranks[0], RANKS[:1], 4).tolist() == [[2, 3, 1, 0]]
    assert by_expert(ranks[1], RANKS[1:], 4).tolist() == [[0, 0, 40, 20]]


def test_replicas_share_the_counts_of_their_expert():
    counts = np.array([[5, 7, 30, 9]])
    assert by_place(counts, RANKS[:1], 4).tolist() == [[10, 5, 7, 0]]
    assert by_place(counts, RANKS[1:], 4).tolist() == [[10, 9, 10, 0]]


def test_layers_and_kinds_are_translated_each_by_itself():
    counts = np.arange(2 * 2 * 2 * 4).reshape(2, 2, 2, 4)
    at = [ExpertLocation(np.array(experts), range(4)) for experts in ([3, 2, 1, 0], [1, 0, 3, 2])]
    there = by_expert(counts, at, 4)
    assert (there[0] == counts[0, ..., ::-1]).all()
    assert there[1, 0, 0].tolist() == [17, 16, 19, 18]
    assert (by_place(there, at, 4) == counts).all()


def test_only_experts_at_the_places_of_their_own_numbers_are_trivial():
    assert ExpertLocation.trivial(4, range(2, 4)).is_trivial
    assert ExpertLocation.trivial(4, range(2, 4)).ids.tolist() == [2, 3]
    assert not RANKS[0].is_trivial
    assert not ExpertLocation(np.array([0, 1, 0]), range(2)).is_trivial, "a replica is on another rank"
    assert (RANKS[0].num_experts, RANKS[1].ids.tolist(), RANKS[1].replicas.tolist()) == (4, [2, 3, 2], [3, 1, 3])
