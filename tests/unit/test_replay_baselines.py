"""The policies to compare with, on traces small enough to follow by hand."""

import numpy as np
import pytest

from sglang_uvm_offload.policy.adaptive import Moves
from sglang_uvm_offload.replay import baselines
from sglang_uvm_offload.replay.baselines import NAMES, Variant, make


def trace(*steps, experts=6):
    """``bool[steps, 1, experts]`` from the ids of each step."""
    activated = np.zeros((len(steps), 1, experts), dtype=bool)
    for step, ids in enumerate(steps):
        activated[step, 0, list(ids)] = True
    return activated


def run(name, scored, capacity, warmup=None):
    """(hits, experts read, experts moved) of each step, and the policy."""
    warmup = scored[:0] if warmup is None else warmup
    policy = make(name, warmup, scored, np.full(scored.shape[1], capacity))
    for activated in warmup:
        policy.step(activated)
    served = [policy.step(activated) for activated in scored]
    return [(int(s.hit.sum()), int(s.read.sum()), int(s.moved.sum())) for s in served], policy


def ids(resident):
    return np.flatnonzero(resident[0]).tolist()


def test_first_n_is_the_first_ids_and_reads_the_others():
    steps, policy = run("first_n", trace([0, 4], [1, 5]), 2)
    assert steps == [(1, 1, 0), (1, 1, 0)]
    assert ids(policy.resident) == [0, 1]


def test_static_knows_the_warm_up_and_the_oracle_the_scored_part():
    warmup, scored = trace([3, 4], [3, 4], [3, 5]), trace([1, 2], [1, 2], [2, 3])
    assert ids(run("static", scored, 2, warmup)[1].resident) == [3, 4]
    assert ids(run("static-oracle", scored, 2, warmup)[1].resident) == [1, 2]


def test_lru_drops_what_was_used_longest_ago():
    steps, policy = run("lru", trace([0], [1], [0], [2], [1]), 2)
    assert [s[0] for s in steps] == [0, 0, 1, 0, 0]
    assert ids(policy.resident) == [1, 2]


def test_lfu_keeps_what_was_used_most():
    steps, policy = run("lfu", trace([0], [0], [0], [1], [2], [3], [0]), 2)
    assert [s[0] for s in steps] == [0, 1, 1, 0, 0, 0, 1]
    assert ids(policy.resident) == [0, 3]


def test_lfru_weighs_uses_by_age():
    recent, frequent = trace([0], [0], [0], [1], [1], [2]), trace([0], [0], [0], [0], [0], [1], [2])
    assert ids(run("lfru", recent, 2)[1].resident) == [1, 2]
    assert ids(run("lfu", recent, 2)[1].resident) == [0, 2]
    assert ids(run("lfru", frequent, 2)[1].resident) == [0, 2]
    assert ids(run("lru", frequent, 2)[1].resident) == [1, 2]


@pytest.mark.parametrize("name", ["lru", "lfu", "lfru"])
def test_what_a_step_uses_stays_however_low_its_priority(name):
    """Expert 0 was used far more often and longer ago than 1; both make room before what the step uses does."""
    steps, policy = run(name, trace(*[[0]] * 20, [1], [2, 3]), 2)
    assert ids(policy.resident) == [2, 3]
    assert steps[-1] == (0, 0, 2)


def test_belady_keeps_what_comes_back_first_and_bypasses_what_does_not():
    steps, _ = run("belady", trace([0], [1], [2], [3], [2], [0], [3]), 2)
    assert steps == [(1, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 0), (0, 1, 0)]


def test_belady_holds_through_the_warm_up_what_the_scored_part_needs_first():
    steps, policy = run("belady", trace([4], [3], [4], [3]), 2, warmup=trace([0, 1], [1, 2], [0]))
    assert steps == [(1, 0, 0)] * 4
    assert ids(policy.resident) == [3, 4]


