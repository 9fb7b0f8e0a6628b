"""Replaying traces: what each policy is charged for, and the command that prints it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders.traces import trace

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.replay.baselines import Variant
from sglang_uvm_offload.replay.policies import POLICIES
from sglang_uvm_offload.replay.simulator import DECISION_DELAY_POLLS, Managed, Replay, Workload, replay, serve
from sglang_uvm_offload.replay.whole_experts import WholeExperts
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


def test_a_policy_that_reads_through_pays_each_miss_and_a_cache_pays_it_once():
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
    served = trace([0, 1], [1, 0], [3, 3], [3, 3])
    together = replay(served, "first_n", 0.5, batch=2)
    assert together.hit_rate == 0.0
    assert together.read_bytes_per_step == pytest.approx(4 * MIB), "two tokens on one expert are one activation"


@pytest.mark.slow
def test_the_shipped_policy_is_the_manager_and_learns_the_hot_experts(skewed):
    shipped = replay(skewed, "adaptive", 0.25)
    assert shipped.hit_rate > 0.9
    assert shipped.hit_rate > replay(skewed, "first_n", 0.25).hit_rate + 0.4
    assert shipped.moves_per_step < replay(skewed, "lru", 0.25).moves_per_step / 4
    managed = Managed((3, 16), 4)
    for activated in Workload.of(skewed).warmup:
        managed.step(activated)
    status = rank_status(managed.manager)
    assert status.tokens == 400
    assert status.hit_rate > 0.5


@pytest.mark.slow
def test_a_variant_with_the_shipped_settings_does_as_the_manager_does(skewed):
    workload = Workload.of(skewed, warmup_fraction=0.0)
    managed = serve("it", workload.policy("adaptive", 0.25), workload, 0.25)
    capacity = workload.capacity(0.25)
    policy = WholeExperts(capacity, np.full(3, PAGE_BYTES), np.ones((3, 16), dtype=bool))
    late = DECISION_DELAY_POLLS
    variant = Variant(policy, np.broadcast_to(np.arange(16) < 4, (3, 16)), 1, late)
    assert serve("it", variant, workload, 0.25) == managed
    assert managed.moves_per_step > 0


@pytest.mark.slow
def test_a_server_that_goes_on_keeps_its_residents(skewed):
    """What a benchmark of traffic that changes relies on: a policy can be handed from one workload to the next."""
    workload = Workload.of(skewed)
    policy = workload.policy("adaptive", 0.25)
    serve("first", policy, workload, 0.25)
    then = serve("then", policy, Workload(1, workload.warmup[:0], workload.scored[:50]), 0.25)
    assert then.hit_rate > 0.9
    assert then.per_layer_hit_rate == pytest.approx([then.hit_rate] * 3, abs=0.1)


def seeded(history: np.ndarray | None, workload: Workload) -> Replay:
    """The first 256 steps of ``workload`` from a cold start, after a profile of the activated experts ``history``."""
    capacity = workload.capacity(0.25)
    policy = WholeExperts(capacity, np.full(3, PAGE_BYTES), np.ones((3, 16), dtype=bool))
    if history is not None:
        policy.seed(history.sum(axis=0), len(history), np.zeros((3, 16), dtype=int))
    start = np.broadcast_to(np.arange(16) < 4, (3, 16))
    live = Workload(1, workload.scored[:0], workload.scored[:256])
    return serve("seeded", Variant(policy, start, 1), live, 0.25)


@pytest.mark.slow
def test_a_matching_profile_helps_the_first_steps_and_a_foreign_one_costs_little(skewed):
    workload = Workload.of(skewed)
    cold = seeded(None, workload)
    matching = seeded(workload.warmup, workload)
    foreign = seeded(np.roll(workload.warmup, 8, axis=2), workload)
    assert matching.hit_rate > cold.hit_rate + 0.01
    assert matching.moves_per_step <= cold.moves_per_step
    assert foreign.hit_rate > cold.hit_rate - 0.1
    assert foreign.moves_per_step <= 2 * cold.moves_per_step


@pytest.mark.slow
def test_nothing_beats_belady(skewed):
    best = replay(skewed, "belady", 0.25).hit_rate
    assert all(replay(skewed, policy, 0.25).hit_rate <= best for policy in POLICIES)


@pytest.mark.slow
@pytest.mark.parametrize(("residency", "expected"), [(0.0, 0.0), (1.0, 1.0)])
def test_nothing_and_everything_resident(skewed, residency, expected):
    for policy in ("first_n", "static", "adaptive"):
        result = replay(skewed, policy, residency)
        assert (result.hit_rate, result.moves_per_step) == (expected, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_that_never_route_change_nothing(skewed, policy):
    dense = np.full((len(skewed.ids), 2, skewed.ids.shape[2]), -1)
    with_dense = Trace(np.concatenate([dense, skewed.ids, dense[:, :1]], axis=1), skewed.seq_len, skewed.num_experts)
    alone, beside = replay(skewed, policy, 0.25), replay(with_dense, policy, 0.25)
    assert beside.hit_rate == alone.hit_rate
    assert beside.moves_per_step == alone.moves_per_step
    assert beside.per_layer_hit_rate == [0.0, 0.0, *alone.per_layer_hit_rate, 0.0]


def test_a_trace_in_which_no_layer_routes_is_refused():
    with pytest.raises(ValueError, match="no token uses any expert"):
        replay(Trace(np.full((4, 2, 1), -1), np.array([2, 2]), 4), "adaptive", 0.5)


def test_masked_ids_and_idle_slots_activation_nothing():
    served = Trace(np.array([[[-1]], [[-1]], [[0]]]), np.array([1, 2]), 4)
    result = replay(served, "adaptive", 0.5, batch=3)
    assert result.hit_rate == 1.0


@pytest.fixture
def saved(skewed, tmp_path):
    skewed.save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


@pytest.mark.slow
def test_the_command_prints_one_json_object_a_policy(saved, capsys):
    arguments = ["replay", str(saved), "--residency", "0.25", "--policy", "lru", "--policy", "adaptive", "--json"]
    assert main(arguments) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["policy"] for result in results] == ["lru", "adaptive"]
    for key in [
        "policy",
        "residency",
        "batch",
        "hit_rate",
        "moves_per_step",
        "read_bytes_per_step",
        "moved_bytes_per_step",
        "step_seconds",
        "per_layer_hit_rate",
    ]:
        assert key in results[0]
    assert len(results[0]["per_layer_hit_rate"]) == 3


@pytest.mark.slow
def test_the_command_prints_a_table_of_every_policy(saved, capsys):
    assert main(["replay", str(saved), "--residency", "0.5"]) == 0
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(POLICIES)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--residency", "1.5"], "residency must be 0..1"),
        (["--residency", "0.5", "--batch", "0"], "batch must be at least 1"),
        (["--residency", "0.5", "--link-gbps", "0"], "above 0 GB/s"),
        (["--residency", "0.5", "--warmup-fraction", "1"], "leaves no request"),
    ],
)
def test_what_cannot_be_replayed_says_why(saved, capsys, flags, reason):
    assert main(["replay", str(saved), *flags]) == 2
    assert reason in capsys.readouterr().err


def test_a_file_that_is_no_trace_says_why(tmp_path, capsys):
    (tmp_path / "trace.npz").write_bytes(b"PK not a zip")
    assert main(["replay", str(tmp_path / "trace.npz"), "--residency", "0.5"]) == 2
    assert "cannot replay" in capsys.readouterr().err
