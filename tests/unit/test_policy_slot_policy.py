"""The rules of slots: what a miss may evict, what stays, and what the policy learns."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
from builders.law import Law
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_uvm_offload.policy.slot_policy import (
    AGES,
    CLASSES,
    EMPTY,
    LATELY,
    LATELY_SHIFT,
    LONG,
    MAX_EVENTS,
    RATE_BITS,
    TAIL,
    USE,
    VALUE_BITS,
    WHOLE,
    SlotPolicy,
    Tails,
)
from sglang_uvm_offload.replay.baselines import Cache, lru


def policy_of(experts: int, slots: int, layers: int = 1, **arguments: int) -> SlotPolicy:
    return SlotPolicy(np.ones((layers, experts), dtype=bool), slots, **arguments)


def step(policy: SlotPolicy, *ids: int, share: np.ndarray | None = None) -> list[tuple[int, int]]:
    """A step of one layer that uses the experts ``ids``. Returns the fills: (expert, slot)."""
    used = np.zeros(policy.present.shape, dtype=bool)
    used[0, list(ids)] = True
    policy.begin_step()
    resolved = policy.resolve(used, np.full(used.shape, WHOLE) if share is None else share)
    return [(expert, slot) for _, expert, slot in resolved.fills]


def worth(policy: SlotPolicy, value: np.ndarray) -> None:
    """The policy has learned ``value[age, lately, long]``, 0..1 uses in a window, so firmly that a few steps change nothing."""
    policy.events[:] = MAX_EVENTS - 1
    policy.uses[:] = (np.broadcast_to(value, (AGES, LATELY, LONG)).reshape(CLASSES) * 16 * policy.events).astype(np.int64)


def by_age(*value: float) -> np.ndarray:
    """Learned values by age in half octaves of steps; the last one is of all that are older."""
    return np.array([*value, *[value[-1]] * (AGES - len(value))])[:, None, None]


def values(policy: SlotPolicy) -> list[int]:
    """Of each expert of the first layer, after the last step."""
    return ((policy.uses << VALUE_BITS) // policy.events)[policy.classes[0, 0]].tolist()


def run(policy: SlotPolicy, activated: np.ndarray) -> np.ndarray:
    """Hits of each step of ``bool[steps, layers, experts]``."""
    share, hits = np.full(policy.present.shape, WHOLE), []
    for used in activated:
        policy.begin_step()
        hits.append(np.count_nonzero(policy.resolve(used, share).hit))
    return np.array(hits)


def test_misses_fill_free_slots_first_and_hit_from_then_on():
    policy = policy_of(6, 3)
    worth(policy, by_age(0.0))  # a free slot takes what is worth nothing
    assert step(policy, 4, 1) == [(1, 0), (4, 1)]
    assert step(policy, 1, 4) == []
    assert step(policy, 0, 1) == [(0, 2)]
    assert policy.owner.tolist() == [[1, 4, 0]]


def test_an_expert_just_used_evicts_one_used_before_if_nothing_else_is_known():
    policy = policy_of(4, 1)
    assert step(policy, 2) == [(2, 0)]
    step(policy, 3)
    assert step(policy, 3) == []
    assert policy.owner.tolist() == [[3]]


@pytest.mark.parametrize(("just_used", "fills"), [(0.5, [(3, 0)]), (0.4, []), (0.2, [])])
def test_a_miss_is_admitted_only_if_it_is_worth_more_than_the_victim(just_used, fills):
    policy = policy_of(4, 1)
    worth(policy, by_age(just_used, 0.4))
    step(policy, 2)
    assert step(policy, 3) == fills


def test_what_a_step_hits_stays_even_if_it_is_worth_least():
    """Expert 0 is used in each step and worth nothing, as learned here: only a step without it evicts it."""
    value = np.full((AGES, LATELY, LONG), 0.5)
    value[0, -1] = 0.0
    value[0, :-1] = 0.9
    policy = policy_of(4, 2)
    for _ in range(64):
        step(policy, 0)
    step(policy, 0, 1)
    worth(policy, value)
    assert policy.owner.tolist() == [[0, 1]]
    assert step(copy.deepcopy(policy), 0, 2) == [(2, 1)]
    worth(policy, by_age(0.9, 0.5) * (np.arange(LONG) < LONG - 1))
    assert step(policy, 2) == [(2, 0)]


def test_of_equal_misses_the_lower_ids_come_and_of_equal_slots_the_one_used_longest_ago_goes_then_the_lower_one():
    policy = policy_of(8, 3)
    worth(policy, by_age(0.9, 0.1))
    step(policy, 7, 6, 5)
    assert policy.owner.tolist() == [[5, 6, 7]]
    step(policy, 5)
    assert step(policy, 3, 2) == [(2, 1), (3, 2)]
    assert step(policy, 4) == [(4, 0)], "5 was used longer ago than 2 and 3"


def test_the_most_valuable_misses_come_where_not_all_can():
    """Both are used in this step; 3 was used before too."""
    policy = policy_of(6, 1, max_fills=1)
    step(policy, 0, 3)
    step(policy, 3)
    policy.reset()
    value = np.full((AGES, LATELY, LONG), 0.1)
    value[0, 2:] = 0.9
    worth(policy, value)
    for _ in range(6):
        step(policy, 3, share=np.zeros((1, 6), dtype=np.int64))
    assert step(policy, 2, 3) == [(3, 0)]


def test_an_expert_that_is_partly_resident_is_worth_as_much_less():
    policy, share = policy_of(4, 1), np.array([[WHOLE, WHOLE // 4, WHOLE, WHOLE]])
    worth(policy, by_age(0.8, 0.4))
    step(policy, 0)
    assert step(policy, 1, share=share) == []
    assert step(policy, 2, share=share) == [(2, 0)]


def test_a_reset_empties_the_slots_and_keeps_what_was_learned():
    policy, rng = policy_of(8, 3), np.random.default_rng(0)
    run(policy, rng.random((50, 1, 8)) < 0.3)
    before = copy.deepcopy(policy)
    policy.reset()
    assert (policy.slot_of == EMPTY).all()
    assert (policy.owner == EMPTY).all()
    assert policy.now == before.now
    for name in ("events", "uses", "last", "lately", "long", "classes"):
        assert np.array_equal(getattr(policy, name), getattr(before, name)), name
    assert sorted(slot for _, slot in step(policy, 2, 5)) == [0, 1]


def test_layers_resolved_one_by_one_decide_as_all_at_once():
    """A server resolves each layer when it runs, a replay all at once."""
    rng = np.random.default_rng(2)
    activated, share = rng.random((120, 3, 16)) < 0.2, rng.integers(0, WHOLE + 1, (3, 16))
    given_used, given_share = activated.copy(), share.copy()
    whole, by_layer = policy_of(16, 5, layers=3), policy_of(16, 5, layers=3)
    for used in activated:
        whole.begin_step()
        expected = whole.resolve(used, share)
        by_layer.begin_step()
        for layer in range(3):
            one = slice(layer, layer + 1)
            found = by_layer.resolve(used[one], share[one], one)
            assert np.array_equal(found.hit[0], expected.hit[layer])
            assert [(e, s) for _, e, s in found.fills] == [(e, s) for at, e, s in expected.fills if at == layer]
    for name in ("slot_of", "owner", "events", "uses", "classes"):
        assert np.array_equal(getattr(whole, name), getattr(by_layer, name)), name
    assert np.array_equal(activated, given_used)
    assert np.array_equal(share, given_share)


def test_what_lies_behind_a_layers_experts_never_counts():
    activated = np.random.default_rng(3).random((200, 2, 6)) < 0.3
    plain, padded = policy_of(6, 2, layers=2), SlotPolicy(np.arange(9)[None].repeat(2, axis=0) < 6, 2)
    beside = np.zeros((2, 9), dtype=bool)
    for used in activated:
        beside[:, :6] = used
        plain.begin_step()
        padded.begin_step()
        expected = plain.resolve(used, np.full((2, 6), WHOLE))
        found = padded.resolve(beside, np.full((2, 9), WHOLE))
        assert found.fills == expected.fills
    assert np.array_equal(plain.events, padded.events)
    assert np.array_equal(plain.uses, padded.uses)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    slots=st.integers(0, 12),
    most=st.integers(0, 6),
    chance=st.floats(0, 1),
    resets=st.floats(0, 0.2),
)
def test_whatever_the_routing_slots_and_experts_point_at_each_other(seed, slots, most, chance, resets):
    rng = np.random.default_rng(seed)
    policy = policy_of(10, slots, layers=2, max_fills=most)
    for _ in range(40):
        used, share = rng.random((2, 10)) < chance, rng.integers(0, WHOLE + 1, (2, 10)) * (rng.random((2, 10)) < 0.8)
        before, read = policy.slot_of != EMPTY, used
        policy.begin_step()
        if rng.random() < 0.3:
            read = used | (rng.random((2, 10)) < 0.5) if rng.random() < 0.5 else np.zeros_like(used)
            distance = np.where(used, rng.integers(0, TAIL, used.shape), TAIL)
            resolved = policy.resolve_prefill(read, Tails(distance, used * rng.integers(1, 1 << RATE_BITS)), share)
        else:
            resolved = policy.resolve(used, share)
        after = policy.slot_of != EMPTY
        assert np.array_equal(resolved.hit, read & before)
        assert (after.sum(axis=1) <= slots).all()
        assert (after | ~resolved.hit).all(), "what is hit stays"
        for layer in range(2):
            held = [(e, s) for e, s in enumerate(policy.slot_of[layer].tolist()) if s != EMPTY]
            assert sorted(held) == sorted((e, s) for s, e in enumerate(policy.owner[layer].tolist()) if e != EMPTY)
            filled = [e for at, e, _ in resolved.fills if at == layer]
            assert len(filled) <= most
            assert all(used[layer, e] and not before[layer, e] and share[layer, e] and after[layer, e] for e in filled)
        assert np.argwhere(after & ~before).tolist() == sorted([at, e] for at, e, _ in resolved.fills)
        if rng.random() < resets:
            policy.reset()


def prefill(policy: SlotPolicy, *tokens: Sequence[int], ends: Sequence[int] = (), read: bool = False) -> list[tuple[int, int]]:
    """A prefill of one layer, whose ``tokens`` use experts, in place (``read``) or from copies. Returns the fills."""
    ids, experts = np.array(tokens), policy.present.shape[1]
    tails = Tails.of(ids, ends or [len(ids)], experts)
    used = np.isin(np.arange(experts), ids)[None] & read
    policy.begin_step()
    resolved = policy.resolve_prefill(used, Tails(tails.distance[None], tails.rate[None]), np.full(used.shape, WHOLE))
    return [(expert, slot) for _, expert, slot in resolved.fills]


def test_tails_are_the_last_tokens_of_each_request():
    ids = np.array([[3, 0], *[[1, -1]] * (TAIL - 1), [2, 9], [0, 4], [2, 4]])
    tails = Tails.of(ids, [TAIL + 1, TAIL + 3, TAIL + 99], 5)
    assert tails.distance.tolist() == [1, 1, 0, TAIL, 0]
    once = 1 << RATE_BITS - LATELY_SHIFT
    assert tails.rate[[0, 2, 3, 4]].tolist() == [once - once // 16, 2 * once, 0, 2 * once - once // 16]
    many = Tails.of(np.zeros((40, 1), dtype=int), range(1, 41), 2)
    assert many.rate.tolist() == [1 << RATE_BITS, 0], "a use in each step, at most"


def test_a_prefill_fills_slots_with_what_its_tails_use():
    policy = policy_of(8, 3)
    assert prefill(policy, [5, 1], *[[2, 0]] * TAIL, [6, 7], ends=[TAIL + 2, TAIL + 3]) == [(0, 0), (2, 1), (6, 2)]
    assert prefill(policy, [2, 0], [0, 2]) == []


def test_the_tokens_of_a_tail_count_as_decode_steps():
    decoded, prefilled = policy_of(6, 0), policy_of(6, 0)
    for policy in (decoded, prefilled):
        for _ in range(100):
            step(policy, 0)
    for expert in (3, 1, 1, 2):
        step(decoded, expert)
    prefill(prefilled, [3], [1], [1], [2])
    assert (prefilled.now - prefilled.last)[0, :4].tolist() == [1, 1, 0, 3]
    assert (decoded.now - decoded.last)[0, 1:4].tolist() == [1, 0, 3]
    assert prefilled.lately[0, 1:] == pytest.approx(decoded.lately[0, 1:], abs=2)
    assert prefilled.lately[0, 0] > decoded.lately[0, 0], "of what was decoded before nothing is forgotten"
    assert np.array_equal(prefilled.classes[0, 0, 1:] // LONG, decoded.classes[0, 0, 1:] // LONG)
    before = decoded.lately[0, 1]
    prefill(decoded, [1], *[[2]] * 10)
    assert decoded.last[0, 1:3].tolist() == [103, 105], "nothing gets less recent"
    assert decoded.lately[0, 1] == before, "or less frequent"
    early = policy_of(4, 0)
    prefill(early, [1], [2], [3])
    assert early.last.tolist() == [[0, 1, 1, 1]], "a tail is not older than the server"


@pytest.mark.parametrize(("read", "fills"), [(True, []), (False, [(3, 0)])])
def test_what_a_prefill_reads_in_place_stays_and_what_it_reads_from_copies_may_go(read, fills):
    policy = policy_of(4, 1)
    worth(policy, by_age(0.9, 0.5, 0.1))
    step(policy, 2)
    assert prefill(policy, [2], [0], [3], read=read) == fills


def test_a_prefill_is_no_use_of_what_was_expected_before_and_teaches_what_its_tails_are_worth():
    policy = policy_of(4, 0)
    step(policy, 1)
    step(policy, 1)
    before, used = policy.events.copy(), policy.uses.copy()
    prefill(policy, [1], [2])
    expected = policy.classes[0, 0].copy()
    step(policy, 3)
    assert np.array_equal(policy.events, before)
    assert np.array_equal(policy.uses, used)
    step(policy, 2)
    assert np.array_equal(policy.events - before, np.bincount(expected, minlength=CLASSES))
    assert np.array_equal(policy.uses - used, USE * np.bincount(expected[2:], minlength=CLASSES)), "2 and 3 were used"


def test_what_was_never_used_counts_as_used_longest_ago():
    policy = policy_of(4, 0)
    step(policy, 1, 2)
    assert (policy.classes[0, 0] // (LATELY * LONG)).tolist() == [AGES - 1, 0, 0, AGES - 1]
    step(policy, 2)
    assert (policy.classes[0, 0] // (LATELY * LONG)).tolist() == [AGES - 1, 2, 0, AGES - 1]


def misses_of_lru(activated: np.ndarray, slots: int) -> int:
    cache = Cache(activated.shape[1:], np.full(activated.shape[1], slots), lru)
    return sum(int(np.count_nonzero(cache.step(used).moved)) for used in activated)


@pytest.mark.slow
def test_pure_locality_is_served_as_by_lru():
    trace = Law(64, 4).trace(layers=3, requests=2, tokens=1000, seed=0)
    activated = trace.activated(trace.steps(range(2), 1))
    for slots in (8, 16, 32):
        misses = activated.sum() - run(policy_of(64, slots, layers=3), activated).sum()
        assert misses == pytest.approx(misses_of_lru(activated, slots), rel=0.03)


@pytest.mark.slow
def test_static_skew_is_served_as_by_a_list_of_the_hottest_experts():
    rng = np.random.default_rng(6)
    chance = np.minimum(6 * rng.dirichlet(np.full(64, 0.5), size=3), 0.9)
    activated = rng.random((4000, 3, 64)) < chance
    hits, later = run(policy_of(64, 16, layers=3), activated), activated[2000:]
    best = np.sort(chance, axis=1)[:, -16:].sum() / chance.sum()
    reached = hits[2000:].sum() / later.sum()
    recent = 1 - misses_of_lru(later, 16) / later.sum()
    assert reached > best - 0.02
    assert reached > recent + 0.05


def test_a_class_with_many_events_forgets_half_of_them_and_is_worth_the_same():
    policy = policy_of(4, 0)
    worth(policy, np.array(0.375))
    policy.events[:3] = [MAX_EVENTS, MAX_EVENTS - 2, MAX_EVENTS + 6]
    policy.uses[:3] = policy.events[:3] * 6
    before = (policy.uses << VALUE_BITS) // policy.events
    policy.begin_step()
    assert policy.events[:3].tolist() == [MAX_EVENTS // 2, MAX_EVENTS - 2, MAX_EVENTS // 2 + 3]
    assert policy.uses[:3].tolist() == [6 * events for events in policy.events[:3]]
    assert np.array_equal((policy.uses << VALUE_BITS) // policy.events, before)