def test_caches_move_each_miss_once_and_read_nothing_through():
    for name in ("lru", "lfu", "lfru"):
        steps, _ = run(name, trace([0, 1, 2], [0, 1, 2], [3]), 3)
        assert steps == [(0, 0, 3), (3, 0, 0), (0, 0, 1)]


def test_a_step_is_served_as_a_whole():
    """Were experts replaced while the step runs, 0 would push 1 out before 1 is looked up."""
    steps, _ = run("lru", trace([1, 2], [0, 1, 2]), 2)
    assert steps[1] == (2, 0, 1)


def test_where_a_step_uses_more_than_there_is_room_for_residents_stay_then_lower_ids_come():
    _, policy = run("lru", trace([4, 5], [1, 2, 4]), 2)
    assert ids(policy.resident) == [1, 4]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capacity", [0, 1, 3, 6])
def test_whatever_the_capacity_it_holds(name, capacity):
    rng = np.random.default_rng(0)
    scored = rng.random((50, 4, 6)) < 0.3
    scored[7] = False
    policy = make(name, scored[:10], scored, np.full(4, capacity))
    for activated in scored:
        served = policy.step(activated)
        assert (policy.resident.sum(axis=1) <= capacity).all()
        assert (served.hit | served.read | served.moved)[activated].all()
        assert not (served.hit & (served.read | served.moved)).any()
        assert not (served.hit | served.read | served.moved)[~activated].any()
    if capacity == 6:
        assert not policy.step(scored[-1]).read.any()


def hits(name, scored, capacity, warmup):
    return sum(step[0] for step in run(name, scored, capacity, warmup)[0])


@pytest.mark.parametrize("seed", range(40))
def test_no_policy_hits_more_than_belady(seed):
    """Whoever begins with residents, or warms up."""
    rng = np.random.default_rng(seed)
    steps, capacity = int(rng.integers(1, 60)), int(rng.integers(0, 7))
    warmup, scored = rng.random((2, steps, 3, 6)) < rng.uniform(0, 0.6, (1, 1, 3, 6))
    bound = hits("belady", scored, capacity, warmup)
    assert all(hits(name, scored, capacity, warmup) <= bound for name in NAMES)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="static-oracle"):
        make("fifo", trace([0]), trace([0]), np.array([1]))


def test_layers_may_have_different_capacities():
    scored = np.ones((3, 2, 4), dtype=bool)
    policy = make("lru", scored, scored, np.array([1, 3]))
    policy.step(scored[0])
    assert policy.resident.sum(axis=1).tolist() == [1, 3]
    assert isinstance(policy, baselines.Cache)


class Notes:
    """Stands for the policy: notes what it is shown, and wants the first expert that it was last shown."""

    def __init__(self):
        self.seen = []

    def observe(self, activations, steps):
        self.seen.append((activations[0].tolist(), steps))

    def decide(self, resident):
        wanted = np.arange(resident.shape[1])[None] == np.argmax(self.seen[-1][0])
        return Moves(wanted & ~resident, resident & ~wanted)


def test_a_variant_shows_the_policy_whole_intervals_as_late_as_asked():
    shown = []
    for late in (0, 2, 3):
        notes = Notes()
        variant = Variant(notes, np.zeros((1, 3), dtype=bool), interval=2, late=late)
        for activated in trace([0], [1], [1], [2], [2], [0], [0], experts=3):
            variant.step(activated)
        shown.append(notes.seen)
    whole = [([1, 1, 0], 2), ([0, 1, 1], 2), ([1, 0, 1], 2)]
    assert shown[0] == whole
    assert shown[1] == whole[:2]
    assert shown[2] == [([1, 0, 0], 1), ([0, 2, 0], 2)]


def test_a_variant_moves_before_it_serves():
    variant = Variant(Notes(), np.zeros((1, 3), dtype=bool), interval=1)
    steps = [variant.step(activated) for activated in trace([1], [1], [2], experts=3)]
    assert [(int(s.hit.sum()), int(s.read.sum()), int(s.moved.sum())) for s in steps] == [(0, 1, 0), (1, 0, 1), (0, 1, 0)]
