"""The policies to compare with, on traces small enough to follow by hand."""

import numpy as np
import pytest

from sglang_uvm_offload.replay.baselines import NAMES, make


def trace(*steps, experts=6):
    """``bool[steps, 1, experts]`` from the ids of each step."""
    activated = np.zeros((len(steps), 1, experts), dtype=bool)
    for step, ids in enumerate(steps):
        activated[step, 0, list(ids)] = True
    return activated


def run(name, scored, capacity, warmup=None):
    """(hits, experts read, experts moved) of each step, and the residents of the first layer at the end."""
    warmup = scored[:0] if warmup is None else warmup
    policy = make(name, warmup, scored, np.full(scored.shape[1], capacity))
    for activated in warmup:
        policy.step(activated)
    served = [policy.step(activated) for activated in scored]
    steps = [(int(s.hit.sum()), int(s.read.sum()), int(s.moved.sum())) for s in served]
    return steps, np.flatnonzero(policy.resident[0]).tolist()


WARMUP = trace([3, 4], [3, 4], [3, 5])
RECENT, FREQUENT = trace([0], [0], [0], [1], [1], [2]), trace([0], [0], [0], [0], [0], [1], [2])


@pytest.mark.parametrize(
    ("name", "scored", "warmup", "residents"),
    [
        ("first_n", trace([0, 4], [1, 5]), None, [0, 1]),
        ("static", trace([1, 2], [1, 2], [2, 3]), WARMUP, [3, 4]),
        ("static-oracle", trace([1, 2], [1, 2], [2, 3]), WARMUP, [1, 2]),
        ("lru", trace([0], [1], [0], [2], [1]), None, [1, 2]),
        ("lfu", trace([0], [0], [0], [1], [2], [3], [0]), None, [0, 3]),
        ("lfru", RECENT, None, [1, 2]),
        ("lfu", RECENT, None, [0, 2]),
        ("lfru", FREQUENT, None, [0, 2]),
        ("lru", FREQUENT, None, [1, 2]),
        ("belady", trace([4], [3], [4], [3]), trace([0, 1], [1, 2], [0]), [3, 4]),
    ],
)
def test_each_policy_keeps_what_it_is_named_after(name, scored, warmup, residents):
    assert run(name, scored, 2, warmup)[1] == residents


@pytest.mark.parametrize("name", ["lru", "lfu", "lfru"])
def test_caches_move_each_miss_once_and_keep_what_the_step_uses_however_low_its_priority(name):
    assert run(name, trace([0, 1, 2], [0, 1, 2], [3]), 3)[0] == [(0, 0, 3), (3, 0, 0), (0, 0, 1)]
    # Expert 0 was used far more often and longer ago than 1; both make room before what the step uses does.
    steps, residents = run(name, trace(*[[0]] * 20, [1], [2, 3]), 2)
    assert residents == [2, 3]
    assert steps[-1] == (0, 0, 2)


def test_belady_keeps_what_comes_back_first_and_bypasses_what_does_not():
    steps, _ = run("belady", trace([0], [1], [2], [3], [2], [0], [3]), 2)
    assert steps == [(1, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 0), (0, 1, 0)]


def test_a_step_is_served_as_a_whole_and_where_there_is_no_room_residents_stay_then_lower_ids_come():
    assert run("lru", trace([1, 2], [0, 1, 2]), 2)[0][1] == (2, 0, 1), "0 pushed 1 out before 1 was looked up"
    assert run("lru", trace([4, 5], [1, 2, 4]), 2)[1] == [1, 4]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capacity", [0, 3, 6])
def test_whatever_the_capacity_it_holds(name, capacity):
    rng = np.random.default_rng(0)
    scored = rng.random((50, 4, 6)) < 0.3
    scored[7] = False
    capacities = np.array([capacity, max(capacity - 1, 0), capacity, capacity])
    policy = make(name, scored[:10], scored, capacities)
    for activated in scored:
        served = policy.step(activated)
        assert (policy.resident.sum(axis=1) <= capacities).all()
        assert np.array_equal(served.hit | served.read | served.moved | activated, activated)
        assert (served.hit | served.read | served.moved)[activated].all()
        assert not (served.hit & (served.read | served.moved)).any()
    if capacity == 6:
        assert not policy.step(scored[-1]).read[0].any()


@pytest.mark.parametrize("seed", range(20))
def test_no_policy_hits_more_than_belady(seed):
    """Whoever begins with residents, or warms up."""
    rng = np.random.default_rng(seed)
    steps, capacity = int(rng.integers(1, 60)), int(rng.integers(0, 7))
    warmup, scored = rng.random((2, steps, 3, 6)) < rng.uniform(0, 0.6, (1, 1, 3, 6))
    hits = {name: sum(step[0] for step in run(name, scored, capacity, warmup)[0]) for name in NAMES}
    assert max(hits.values()) == hits["belady"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="static-oracle"):
        make("fifo", trace([0]), trace([0]), np.array([1]))
