"""What guesses foresee of the misses of a replay: by hand on a few tokens, and predictors that are always right or never."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_uvm_offload.replay.lookahead import CONTROL, RECENT, foreseen
from sglang_uvm_offload.replay.simulator import replay
from sglang_uvm_offload.routing.guesses import Guesses
from sglang_uvm_offload.routing.trace import Trace

EXPERTS = 4


def few() -> Trace:
    """Two layers, one expert a token. The first of the requests warms up. Of the second layer, two experts are guessed."""
    ids = np.array([[0, 0], [3, 2], [3, 0], [1, 3], [1, 2]])
    guessed = np.array([[0, 1], [2, 0], [3, 2], [1, 3], [3, 2]])
    experts = np.full((5, 2, 2, 2), -1)
    experts[:, 1, 0] = guessed
    return Trace(ids[:, :, None], np.array([1, 4]), EXPERTS, Guesses(experts, np.zeros((2, 2), bool)))


def test_a_miss_is_foreseen_and_a_guess_brings_only_what_is_not_held() -> None:
    """Experts 0 and 1 are resident. The second layer misses 2, 3 and 2."""
    one, both, before, control = foreseen(few(), "first_n", 0.5)
    assert [(each.predictor, each.distance, each.layers) for each in (one, both, before, control)] == [
        ("1 of its router's 2", 1, 1),
        ("2 of its router's 2", 1, 1),
        (RECENT, None, 2),
        (CONTROL, None, 2),
    ], "none is two layers ahead"
    assert one.misses_per_step == both.misses_per_step == 3 / 4
    # 2, which is right, 3, then 1, which is held, and 3.
    assert (one.brought_per_step, one.recall, one.precision) == (3 / 4, pytest.approx(1 / 3), pytest.approx(1 / 3))
    # 2; 3 and 2; 3, which is right; 3, and 2, which is right.
    assert (both.brought_per_step, both.recall, both.precision) == (6 / 4, 1, 1 / 2)
    # In the first layer 3, which is right, and 3; in the second 2, and 3. The first token has no predecessor.
    assert (before.misses_per_step, before.brought_per_step) == (5 / 4, 4 / 4)
    assert (before.recall, before.precision) == (1 / 5, 1 / 4)
    assert (control.brought_per_step, control.recall, control.precision) == (5 / 4, 1, 1)


@pytest.fixture(scope="module")
def random() -> Trace:
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(16), (600, 3, 1)), axis=2)[:, :, :2] // rng.integers(1, 4, (600, 3, 1))
    ids[:, 0] = -1  # a layer that does not route
    ids[rng.random(ids.shape) < 0.1] = -1
    guessed = rng.integers(-1, 16, (600, 3, 1, 3))
    return Trace(ids, np.full(6, 100), 16, Guesses(guessed, np.zeros((3, 1), bool)))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("policy", ["slots", "adaptive", "lru", "static", "belady"])
@pytest.mark.parametrize("residency", [0.25, 0.5])
def test_the_experts_themselves_foresee_every_miss_and_bring_nothing_else(
    random: Trace, policy: str, batch: int, residency: float
) -> None:
    *_, control = foreseen(random, policy, residency, batch)
    assert (control.predictor, control.recall, control.precision) == (CONTROL, 1, 1)
    served = replay(random, policy, residency, batch, expert_bytes=1 << 20)
    assert control.misses_per_step > 0
    if policy in ("slots", "lru", "static", "belady"):
        missed = (served.read_bytes_per_step + served.moved_bytes_per_step) / (1 << 20)
    else:  # its moves may bring what no step needs
        missed = served.read_bytes_per_step / (1 << 20)
    assert control.misses_per_step == pytest.approx(missed)


def test_where_all_is_held_nothing_is_missed_or_brought(random: Trace) -> None:
    for each in foreseen(random, "static", 1.0):
        assert (each.misses_per_step, each.brought_per_step, each.recall, each.precision) == (0, 0, 0, 0)


def test_requests_that_run_together_share_what_is_brought() -> None:
    both = Trace(np.array([[[2]], [[2]]]), np.array([1, 1]), 4, Guesses(np.array([[[[2]]], [[[3]]]]), np.zeros((1, 1), bool)))
    guessed, *_ = foreseen(both, "first_n", 0.5, batch=2, warmup_fraction=0)
    assert (guessed.misses_per_step, guessed.brought_per_step, guessed.recall, guessed.precision) == (1, 2, 1, 0.5)


def test_a_trace_without_guesses_is_refused() -> None:
    with pytest.raises(ValueError, match="no guesses"):
        foreseen(Trace(few().ids, few().seq_len, EXPERTS), "slots", 0.5)
