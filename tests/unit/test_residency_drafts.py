"""Draft models of which some experts are offloaded: who is resident at load, when others are, and what is told of them."""

import logging

import pytest
from builders.managers import Draft, E, Rank, config
from builders.refusing import Later

from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.residency.status import rank_status, residency_table

HOT = [[7, 5]]


def serving(**flags):
    """A rank that serves, and its draft model, of which two experts are resident."""
    rank = Rank(config(**{"draft_num_resident": 2, "warmup_tokens": 40, **flags}))
    draft = Draft(rank)
    rank.manager.begin_serving()
    return rank, draft


def warm_up(rank, draft, steps=11):
    for _ in range(steps):
        rank.step([[0, 1, 2]] * 4)
        draft.step(HOT)


def test_the_first_experts_are_resident_and_after_the_warm_up_those_that_drafts_use(caplog):
    rank, draft = serving()
    assert draft.resident() == [0, 1]
    with caplog.at_level(logging.INFO):
        warm_up(rank, draft, 10)
        assert draft.resident() == [0, 1]
        warm_up(rank, draft, 1)
    assert draft.resident() == [5, 7]
    (line,) = [r.getMessage() for r in caplog.records if "draft model" in r.getMessage()]
    assert "chosen from 10 of its steps: hit rate of these 0.0 % before, 100.0 % after; 0.1 MiB of 0.1 MiB" in line
    for _ in range(100):
        rank.step([[0, 1, 2]] * 4)
        draft.step([[3, 4]])
    assert draft.resident() == [5, 7], "once"


def test_what_ran_to_capture_graphs_is_none_of_what_drafts_use():
    rank = Rank(config(draft_num_resident=2, warmup_tokens=40))
    draft = Draft(rank)
    for _ in range(1000):
        draft.step([[2, 3]])
    rank.manager.begin_serving()
    warm_up(rank, draft)
    assert draft.resident() == [5, 7]


@pytest.mark.parametrize(
    ("flags", "resident"),
    [
        ({"resident_selection": "first_n"}, [0, 1]),
        ({"resident_selection": "manual", "resident_ids": "4,5,6"}, [0, 1]),
        ({"num_resident": E}, [5, 7]),
        ({"adapt": "continuous", "resident_selection": "first_n"}, [5, 7]),
    ],
)
def test_they_change_where_residents_may_also_where_all_others_are_resident(flags, resident):
    rank, draft = serving(**flags)
    warm_up(rank, draft)
    assert draft.resident() == resident


def test_an_operator_has_them_chosen_from_what_drafts_used_since():
    rank, draft = serving(adapt="warmup", resident_selection="first_n")
    warm_up(rank, draft, 1)
    rank.manager.readvise()
    assert draft.resident() == [5, 7]


def test_while_paused_they_stay():
    rank, draft = serving()
    rank.manager.pause()
    warm_up(rank, draft)
    assert draft.resident() == [0, 1]
    rank.manager.resume()
    warm_up(rank, draft, 1)
    assert draft.resident() == [5, 7]


def test_other_weights_have_them_chosen_anew():
    rank, draft = serving()
    warm_up(rank, draft)
    rank.manager.weights_updated()
    for _ in range(11):
        rank.step([[0, 1, 2]] * 4)
        draft.step([[3, 4]])
    assert draft.resident() == [3, 4]


def test_a_move_under_way_loses_no_vram():
    """Chosen again before the first move has begun to bring what it has demoted room for."""
    queue = Later()
    rank = Rank(config(draft_num_resident=2, warmup_tokens=40), executor=queue)
    draft = Draft(rank)
    rank.manager.begin_serving()
    for _ in range(11):
        rank.step([[0, 1, 2]] * 4)
        draft.step(HOT)
    moves = len(queue.tasks)
    draft.layer.demote(draft.layer.resident_extents() & False)
    for _ in range(3):
        draft.step([[3, 4]])
    rank.step([[0, 1, 2]] * 4)
    rank.manager.readvise()
    assert len(queue.tasks) > moves
    queue.run()
    assert draft.resident() == [3, 4]


def test_it_is_told_what_is_offloaded_and_served():
    rank, draft = serving()
    warm_up(rank, draft)
    status = rank.status()
    assert (status["draft_bytes"], status["draft_offloaded_bytes"]) == (2 * PAGE_BYTES, 6 * PAGE_BYTES)
    assert status["draft_hit_rate"] == pytest.approx(1 / 11)
    assert status["draft_zero_copy_bytes"] == 10 * 2 * PAGE_BYTES
    assert status["hit_rate"] == 1.0


def test_tensors_of_other_extents_are_chosen_from_as_they_are():
    rank, draft = serving(adapt="continuous")
    warm_up(rank, draft)
    draft.fill(expert_bytes=3 * PAGE_BYTES // 2)
    in_vram = draft.layer.resident_bytes
    for _ in range(3):
        draft.step([[3, 4]])
    rank.step([[0, 1, 2]])
    rank.manager.readvise()
    assert draft.layer.resident_bytes == in_vram
    assert draft.layer.offloaded_bytes_by_expert[[3, 4]].sum() <= PAGE_BYTES // 2  # three blocks have room for two experts


def test_the_table_at_the_start_shows_both_parts():
    rank, _ = serving()
    lines = residency_table(rank_status(rank.manager), rank.manager.memory.info(), 1000).splitlines()
    at = next(i for i, line in enumerate(lines) if "draft model, 1 MoE layers, in VRAM" in line)
    assert lines[at].split()[-2:] == ["0.1", "MiB"]
    assert "offloaded to host RAM" in lines[at + 1]
    assert lines[at + 1].split()[-2:] == ["0.4", "MiB"]


@pytest.mark.parametrize("number", [E, None])
def test_all_of_them_are_resident(number, caplog):
    rank, draft = serving(draft_num_resident=number)
    told = f"--expert-offload-config draft_num_resident {number}: the draft model has nothing to offload"
    assert (told in caplog.text) == (number is not None)
    warm_up(rank, draft)
    assert draft.resident() == [*range(E)]
    assert rank.status()["draft_hit_rate"] is None


def test_a_status_that_waits_for_nothing_counts_drafts_too():
    rank, draft = serving()
    draft.step([[0, 7]])
    assert rank_status(rank.manager, wait=False).draft_hit_rate == 0.5
