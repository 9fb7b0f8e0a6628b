"""What a replay takes is estimated from above, not by much, and refused where it does not fit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.replay import room
from sglang_uvm_offload.replay.policies import POLICIES
from sglang_uvm_offload.replay.simulator import replay
from sglang_uvm_offload.routing.trace import Trace


def routed(requests: list[int], layers: int = 3, experts: int = 64, k: int = 4) -> Trace:
    ids = np.random.default_rng(0).integers(0, experts, (sum(requests), layers, k))
    return Trace(ids, np.array(requests), experts)


def taken(trace: Trace, policy: str, batch: int = 1) -> int:
    tracemalloc.start()
    replay(trace, policy, 0.5, batch, 0.5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(("requests", "batch"), [([500] * 6, 1), ([1] * 2000, 3), ([900, 10, 10, 10], 4)])
@pytest.mark.parametrize("policy", ["first_n", "belady"])
def test_no_replay_takes_more_than_estimated_or_much_less(requests, batch, policy):
    trace = routed(requests)
    replay(trace, policy, 0.5, batch, 0.5)  # what is imported, and cached, at first
    peak = taken(trace, policy, batch)
    assert peak < room.needed(trace, batch, [policy]) < 12 * peak + (1 << 20)


def test_nor_does_the_policy_that_learns_of_each_expert():
    trace = routed([3, 3], layers=6, experts=256)
    assert taken(trace, "adaptive") < room.needed(trace, 1, ["adaptive"])


@pytest.mark.parametrize("flags", [[], ["--slots"]])
def test_what_does_not_fit_is_refused_before_it_is_allocated(tmp_path, capsys, monkeypatch, flags):
    trace, policies = routed([500, 500]), () if flags else POLICIES
    trace.save(tmp_path / "t.npz")
    need = room.needed(trace, 1, policies)
    monkeypatch.setattr(room, "host_available", lambda: need - 1)
    assert main(["replay", str(tmp_path / "t.npz"), "--residency", "0.5", *flags]) == 2
    (err,) = capsys.readouterr().err.splitlines()
    assert "1000 steps of 3 layers with 64 experts" in err
    assert "host RAM" in err
    monkeypatch.setattr(room, "host_available", lambda: need)
    room.check(trace, 1, policies)
