"""The rules that choose residents."""

import numpy as np
import pytest

from sglang_uvm_offload import policy


def none(shape):
    return np.zeros(shape, dtype=bool)


def first(n, shape):
    return np.broadcast_to(np.arange(shape[1]) < n, shape).copy()


def chosen(scores, n, resident=None, pinned=None):
    scores = np.atleast_2d(np.asarray(scores, dtype=float))
    resident = none(scores.shape) if resident is None else np.atleast_2d(np.asarray(resident, dtype=bool))
    pinned = none(scores.shape) if pinned is None else np.atleast_2d(np.asarray(pinned, dtype=bool))
    capacity = np.full(len(scores), n) if np.isscalar(n) else np.asarray(n)
    return [np.flatnonzero(row).tolist() for row in policy.select(scores, capacity, resident, pinned)]


class TestSelect:
    def test_takes_the_hottest_of_each_layer(self):
        assert chosen([[1, 5, 3, 4], [9, 0, 8, 7]], 2) == [[1, 3], [0, 2]]

    def test_equal_scores_move_nothing(self):
        resident = np.random.default_rng(0).permuted(first(5, (7, 16)), axis=1)
        after = policy.select(np.full((7, 16), 0.25), np.full(7, 5), resident, none((7, 16)))
        assert (after == resident).all()

    def test_among_equals_a_resident_stays_then_the_lower_id_comes(self):
        assert chosen([2, 1, 1, 1, 0], 2, resident=[0, 0, 0, 1, 1]) == [[0, 3]]
        assert chosen([1, 1, 1, 1], 2) == [[0, 1]]

    def test_each_layer_has_its_own_capacity(self):
        assert chosen([[3, 2, 1], [3, 2, 1], [3, 2, 1]], [0, 1, 3]) == [[], [0], [0, 1, 2]]

    def test_a_capacity_beyond_the_experts_takes_them_all(self):
        assert chosen([3, 2, 1], 9) == [[0, 1, 2]]

    def test_one_expert(self):
        assert chosen([0], 1) == [[0]]
        assert chosen([0], 0) == [[]]

    def test_pinned_experts_are_always_resident_and_cost_no_capacity(self):
        assert chosen([5, 4, 3, 9], 2, pinned=[0, 0, 0, 1]) == [[0, 1, 3]]
        assert chosen([5, 4, 3, 0], 0, pinned=[0, 0, 0, 1]) == [[3]]

    def test_slots_that_are_no_expert_are_never_chosen(self):
        assert chosen([[0, 0, -1, -1]], 3, resident=[[0, 0, 1, 0]]) == [[0, 1]]

    def test_no_layer_and_no_expert(self):
        assert policy.select(np.zeros((0, 4)), np.zeros(0, int), none((0, 4)), none((0, 4))).shape == (0, 4)
        assert policy.select(np.zeros((2, 0)), np.zeros(2, int), none((2, 0)), none((2, 0))).shape == (2, 0)

    def test_does_not_change_its_arguments(self):
        scores, resident, pinned = np.array([[1.0, 2.0]]), np.array([[True, False]]), np.array([[False, False]])
        policy.select(scores, np.array([1]), resident, pinned)
        assert scores.tolist() == [[1, 2]]
        assert resident.tolist() == [[True, False]]

    def test_refuses_what_does_not_fit_together(self):
        with pytest.raises(ValueError, match="fit together"):
            policy.select(np.zeros((2, 4)), np.zeros(3, int), none((2, 4)), none((2, 4)))
        with pytest.raises(ValueError, match="fit together"):
            policy.select(np.zeros((2, 4)), np.zeros(2, int), none((2, 3)), none((2, 4)))
        with pytest.raises(ValueError, match="not a number"):
            policy.select(np.array([[np.nan, 1.0]]), np.array([1]), none((1, 2)), none((1, 2)))


class TestScore:
    def test_without_prefill_it_is_touches_per_decode_step(self):
        touches = np.array([[8, 4, 0, 4]])
        assert policy.score(touches, 8, np.zeros((1, 4))).tolist() == [[1.0, 0.5, 0.0, 0.5]]

    def test_without_decode_it_ranks_by_share_of_prefill_tokens(self):
        routed = np.array([[1, 500, 20, 0], [4, 3, 2, 1]])
        scores = policy.score(np.zeros((2, 4)), 0, routed)
        assert np.argsort(-scores, axis=1).tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
        assert (scores >= 0).all()

    def test_any_number_of_prefill_tokens_weighs_no_more_than_the_prior(self):
        touches, routed = np.array([[300, 700, 0]]), np.array([[1000, 10, 0]])
        scores = [policy.score(touches, 1000, routed * n) for n in (1, 10**6)]
        assert np.allclose(*scores)
        assert scores[0][0, 1] > scores[0][0, 0]

    def test_a_few_decode_steps_do_not_outweigh_a_clear_prior(self):
        scores = policy.score(np.array([[0, 1, 1]]), 1, np.array([[900, 50, 50]]))
        assert scores[0, 0] > scores[0, 1]

    def test_the_prior_vanishes_with_decode_steps(self):
        rate, steps = np.array([[0.9, 0.4, 0.7]]), 10**6
        assert np.allclose(policy.score(rate * steps, steps, np.array([[0, 10**6, 0]])), rate, atol=1e-4)

    def test_a_layer_without_traffic_scores_zero(self):
        scores = policy.score(np.array([[0, 0], [3, 1]]), 4, np.array([[0, 0], [0, 0]]))
        assert scores.tolist() == [[0, 0], [0.75, 0.25]]
        assert policy.score(np.zeros((1, 2)), 0, np.zeros((1, 2))).tolist() == [[0, 0]]

    def test_equal_routing_gives_exactly_equal_scores(self):
        scores = policy.score(np.full((3, 7), 11), 33, np.full((3, 7), 5))
        assert len(np.unique(scores)) == 1
