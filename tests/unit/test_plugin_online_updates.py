"""Online updates of the weights: residents of a warm-up are chosen anew, and files stay those of one checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from builders.managers import Rank, config

from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Span
from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.rank import online_updates
from sglang_uvm_offload.plugin.rank.online_updates import UPDATES, OnlineUpdates

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def parallel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(enable_dp_attention_local_control_broadcast=False)
    monkeypatch.setattr(online_updates, "get_parallel", lambda: state)
    return state


def steps(rank: Rank, ids: list[int], count: int) -> None:
    for _ in range(count):
        rank.step([ids])


def test_residents_of_a_warm_up_are_chosen_anew_from_the_new_weights_alone():
    rank = Rank(config(warmup_tokens=8))
    steps(rank, [0, 6, 7], 100)
    assert rank.resident() == [[0, 6, 7]] * 3
    rank.manager.weights_updated()
    steps(rank, [1, 4, 5], 8)
    assert rank.resident() == [[0, 6, 7]] * 3
    steps(rank, [1, 4, 5], 1)
    assert rank.resident() == [[1, 4, 5]] * 3
    steps(rank, [0, 6, 7], 100)
    assert rank.resident() == [[1, 4, 5]] * 3, "once, until the next update"


class Server:
    """What the hooks are of, with a saver that notes when it saves."""

    def __init__(self, outcome: Any = True, manager: Any = None):
        self.events: list[str] = []
        self.outcome = outcome
        self.savers = [Saver("profile", lambda wait: lambda: self.events.append("saved"))]
        self.hooks: dict[str, Any] = {}
        noting: Any = SimpleNamespace(weights_updated=lambda: self.events.append("chosen anew"))
        OnlineUpdates(lambda: manager or noting, self.savers, lambda: "/models/a").install(
            lambda target, hook, kind: self.hooks.update({target.rpartition("_")[2]: hook})
        )

    def update(self, source: str, **request: Any) -> Any:
        def original(updater: Any, asked: Any) -> Any:
            self.events.append("updated")
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return SimpleNamespace(success=self.outcome)

        return self.hooks[source](original, None, SimpleNamespace(**request))


def test_another_checkpoint_ends_saving_with_what_was_counted_before_it(caplog):
    server = Server()
    server.update("disk", model_path="/models/b")
    assert server.events == ["saved", "updated", "chosen anew"]
    assert server.savers == []
    assert "no longer saving the profile, which belongs to the checkpoint before /models/b" in caplog.text


@pytest.mark.parametrize("source", [target.rpartition("_")[2] for target in UPDATES])
def test_new_weights_of_the_same_checkpoint_end_no_saving(source):
    server = Server()
    server.update(source, **({"model_path": "/models/a"} if source == "disk" else {}))
    assert server.events == ["updated", "chosen anew"]
    assert len(server.savers) == 1


def test_an_update_that_fails_counts_as_one_because_it_may_have_succeeded_on_peers():
    """They would wait for this rank when the next warm-up ends."""
    server = Server(outcome=False)
    assert not server.update("tensor").success
    assert server.events == ["updated", "chosen anew"]


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_rank_whose_update_fails_chooses_residents_before_the_same_step_as_its_peers(succeeds):
    choices: list[int] = []

    def broadcast_decision(decide: Callable[[], Any]) -> Any:
        choices.append(rank.manager.tokens)
        return decide()

    rank = Rank(config(warmup_tokens=8), broadcast_decision=broadcast_decision)
    server = Server(succeeds, rank.manager)
    steps(rank, [0, 6, 7], 10)
    server.update("tensor")
    steps(rank, [1, 4, 5], 10)
    assert choices == [8, 18]


def test_ranks_that_learn_of_it_between_different_steps_keep_their_residents(parallel):
    """They would choose before different steps, and wait for one another for ever."""
    parallel.enable_dp_attention_local_control_broadcast = True
    server = Server()
    assert server.update("disk", model_path="/models/a").success
    assert server.events == ["updated"]


def test_a_fault_of_memory_ends_the_server_with_its_reason(monkeypatch):
    ended: list[str] = []

    def end(message: str) -> None:
        ended.append(message)
        raise SystemExit

    monkeypatch.setattr(enforce, "end", end)
    server = Server(ManagedMemoryError("allocate", "w13", Span(0, 8), "no host RAM"))
    with pytest.raises(SystemExit):
        server.update("disk", model_path="/models/a")
    assert "a weight update failed" in ended[0]
    assert "no host RAM" in ended[0]
