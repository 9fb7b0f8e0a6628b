"""The hot experts of a made checkpoint: the same of all layers, or some of each."""

from __future__ import annotations

import pytest

from scripts.make_checkpoint import hot_by_layer


def test_hot_experts_are_those_of_all_layers_or_of_each() -> None:
    assert hot_by_layer([1, 3], 2, 8) == [[1, 3]] * 3, "and of the drafting layer"
    assert hot_by_layer([[1], [2, 3]], 2, 8) == [[1], [2, 3], [2, 3]]


def test_a_mixture_of_both_is_refused() -> None:
    with pytest.raises(ValueError, match="are given for 1 layers, and there are 2"):
        hot_by_layer([1, [2]], 2, 8)  # type: ignore[list-item]
