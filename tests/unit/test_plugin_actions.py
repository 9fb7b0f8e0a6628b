"""What an operator may tell a server: which messages are actions, what a server refuses and why, and what a rank does."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from builders.managers import Rank, config

from sglang_uvm_offload.plugin.operate import actions
from sglang_uvm_offload.plugin.operate.actions import (
    KEY,
    Action,
    choices,
    fewest_tokens,
    perform,
    refusal,
    too_few_tokens,
)
from sglang_uvm_offload.residency.status import RankId, rank_status
from sglang_uvm_offload.routing.profile import RoutedModel

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def parallel(monkeypatch):
    state = SimpleNamespace(enable_dp_attention_local_control_broadcast=False)
    monkeypatch.setattr(actions, "get_parallel", lambda: state)
    return state


@pytest.mark.parametrize("action", list(Action))
def test_an_action_is_what_sglang_carries_and_is_understood(action):
    message = action.message()
    assert all(type(value) is int for value in message.values())
    assert Action.of(message) is action


@pytest.mark.parametrize(
    "message",
    [{}, {"pp_max_micro_batch_size": 8}, {KEY: 4}, {KEY: -1}, {KEY: 0.0}, {KEY: True}, {KEY: 0, "pp_max_micro_batch_size": 8}],
)
def test_other_messages_are_sglangs(message):
    assert Action.of(message) is None


@pytest.mark.parametrize(
    "flags",
    [
        {"resident_selection": "first_n"},
        {"resident_selection": "manual", "resident_ids": "1,2,3"},
        {"adapt": "off", "profile": "p"},
    ],
)
@pytest.mark.parametrize("action", [Action.READVISE, Action.PAUSE, Action.RESUME])
def test_residents_that_the_flags_hold_in_place_stay_and_the_flags_are_named(action, flags):
    cfg = config(**flags)
    reason = refusal(action, cfg)
    assert f"--expert-offload-adapt {cfg.adapt} and --expert-offload-resident-selection {cfg.resident_selection}" in reason


def test_ranks_that_learn_of_it_between_different_steps_are_left_alone(parallel):
    """They would wait for one another for ever."""
    parallel.enable_dp_attention_local_control_broadcast = True
    assert "--enable-dp-attention-local-control-broadcast" in refusal(Action.READVISE, config())
    assert refusal(Action.SAVE, config(trace="t.npz")) is None


def test_a_server_without_files_has_nothing_to_save():
    reason = refusal(Action.SAVE, config())
    assert "--expert-offload-profile" in reason
    assert "--expert-offload-config trace" in reason
    assert refusal(Action.SAVE, config(save_profile="p.npz")) is None
    assert refusal(Action.SAVE, config(trace="t.npz")) is None
    assert refusal(Action.SAVE, config(stats="s.json")) is None


def test_a_rank_does_what_it_is_told():
    rank, saved = Rank(config(warmup_tokens=10**6)), []
    savers = [SimpleNamespace(save_now=lambda name=name: saved.append(name)) for name in ("profile", "trace")]
    perform(Action.PAUSE, rank.manager, savers)
    assert rank.manager.paused
    perform(Action.RESUME, rank.manager, savers)
    assert not rank.manager.paused
    rank.step([[5, 6, 7]])
    perform(Action.READVISE, rank.manager, savers)
    assert rank.resident() == [[5, 6, 7]] * 3
    assert saved == []
    perform(Action.SAVE, rank.manager, savers)
    assert saved == ["profile", "trace"]


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(128, 8, 16), (60, 8, 8), (8, None, 8), (0, None, 1)])
def test_residents_are_chosen_from_no_fewer_tokens_than_can_activate_every_expert(experts, top_k, tokens):
    assert fewest_tokens(RoutedModel("m", "M", (0,), experts, top_k)) == tokens


def after(tokens, dp=0, fewest=3, **changes):
    rank = Rank(config(warmup_tokens=10**6))
    status = msgspec.structs.replace(rank_status(rank.manager), rank=RankId(dp), fewest_tokens=fewest, **changes)
    return msgspec.structs.replace(status, tokens_since_choice=tokens)


def test_one_replica_with_enough_tokens_is_enough():
    assert too_few_tokens([after(2), after(3, dp=1)]) is None
    assert "serve 1 more first" in too_few_tokens([after(2), after(1, dp=1)])


def test_each_replica_says_what_it_did():
    before = [after(2), after(9, dp=1)]
    done = choices(before, [after(2), after(0, dp=1, chosen_from_tokens=9)])
    assert done.split("; ") == [
        "DP 0: residents stay: 2 tokens since they were last chosen, 3 needed",
        "DP 1: residents chosen from the routing of 9 tokens",
    ]
