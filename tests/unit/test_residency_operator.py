"""What an operator tells the manager: residents are chosen at once, stay, and may change again."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from builders.managers import LAYERS, Rank, config, profile_of

from sglang_uvm_offload.memory.layout import PAGE_BYTES


def warm(**flags) -> Rank:
    """One step after a warm-up that has seen experts 5, 6 and 7."""
    rank = Rank(config(warmup_tokens=4, **flags))
    for _ in range(5):
        rank.step([[5, 6, 7]])
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    return rank


def following() -> Rank:
    seconds = iter(range(10**9))
    cfg = config(resident_selection="first_n", adapt="continuous")
    return Rank(cfg, clock=lambda: float(next(seconds)))


def serve(rank: Rank, ids, steps: int) -> None:
    for _ in range(steps):
        rank.step([ids])


def test_residents_are_chosen_from_what_was_routed_since_they_were_last_chosen_and_logged(caplog):
    """The old traffic outweighs the new, and does not count any more."""
    rank = warm()
    serve(rank, [0, 1, 2], 2)
    with caplog.at_level(logging.INFO):
        rank.manager.readvise()
    assert "residents chosen from the routing of 3 tokens (0 prefill and 3 decode steps)" in caplog.text
    assert "hit rate of these 33.3 % before, 66.7 % after" in caplog.text
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    serve(rank, [2, 3, 4], 1)
    rank.manager.readvise()
    assert rank.resident() == [[2, 3, 4]] * LAYERS


def test_without_a_new_token_residents_stay(caplog):
    rank = warm()
    rank.manager.readvise()
    moves = rank.manager.ledger.moves
    with caplog.at_level(logging.INFO):
        rank.manager.readvise()
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    assert rank.manager.ledger.moves == moves
    assert "residents stay: 0 tokens since they were last chosen" in caplog.text


def test_residents_stay_where_too_few_tokens_would_rank_them(caplog):
    rank = Rank(config(warmup_tokens=4))
    serve(rank, [5, 6, 7], 4)
    rank.step([[0, 1, 2]])  # before which the warm-up is over
    rank.manager.fewest_tokens = 3
    rank.step([[0, 1, 2]])
    with caplog.at_level(logging.INFO):
        rank.manager.readvise()
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    assert "2 tokens since they were last chosen, and choosing them needs 3" in caplog.text
    assert rank.status()["tokens_since_choice"] == 2
    serve(rank, [0, 1, 2], 1)
    rank.manager.readvise()
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    assert (rank.status()["chosen_from_tokens"], rank.status()["tokens_since_choice"]) == (3, 0)


def test_no_progress_bar_is_drawn_while_the_server_serves(capsys):
    """SGLang's log lines would land in it."""
    rank = warm()
    rank.manager.mover.progress = lambda: True
    rank.step([[0, 1, 2]])
    rank.manager.readvise()
    assert rank.manager.ledger.moves > 0
    assert capsys.readouterr().err == ""


def test_a_replica_without_traffic_yet_still_warms_up():
    rank = Rank(config(warmup_tokens=4))
    rank.manager.readvise()
    serve(rank, [5, 6, 7], 5)
    assert rank.resident() == [[5, 6, 7]] * LAYERS


def test_choosing_before_the_warm_up_is_over_ends_it():
    rank = Rank(config(warmup_tokens=4))
    rank.step([[3, 4, 5]])
    rank.manager.readvise()
    assert rank.resident() == [[3, 4, 5]] * LAYERS
    serve(rank, [0, 1, 2], 9)
    assert rank.resident() == [[3, 4, 5]] * LAYERS


def test_a_profiles_residents_give_way_to_an_operator():
    rank = Rank(config(warmup_tokens=10**6, profile="p"), profile=profile_of([[1, 2, 3]] * LAYERS))
    serve(rank, [1, 2, 4], 1)
    rank.manager.readvise()
    assert all({1, 2, 4} == set(ids) for ids in rank.resident())


@pytest.mark.parametrize("fault", [None, "a test"])
def test_every_rank_moves_to_what_the_first_decides_and_none_where_that_one_has_a_fault(fault):
    """Their counts may differ; that one saw nothing, or nothing else, is no reason to differ."""
    decision: list[np.ndarray] = []

    def first(decide):
        decision.append(decide())
        return decision[-1]

    leader = Rank(config(warmup_tokens=10**6), broadcast_decision=first)
    follower = Rank(config(warmup_tokens=10**6), broadcast_decision=lambda decide: decision[-1])
    leader.manager.mover.failure = fault
    leader.step([[5, 6, 7]])
    follower.step([[3, 4, 5]])
    for rank in (leader, follower):
        rank.manager.readvise()
    assert leader.resident() == follower.resident() == [[5, 6, 7] if fault is None else [0, 1, 2]] * LAYERS


def test_residents_that_stay_after_a_fault_stay_at_the_end_of_the_warm_up_too():
    """They could move: it is their choice that has failed."""
    rank = Rank(config(warmup_tokens=4, adapt="continuous"))
    rank.manager.mover.stop("choosing residents", ArithmeticError("a test"))
    serve(rank, [5, 6, 7], 9)
    assert rank.status()["warmup_done"]
    assert rank.resident() == [[0, 1, 2]] * LAYERS


def test_while_paused_the_warm_up_waits():
    rank = Rank(config(warmup_tokens=4))
    rank.manager.pause()
    serve(rank, [5, 6, 7], 9)
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    assert rank.status()["paused"]
    rank.manager.resume()
    serve(rank, [5, 6, 7], 1)
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    assert not rank.status()["paused"]


@pytest.mark.parametrize("steps_before", [1, 2, 3])
def test_while_paused_continuous_adaptation_counts_and_moves_nothing(steps_before):
    """Not even what was decided before: however far the next decision is."""
    rank = following()
    serve(rank, [5, 6, 7], steps_before)
    rank.manager.pause()
    before, moves = rank.resident(), rank.manager.ledger.moves
    serve(rank, [5, 6, 7], 40)
    assert rank.resident() == before
    assert rank.manager.ledger.moves == moves
    assert rank.status()["tokens"] == steps_before + 40
    rank.manager.resume()
    serve(rank, [5, 6, 7], 4)
    assert rank.resident() == [[5, 6, 7]] * LAYERS


def test_an_operators_choice_is_not_undone_by_what_was_decided_before_it():
    """All traffic so far is for 1, 2 and 3; the forecast, which follows the last steps, has just decided for 5, 6 and 7."""
    rank = following()
    serve(rank, [1, 2, 3], 100)
    assert rank.resident() == [[1, 2, 3]] * LAYERS
    while rank.manager.residents.adaptation._next.result() is None:
        rank.step([[5, 6, 7]])
    rank.manager.readvise()
    rank.step([[5, 6, 7]])
    assert rank.resident() == [[1, 2, 3]] * LAYERS


@pytest.mark.parametrize("adapt", ["warmup", "continuous"])
def test_beside_slots_residents_that_are_chosen_anew_are_whole_experts(adapt):
    """An expert is one and a half blocks, so two are three blocks."""
    seconds = iter(range(10**9))
    cfg = config(num_resident=4, slots=2, warmup_tokens=4, adapt=adapt)
    rank = Rank(cfg, expert_bytes=3 * PAGE_BYTES // 2, clock=lambda: float(next(seconds)))
    serve(rank, [3, 4, 6], 30)
    assert rank.resident() == [[2, 3, 4, 5]] * LAYERS, "single blocks would keep 3, 4 and 6, and halves of others"
    assert rank.status()["partly_resident_experts"] == 0
