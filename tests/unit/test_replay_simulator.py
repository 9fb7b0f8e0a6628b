"""Replaying traces: what each policy is charged for."""

from __future__ import annotations

import numpy as np
import pytest
from builders.traces import trace

from sglang_uvm_offload.replay.policies import POLICIES
from sglang_uvm_offload.replay.simulator import Managed, Workload, replay, serve
from sglang_uvm_offload.residency.status import rank_status
from sglang_uvm_offload.routing.trace import Trace

MIB = 1 << 20


@pytest.fixture(scope="module")
def skewed() -> Trace:
    """Two requests of 400 tokens in 3 layers of 16 experts, of which each layer uses its own four nearly always."""
    rng = np.random.default_rng(0)
    hot = np.stack([rng.permutation(16)[:4] + 0 for _ in range(3)])
    picks = hot[:, rng.integers(0, 4, (800, 2))].transpose(1, 0, 2)
    stray = rng.random(picks.shape) < 0.05
    picks = np.where(stray, rng.integers(0, 16, picks.shape), picks)
    return Trace(picks, np.array([400, 400]), 16)


def test_a_policy_that_reads_in_place_pays_each_miss_and_a_cache_pays_it_once():
    served = trace([0], [2, 2, 2, 2])
    fixed = replay(served, "first_n", 0.5, expert_bytes=MIB, link_gbps=1)
    assert (fixed.hit_rate, fixed.moves_per_step, fixed.read_bytes_per_step) == (0.0, 0.0, MIB)
    assert fixed.step_seconds == pytest.approx(MIB / 1e9)
    cache = replay(served, "lru", 0.5, expert_bytes=MIB)
    assert (cache.hit_rate, cache.moves_per_step, cache.read_bytes_per_step) == (0.75, 0.25, 0.0)
    assert cache.moved_bytes_per_step == MIB / 4


def test_the_first_part_warms_up_and_is_not_scored():
    served = trace([2, 2], [2, 2])
    assert replay(served, "lru", 0.25).hit_rate == 1.0
    assert replay(served, "lru", 0.25, warmup_fraction=0.0).hit_rate == 0.75


def test_requests_that_run_together_share_a_step():
    together = replay(trace([0, 1], [1, 0], [3, 3], [3, 3]), "first_n", 0.5, batch=2)
    assert together.hit_rate == 0.0
    assert together.read_bytes_per_step == pytest.approx(4 * MIB), "two tokens on one expert are one activation"


@pytest.mark.slow
def test_the_shipped_policy_is_the_manager_and_learns_the_hot_experts(skewed):
    results = {policy: replay(skewed, policy, 0.25) for policy in POLICIES}
    shipped = results["adaptive"]
    assert shipped.hit_rate > 0.9
    assert shipped.hit_rate > results["first_n"].hit_rate + 0.4
    assert shipped.moves_per_step < results["lru"].moves_per_step / 4
    assert max(result.hit_rate for result in results.values()) == results["belady"].hit_rate
    managed = Managed((3, 16), 4)
    for activated in Workload.of(skewed).warmup:
        managed.step(activated)
    status = rank_status(managed.manager)
    assert status.tokens == 400
    assert status.hit_rate > 0.5


@pytest.mark.slow
def test_a_policy_can_be_handed_from_one_workload_to_the_next(skewed):
    workload = Workload.of(skewed)
    policy = workload.policy("adaptive", 0.25)
    serve("first", policy, workload, 0.25)
    then = serve("then", policy, Workload(1, workload.warmup[:0], workload.scored[:50]), 0.25)
    assert then.hit_rate > 0.9
    assert then.per_layer_hit_rate == pytest.approx([then.hit_rate] * 3, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("residency", "expected"), [(0.0, 0.0), (1.0, 1.0)])
def test_nothing_and_everything_resident(skewed, residency, expected):
    for policy in ("first_n", "static", "adaptive"):
        result = replay(skewed, policy, residency)
        assert (result.hit_rate, result.moves_per_step) == (expected, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "slots", "adaptive"])
def test_layers_that_never_route_change_nothing(skewed, policy):
    dense = np.full((len(skewed.ids), 2, skewed.ids.shape[2]), -1)
    with_dense = Trace(np.concatenate([dense, skewed.ids, dense[:, :1]], axis=1), skewed.seq_len, skewed.num_experts)
    alone, beside = replay(skewed, policy, 0.25), replay(with_dense, policy, 0.25)
    assert (beside.hit_rate, beside.moves_per_step) == (alone.hit_rate, alone.moves_per_step)
    assert beside.per_layer_hit_rate == [0.0, 0.0, *alone.per_layer_hit_rate, 0.0]


def test_masked_ids_and_idle_slots_activate_nothing():
    served = Trace(np.array([[[-1]], [[-1]], [[0]]]), np.array([1, 2]), 4)
    assert replay(served, "adaptive", 0.5, batch=3).hit_rate == 1.0
    with pytest.raises(ValueError, match="no token uses any expert"):
        replay(Trace(np.full((4, 2, 1), -1), np.array([2, 2]), 4), "adaptive", 0.5)
