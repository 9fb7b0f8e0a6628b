"""The experts that come ahead: of all rows' guesses the likeliest that would be missed."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.policy.lookahead import likeliest

MISSED = np.array([True, True, False, True, True, True])


def test_the_likeliest_of_each_row_come_before_what_any_row_finds_less_likely():
    assert likeliest(np.array([[3, 0], [4, 1]]), MISSED, 3) == [3, 4, 0]


def test_what_is_held_and_what_several_rows_guess_counts_once_or_not_at_all():
    assert likeliest(np.array([[2, 5, 3], [5, 5, 0]]), MISSED, 3) == [5, 3, 0]


def test_numbers_of_other_ranks_experts_are_passed_over():
    assert likeliest(np.array([[-4, 6, 3]]), MISSED, 2) == [3]
    assert likeliest(np.zeros((0, 4), dtype=int), MISSED, 2) == []
