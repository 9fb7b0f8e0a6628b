"""What a replay takes is estimated from above, not by much, and refused where it does not fit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.replay import room
from sglang_uvm_offload.replay.policies import POLICIES
from sglang_uvm_offload.replay.simulator import replay
from sglang_uvm_offload.routing.trace import Trace, TraceError


def routed(requests: list[int], layers: int = 3, experts: int = 64, k: int = 4) -> Trace:
    ids = np.random.default_rng(0).integers(0, experts, (sum(requests), layers, k))
    return Trace(ids, np.array(requests), experts)


def taken(work) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(("requests", "batch"), [([500] * 6, 1), ([500] * 6, 4), ([1] * 2000, 3), ([900, 10, 10, 10], 4)])
@pytest.mark.parametrize("policy", ["first_n", "belady"])
def test_no_replay_takes_more_than_estimated_or_much_less(requests, batch, policy):
    trace = routed(requests)
    replay(trace, policy, 0.5, batch, 0.5)  # what is imported, and cached, at first
    peak = taken(lambda: replay(trace, policy, 0.5, batch, 0.5))
    assert peak < room.needed(trace, batch, [policy]) < 12 * peak + (1 << 20)


def test_nor_does_the_policy_that_learns_of_each_expert():
    trace = routed([3, 3], layers=6, experts=256)
    assert taken(lambda: replay(trace, "adaptive", 0.5)) < room.needed(trace, 1, ["adaptive"])


@pytest.mark.parametrize("flags", [[], ["--slots"]])
def test_what_does_not_fit_is_refused_before_it_is_allocated(tmp_path, capsys, monkeypatch, flags):
    path = tmp_path / "t.npz"
    trace = routed([500, 500])
    trace.save(path)
    policies = () if flags else POLICIES
    need = room.needed(trace, 1, policies)
    monkeypatch.setattr(room, "host_available", lambda: need - 1)
    assert main(["replay", str(path), "--residency", "0.5", *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "host RAM" in err
    assert "1000 steps of 3 layers with 64 experts" in err
    monkeypatch.setattr(room, "host_available", lambda: need)
    room.check(trace, 1, policies)


def test_a_trace_of_more_layers_than_any_model_is_refused():
    with pytest.raises(TraceError, match="at most 1024 layers"):
        routed([1], layers=1025)
