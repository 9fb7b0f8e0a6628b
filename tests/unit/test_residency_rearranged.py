"""A rank whose experts lie elsewhere than at the places of their numbers, and are rearranged while it serves."""

from __future__ import annotations

import numpy as np
import pytest
from builders.managers import LAYERS, E, Rank, config, profile_of

from sglang_uvm_offload.residency import manager as manager_module
from sglang_uvm_offload.residency import rearranging
from sglang_uvm_offload.residency.adaptation import Adaptation
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase

BACKWARDS = list(range(E))[::-1]
SHIFTED = [*range(1, E), 0]
TWICE = [*range(E), 5, 6]
"""Experts 5 and 6 have a replica."""


def alone(counts):
    return [counts]


def rearrange(rank, experts, gather=alone, layers=range(LAYERS)):
    """As a hook of SGLang's updater does."""
    rank.rearranging.begin()
    located = [rank.located(experts) if index in layers else rank.model.layers[index].location for index in range(LAYERS)]
    rank.rearranging.end(located, gather)
    rank.manager.wait_for_moves()


def decoded(rank):
    """Activations of each of the checkpoint's experts in layer 0."""
    return rank.manager.routing_by_expert(wait=True).counts[0, Phase.DECODE, ACTIVATIONS].tolist()


class TestAtLoad:
    def test_named_experts_are_resident_wherever_they_lie(self):
        rank = Rank(config(resident_selection="manual", resident_ids="1,5,6"), experts=BACKWARDS)
        assert rank.resident() == [[1, 2, 6]] * LAYERS
        assert rank.status()["resident_ids"] == [[6, 5, 1]] * LAYERS

    def test_named_experts_are_resident_with_all_their_replicas(self):
        rank = Rank(config(resident_selection="manual", resident_ids="1,5"), experts=TWICE)
        assert rank.resident() == [[1, 5, 8]] * LAYERS

    def test_a_profile_places_its_experts_wherever_they_lie(self):
        profile = profile_of([[7, 5, 3], [0, 6, 4], [1, 2, 7]])
        assert Rank(config(profile="p"), profile=profile, experts=BACKWARDS).resident() == [[0, 2, 4], [1, 3, 7], [0, 5, 6]]
        second = Rank(config(profile="p", num_resident=2), profile=profile, experts=BACKWARDS, ep_rank=1, ep_size=2)
        assert second.status()["resident_ids"] == [[3], [0], [2]] or second.status()["resident_ids"] == [[3], [0], [1]]

    def test_what_is_shown_are_the_checkpoints_ids(self):
        rank = Rank(config(), experts=TWICE, num_shared=1)
        layer = rank.status()["layers"][0]
        assert layer["expert_ids"] == TWICE
        assert rank.status()["resident_ids"][0] == [0, 1, 2, E], "a fused shared expert follows the routed ones"
        assert Rank(config()).status()["layers"][0]["expert_ids"] == []


class TestCounts:
    def test_they_are_of_the_expert_that_lay_there_at_the_time(self):
        rank = Rank(config(resident_selection="first_n"))
        rank.step([[0, 1]])
        rank.step([[0, 7]])
        assert decoded(rank) == [2, 1, 0, 0, 0, 0, 0, 1]
        rearrange(rank, BACKWARDS)
        assert decoded(rank) == [2, 1, 0, 0, 0, 0, 0, 1]
        assert rank.counted().counts[0, Phase.DECODE, ROUTED].tolist() == [1, 0, 0, 0, 0, 0, 1, 2]
        rank.step([[0, 1]])
        assert decoded(rank) == [2, 1, 0, 0, 0, 0, 1, 2]
        rearrange(rank, SHIFTED)
        rank.step([[0]])
        assert decoded(rank) == [2, 2, 0, 0, 0, 0, 1, 2]
        assert rank.manager.ledger.routed.tolist() == [8 - 1] * LAYERS, "each token once"

    def test_a_rank_learns_what_others_counted_of_its_experts_and_saves_its_own(self):
        first, second = (Rank(config(resident_selection="first_n"), ep_rank=r, ep_size=2) for r in range(2))
        first.step([[0, 1, 3]])
        second.step([[2, 2, 2]])
        each = [rank.manager.routing_by_expert(wait=True).counts for rank in (first, second)]
        both = [np.stack([counts, counts]) for counts in each]
        for rank in (first, second):
            rearrange(rank, BACKWARDS, lambda own: both)
        assert first.counted().counts[0, Phase.DECODE, ROUTED].tolist() == [0, 3, 0, 0]
        assert second.counted().counts[0, Phase.DECODE, ROUTED].tolist() == [1, 0, 1, 1]
        assert decoded(first) == [1, 1, 0, 1, 0, 0, 0, 0]
        assert decoded(second) == [0, 0, 0, 0, 0, 0, 1, 0]

    def test_layers_that_stay_keep_the_counts_of_each_replica(self):
        rank = Rank(config(resident_selection="first_n"), experts=TWICE)
        for _ in range(4):
            rank.step([[8]])
        rearrange(rank, TWICE[::-1], layers=[0])
        counts = rank.counted().counts[:, Phase.DECODE, ACTIVATIONS]
        assert counts[1].tolist() == [0] * 8 + [4, 0]
        assert counts[0].tolist() == [0, 2, 0, 0, 2] + [0] * 5


