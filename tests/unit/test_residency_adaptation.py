"""Continuous adaptation through the manager: residents follow the traffic, pay for their moves, and stop at a fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from builders import links
from builders.managers import LAYERS, E, Rank, config, profile_of
from builders.refusing import Later, RefusingMemory

from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, Span
from sglang_uvm_offload.policy.forecast import TUNING
from sglang_uvm_offload.residency import adaptation, mover
from sglang_uvm_offload.residency import manager as manager_module
from sglang_uvm_offload.residency.adaptation import Adaptation
from sglang_uvm_offload.residency.status import rank_status
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase


def seconds_pass() -> Callable[[], float]:
    """A clock by which there is always time to move."""
    seconds = iter(range(10**9))
    return lambda: float(next(seconds))


OF_RANK = ("executor", "decider", "make_counters", "link")


def following(memory=None, clock=None, **more) -> Rank:
    """``more``: flags, and what ``Rank`` takes."""
    given = {name: more.pop(name) for name in OF_RANK if name in more}
    cfg = config(resident_selection="first_n", adapt="continuous", **more)
    return Rank(cfg, memory, clock=clock or seconds_pass(), **given)


def serve(rank: Rank, ids, steps: int) -> None:
    for _ in range(steps):
        rank.step(ids)


def test_residents_follow_traffic_that_changes():
    rank = following()
    serve(rank, [[5, 6, 7]], 40)
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    serve(rank, [[1, 2, 3]], 80)
    assert rank.resident() == [[1, 2, 3]] * LAYERS


@pytest.mark.parametrize("measured", [None, "slow", "fast"])
def test_what_is_promoted_is_bounded_over_time_and_experts_larger_than_a_step_affords_are_promoted_too(monkeypatch, measured):
    """By the constant, or by a measured link of which it would be too much."""
    step_seconds = 0.01
    rate = 0.2 * PAGE_BYTES / step_seconds  # an expert in five steps
    monkeypatch.setattr(adaptation, "BURST_SECONDS", step_seconds)
    slow = rate / 0.08e9
    link = links.status(sequential=slow, scattered=slow, copied=slow, engine=slow) if measured == "slow" else None
    if measured == "fast":
        link = links.status(sequential=400, scattered=400, copied=400, engine=450)
    if measured != "slow":
        monkeypatch.setattr(adaptation, "MOVE_BYTES_PER_S", rate)
    seconds = count()
    rank = following(clock=lambda: next(seconds) * step_seconds, link=link)
    moved = []
    for _ in range(200):
        serve(rank, [[5, 6, 7]], 1)
        moved.append(rank.manager.ledger.moves)
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    gained = np.diff(np.array(moved)[4::5])
    assert gained.max() <= 2, "more than the link is to carry in five steps, and one expert"
    assert moved[-1] == 3 * LAYERS


def test_after_idle_time_no_more_moves_at_once_than_in_a_fiftieth_of_a_second():
    """Two experts."""
    slow = 2 * PAGE_BYTES / 0.02 / 0.08e9
    rank = following(clock=seconds_pass(), link=links.status(sequential=slow, scattered=slow, copied=slow, engine=slow))
    moves = [0]
    for _ in range(60):
        serve(rank, [[5, 6, 7]], 1)
        moves.append(rank.manager.ledger.moves)
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    assert np.diff(moves).max() == 2


def test_a_fault_stops_moving_and_neither_serving_nor_the_answer_to_peers(caplog):
    """Also where no read can tell any more what has moved."""

    class Failing(RefusingMemory):
        def in_vram(self, blocks):
            if self.refused:
                raise ManagedMemoryError("look", "blocks", Span(0, 0), "no kernel runs")
            return super().in_vram(blocks)

    memory = Failing()
    rank, answers = following(memory), []
    rank.manager.residents.broadcast_decision = lambda decide: answers.append(decide()) or answers[-1]
    memory.refused = Location.DEVICE
    serve(rank, [[5, 6, 7]], 60)
    assert "injected" in rank_status(rank.manager).fault
    assert len([r for r in caplog.records if "moving experts stopped" in r.getMessage()]) == 1
    assert len(answers) == 60
    assert sum(answer is not None for answer in answers) == 1
    memory.refused = None
    for layer in rank.model.layers:
        (tensor,) = layer.tensors
        there = memory.in_vram([(tensor.managed, int(at)) for at in tensor.layout.blocks(tensor.resident)])
        assert there.all(), "taken for resident, and is not"


def test_frequency_follows_from_the_warmup_on():
    rank = Rank(config(adapt="continuous", warmup_tokens=4), clock=seconds_pass())
    serve(rank, [[5, 6, 7]], 4)
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    serve(rank, [[5, 6, 7]], 1)
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    serve(rank, [[1, 2, 3]], 80)
    assert rank.resident() == [[1, 2, 3]] * LAYERS


def test_decode_steps_that_stream_are_no_evidence_that_experts_are_unused():
    rank = following()
    for _ in range(10):
        rank.step([[5, 6, 7]])
    for _ in range(90):
        rank.step([[5, 6, 7]], streams=True)
    seen = rank.counted()
    assert seen.steps == (90, 10)
    assert seen.counts[0, Phase.DECODE, ACTIVATIONS].tolist() == [0] * 5 + [10] * 3
    assert seen.counts[0, Phase.PREFILL, ROUTED].tolist() == [0] * 5 + [90] * 3
    assert rank.status()["curve"]["decode_steps"] == 10


class TestDecisionsBesideMoves:
    """Experts move on one thread, which a test lets run, while decisions are made on another."""

    def following(self) -> tuple[Rank, Later, list[float]]:
        """And what each decision may promote, in bytes."""
        moves, given = Later(), []
        rank = following(executor=moves, decider=mover.ThisThread())
        decide = rank.manager.residents.adaptation.decide
        rank.manager.residents.adaptation.decide = lambda counts, resident, most: (
            given.append(most) or decide(counts, resident, most)
        )
        return rank, moves, given

    def until_a_move(self, rank: Rank) -> None:
        for _ in range(60):
            serve(rank, [[5, 6, 7]], 1)
            if rank.manager.mover.moving:
                return
        pytest.fail("nothing moves")

    def test_decisions_go_on_and_add_no_move_and_after_it_residents_follow_what_came_meanwhile(self):
        rank, moves, given = self.following()
        self.until_a_move(rank)
        decided, residents = len(given), rank.resident()
        serve(rank, [[1, 2, 3]], 80)
        assert given[decided:] == [0.0] * 80
        assert len(moves.tasks) == 1
        assert rank.resident() == residents
        for _ in range(6):
            moves.run()
            serve(rank, [[1, 2, 3]], 2)
        moves.run()
        assert rank.resident() == [[1, 2, 3]] * LAYERS

    def test_the_budget_of_replaced_tensors_is_taken_when_nothing_moves(self, monkeypatch):
        rank, moves, _ = self.following()
        self.until_a_move(rank)
        moving = []
        budget = adaptation._budget_of
        monkeypatch.setattr(adaptation, "_budget_of", lambda model: moving.append(rank.manager.mover.moving) or budget(model))
        rank.manager.residents.adaptation.follow(rank.model)
        serve(rank, [[1, 2, 3]], 3)
        assert moving == []
        moves.run()
        serve(rank, [[1, 2, 3]], 3)
        assert moving == [False]


class TestDecisionsBesideTheSteps:
    def test_steps_go_on_until_a_decision_is_ready_and_only_one_is_made_at_a_time(self):
        later = Later()
        rank = following(executor=later)
        for _ in range(30):
            before = rank.resident()
            serve(rank, [[5, 6, 7]], 10)
            assert rank.resident() == before, "a move on the thread that launches steps"
            assert len(later.tasks) == 1 + rank.manager.mover.moving
            later.run()
        assert rank.resident() == [[5, 6, 7]] * LAYERS

    def test_an_error_of_a_decision_that_is_dropped_is_shown(self):
        later = Later()
        rank = Rank(config(adapt="continuous", warmup_tokens=2), clock=seconds_pass(), executor=later)
        rank.manager.residents.adaptation.decide = lambda *seen: 1 / 0
        serve(rank, [[1, 2, 3]], 3)
        assert rank.manager.residents.warm
        assert rank.manager.fault is None
        later.run()
        serve(rank, [[1, 2, 3]], 1)
        assert rank.manager.fault == "choosing residents failed: ZeroDivisionError: division by zero"

    def test_the_next_decision_starts_from_what_the_last_one_moves_to(self):
        later = Later()
        rank = following(executor=later)
        asked, decide = [], rank.manager.residents.adaptation.decide
        rank.manager.residents.adaptation.decide = lambda counts, resident, most: (
            asked.append(resident) or decide(counts, resident, most)
        )
        for _ in range(200):
            serve(rank, [[5, 6, 7]], 1)
            served = rank.manager.residents.next
            later.run()
            assert (asked[-1] == served).all()
        assert rank.resident() == [[5, 6, 7]] * LAYERS

    def test_a_decision_that_fails_ends_adapting_and_neither_serving_nor_the_answer_to_peers(self, caplog):
        later = Later()
        rank = following(executor=later)
        answers = []
        rank.manager.residents.broadcast_decision = lambda decide: answers.append(decide()) or answers[-1]
        rank.manager.residents.adaptation.decide = lambda *seen: 1 / 0
        serve(rank, [[5, 6, 7]], 1)
        later.run()
        serve(rank, [[5, 6, 7]], 20)
        assert answers == [None] * 21
        assert rank.resident() == [[0, 1, 2]] * LAYERS
        assert rank_status(rank.manager).fault == "choosing residents failed: ZeroDivisionError: division by zero"
        assert len([r for r in caplog.records if "adapting stopped" in r.getMessage()]) == 1
        assert rank_status(rank.manager).routed == 3 * LAYERS * 21

    @pytest.mark.parametrize("part", ["deciding", "moving", "looking"])
    def test_a_thread_that_exits_ends_neither_serving_nor_goes_unseen(self, part, monkeypatch):
        later = Later()
        rank = following(executor=later)
        if part == "deciding":
            rank.manager.residents.adaptation.decide = lambda *seen: sys.exit("gone")
        elif part == "moving":
            rank.manager.mover.move = lambda *wanted, **more: sys.exit("gone")
        else:
            monkeypatch.setattr(rank.manager.memory, "in_vram", lambda blocks: sys.exit("gone"))
            rank.manager.check_for_evictions()
        for _ in range(40):
            serve(rank, [[5, 6, 7]], 4)
            later.run()
        if part == "looking":
            assert rank.manager.evictions._failed
        else:
            assert rank.manager.fault.endswith("failed: SystemExit: gone")

    def test_a_thread_that_hangs_is_shown_once_and_does_not_hold_up_an_update_of_the_weights(self, caplog, monkeypatch):
        now = [0.0]
        rank = following(executor=Later(), clock=lambda: now[0])  # runs nothing
        rank.manager.check_for_evictions()
        now[0] = manager_module.STUCK_SECONDS
        rank.manager.poll_if_due()
        assert rank.manager.fault is None
        for _ in range(3):
            now[0] += manager_module.CHECK_SECONDS
            rank.manager.poll_if_due()
        assert rank_status(rank.manager).fault.endswith("a driver call did not return within 600 s")
        assert caplog.text.count("adapting stopped") == 1
        monkeypatch.setattr(mover, "STUCK_SECONDS", 0.01)
        with pytest.raises(TimeoutError, match=r"expert moves did not finish within 0\.01 s; restart the server"):
            rank.manager.wait_for_moves()

    def test_what_is_decided_on_the_steps_up_to_one_look_is_taken_at_the_next(self):
        rank = following()
        decided = []
        decide = rank.manager.residents.adaptation.decide

        def wanted(counts, *more):
            after = decide(counts, *more)
            if after is not None:
                decided.append((counts.steps[Phase.DECODE], rank.manager.steps))
            return after

        rank.manager.residents.adaptation.decide = wanted
        while not decided:
            serve(rank, [[5, 6, 7]], 1)
            assert rank.resident() == [[0, 1, 2]] * LAYERS
        counted, launched = decided[0]
        assert counted == launched, "it was not decided on all steps launched before"
        serve(rank, [[5, 6, 7]], 1)
        assert rank.resident() != [[0, 1, 2]] * LAYERS


def test_a_profile_seeds_what_follows_the_traffic(monkeypatch):
    given = []
    monkeypatch.setattr(manager_module, "Adaptation", lambda *args, **more: given.append(args[2]) or Adaptation(*args, **more))
    profile = profile_of([[7, 5, 3], [0, 6, 4], [1, 2, 7]])
    Rank(config(adapt="continuous", profile="p"), profile=profile)
    Rank(config(adapt="continuous", profile="p", num_resident=2), profile=profile, ep_rank=1, ep_size=2)
    Rank(config(adapt="continuous"))
    (whole,), (half,), none = given
    assert (whole.counts == profile.seen.counts).all()
    assert (half.counts == profile.seen.counts[..., E // 2 :]).all()
    assert whole.steps == half.steps == profile.seen.steps
    assert none == []


class TestPrefetch:
    def test_named_experts_stay_and_the_rest_of_n_follows_the_traffic(self):
        rank = following(resident_ids="0,4", num_resident=4)
        assert rank.resident() == [[0, 1, 2, 4]] * LAYERS
        serve(rank, [[5, 6, 7]], 60)
        others = [set(ids) - {0, 4} for ids in rank.resident()]
        assert all({0, 4} < set(ids) for ids in rank.resident())
        assert set.union(*others) == {5, 6, 7}
        assert sum(map(len, others)) == 2 * LAYERS

    def test_named_experts_stay_through_the_warm_up_too(self):
        cfg = config(prefetch="frequency", resident_ids="0,4", num_resident=4, warmup_tokens=4)
        rank = Rank(cfg, clock=seconds_pass(), profile=profile_of([[1, 2, 3]] * LAYERS))
        assert rank.resident() == [[0, 1, 2, 4]] * LAYERS, "the two best of the profile beside those that are named"
        serve(rank, [[5, 6]], 5)
        assert rank.resident() == [[0, 4, 5, 6]] * LAYERS

    @pytest.mark.parametrize(("prefetch", "directions"), [("frequency", 0), ("speculative", TUNING.directions)])
    def test_only_speculative_prefetching_learns_what_is_used_together(self, prefetch, directions):
        rank = Rank(config(resident_selection="first_n", prefetch=prefetch), clock=seconds_pass())
        assert rank.manager.residents.adaptation._policy._forecast._tuning.directions == directions
        serve(rank, [[5, 6, 7]], 60)
        assert rank.resident() == [[5, 6, 7]] * LAYERS


def test_residents_follow_the_traffic_over_tensors_that_replaced_others():
    """An update of the weights may leave tensors with other extents."""
    rank = following()
    serve(rank, [[5, 6, 7]], 40)
    for layer, module in zip(rank.model.layers, rank.modules, strict=True):
        with AllocationMode(E, layer.allocate):
            module.w13 = torch.empty(E, 5 * PAGE_BYTES // 2, dtype=torch.uint8)
        layer.sync_tensors(module)
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    budget = sum(layer.resident_bytes for layer in rank.model.layers)
    for ids in ([5, 6, 7], [1, 2, 3]):
        serve(rank, [ids], 80)
        assert all(set(ids) <= set(whole) for whole in rank.resident())
        assert sum(layer.resident_bytes for layer in rank.model.layers) <= budget
    assert rank.manager.fault is None