class TestResidents:
    @pytest.mark.parametrize("adapt", ["warmup", "continuous"])
    def test_they_follow_the_experts_that_traffic_uses(self, adapt):
        rank = Rank(config(adapt=adapt, warmup_tokens=10), clock=iter(range(10**9)).__next__)
        for _ in range(40):
            rank.step([[5, 6, 7]])
        assert rank.resident() == [[5, 6, 7]] * LAYERS
        rearrange(rank, BACKWARDS)
        assert rank.resident() == [[0, 1, 2]] * LAYERS
        moves = rank.manager.ledger.moves
        for _ in range(40):
            rank.step([[0, 1, 2]])
        assert rank.resident() == [[0, 1, 2]] * LAYERS
        assert rank.manager.ledger.moves == moves, "the forecast is of the experts, not of the places"
        assert rank.status()["resident_ids"] == [[7, 6, 5]] * LAYERS

    def test_the_forecast_begins_anew_with_what_was_counted(self, monkeypatch):
        made = []
        monkeypatch.setattr(manager_module, "Adaptation", lambda *args, **more: made.append(args) or Adaptation(*args, **more))
        rank = Rank(config(adapt="continuous", profile="p"), profile=profile_of([[5, 6, 7]] * LAYERS))
        for _ in range(9):
            rank.step([[1, 2, 3]])
        rearrange(rank, BACKWARDS)
        _, (_, start, (past, live)) = made
        assert start.counts[0, Phase.DECODE, ACTIVATIONS].tolist() == [0, 0, 0, 0, 9, 9, 9, 0]
        assert past.counts[0, Phase.DECODE, ACTIVATIONS].tolist() == [100, 100, 100] + [0] * 5
        assert live.counts[0, Phase.DECODE, ACTIVATIONS].tolist() == [0, 0, 0, 0, 9, 9, 9, 0]
        assert live.steps == (0, 9)

    def test_what_traffic_used_long_ago_fades(self, monkeypatch):
        monkeypatch.setattr(rearranging, "MEMORY_STEPS", 10.0)
        rank = Rank(config(warmup_tokens=1))
        for _ in range(60):
            rank.step([[5, 6, 7]])
        rearrange(rank, BACKWARDS)
        for _ in range(30):
            rank.step([[3, 4, 5]])  # the experts 4, 3 and 2
        rearrange(rank, list(range(E)))
        assert rank.resident() == [[2, 3, 4]] * LAYERS
        assert decoded(rank) == [0, 0, 30, 30, 30, 60, 60, 60], "what is saved does not fade"

    def test_those_of_layers_that_stay_stay(self):
        rank = Rank(config(warmup_tokens=1))
        for _ in range(9):
            rank.step([[5, 6, 7]])
        for _ in range(30):
            rank.step([[1, 2, 3]])
        rearrange(rank, BACKWARDS, layers=[1])
        assert rank.resident() == [[5, 6, 7], [4, 5, 6], [5, 6, 7]]

    @pytest.mark.parametrize("adapt", ["off", "warmup"])
    def test_those_of_a_profile_follow_its_experts(self, adapt):
        rank = Rank(config(adapt=adapt, profile="p"), profile=profile_of([[5, 6, 7]] * LAYERS))
        rank.step([[1, 2, 3]])
        rearrange(rank, SHIFTED)
        assert rank.resident() == [[4, 5, 6]] * LAYERS

    def test_the_first_stay_the_first(self):
        rank = Rank(config(resident_selection="first_n"))
        rank.step([[5, 6, 7]])
        rearrange(rank, BACKWARDS)
        assert rank.resident() == [[0, 1, 2]] * LAYERS
        assert rank.manager.ledger.moves == 0

    @pytest.mark.parametrize("why", ["paused", "a fault"])
    def test_nothing_moves_where_nothing_may(self, why):
        rank = Rank(config(warmup_tokens=1))
        for _ in range(9):
            rank.step([[5, 6, 7]])
        if why == "paused":
            rank.manager.pause()
        else:
            rank.manager.mover.failure = "the link fell out"
        rearrange(rank, BACKWARDS)
        assert rank.resident() == [[5, 6, 7]] * LAYERS
        assert decoded(rank)[5] == 9

    @pytest.mark.parametrize("asked", ["by an operator", "by new weights"])
    def test_what_is_chosen_anew_is_chosen_from_what_came_since(self, asked):
        """Since residents were last chosen so, or the weights are others, and not since the rearrangement."""
        rank = Rank(config(warmup_tokens=6))
        for _ in range(9):
            rank.step([[5, 6, 7]])
        if asked == "by an operator":
            rank.manager.readvise()
        else:
            rank.manager.weights_updated()
        for _ in range(4):
            rank.step([[1, 2, 3]])
        rearrange(rank, BACKWARDS)
        for _ in range(3):
            rank.step([[6, 5, 0]])  # the experts 1, 2 and 7
        if asked == "by an operator":
            rank.manager.readvise()
        rank.manager.wait_for_moves()
        assert rank.resident() == [[4, 5, 6]] * LAYERS, "the experts 3, 2 and 1"


def test_a_curve_is_of_the_present_residents():
    rank = Rank(config(warmup_tokens=1))
    for _ in range(9):
        rank.step([[5, 6, 7]])
    rearrange(rank, BACKWARDS)
    assert rank.status()["curve"]["present"] == 1.0
    assert np.isclose(rank.status()["hit_rate"], 8 / 9)
