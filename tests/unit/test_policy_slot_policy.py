"""The rules of slots that layers share: what a miss may evict, what stays, and what the policy learns."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

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
    NOT_HELD,
    RATE_BITS,
    TAIL,
    USE,
    VALUE_BITS,
    WHOLE,
    SlotPolicy,
    SlotPool,
    Tails,
    worth_of,
)


def policy_of(experts: int, slots: int, layers: int = 1, **arguments: int) -> SlotPolicy:
    """All layers share the ``slots``."""
    return SlotPolicy(np.ones((layers, experts), dtype=bool), [SlotPool(range(layers), slots)], **arguments)


def held(policy: SlotPolicy, layer: int = 0) -> dict[int, int]:
    """The slot of each expert that has one."""
    return {expert: slot for expert, slot in enumerate(policy.slot_of[layer].tolist()) if slot != EMPTY}


def resolve(policy: SlotPolicy, layer: int, *ids: int) -> list[tuple[int, int]]:
    """``layer`` alone uses the experts ``ids``. Returns the fills: (expert, slot)."""
    used = np.isin(np.arange(policy.present.shape[1]), ids)[None]
    resolved = policy.resolve(used, np.full(used.shape, WHOLE), slice(layer, layer + 1))
    return [(expert, slot) for _, expert, slot in resolved.fills]


def step_of_layers(policy: SlotPolicy, *ids: Sequence[int]) -> list[list[tuple[int, int]]]:
    """A step whose layers use the experts ``ids``, each its own. Returns the fills of each layer."""
    policy.begin_step()
    return [resolve(policy, layer, *each) for layer, each in enumerate(ids)]


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
    """The value of each expert of the first layer, after the last step."""
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
    assert held(policy) == {1: 0, 4: 1, 0: 2}


def test_an_expert_just_used_evicts_one_used_before_if_nothing_else_is_known():
    policy = policy_of(4, 1)
    assert step(policy, 2) == [(2, 0)]
    step(policy, 3)
    assert step(policy, 3) == []
    assert held(policy) == {3: 0}


@pytest.mark.parametrize(("just_used", "fills"), [(0.5, [(3, 0)]), (0.405, []), (0.4, []), (0.2, [])])
def test_a_miss_is_admitted_only_if_it_is_worth_more_than_the_victim(just_used, fills):
    """By more than a step of worth, so .405 is as .4."""
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
    assert held(policy) == {0: 0, 1: 1}
    assert step(copy.deepcopy(policy), 0, 2) == [(2, 1)]
    worth(policy, by_age(0.9, 0.5) * (np.arange(LONG) < LONG - 1))
    assert step(policy, 2) == [(2, 0)]


def test_of_equal_misses_the_lower_ids_come_and_of_equal_victims_the_lower_ids_go():
    policy = policy_of(8, 3)
    worth(policy, by_age(0.9, 0.1))
    step(policy, 7, 6, 5)
    assert held(policy) == {5: 0, 6: 1, 7: 2}
    step(policy, 5)
    assert step(policy, 3, 2) == [(2, 0), (3, 1)], "5 was used later than 6 and 7, and is worth as much"
    assert step(policy, 4) == [(4, 0)]


def test_free_slots_are_handed_out_in_order_to_whichever_layer_misses():
    policy = policy_of(8, 5, layers=3)
    assert step_of_layers(policy, [3], [], [6, 1]) == [[(3, 0)], [], [(1, 1), (6, 2)]]
    assert step_of_layers(policy, [], [0], []) == [[], [(0, 3)], []]


def test_of_equal_worth_the_layer_itself_gives_way_first_then_those_resolved_before_it():
    """In a ring: what was resolved last is used again after all others."""
    policy = policy_of(8, 5, layers=4)
    worth(policy, by_age(0.9, 0.1))
    step_of_layers(policy, [7], [2, 1], [6], [0])
    step_of_layers(policy, [], [], [], [])
    policy.begin_step()
    assert resolve(copy.deepcopy(policy), 1, 5) == [(5, 1)]
    assert resolve(copy.deepcopy(policy), 1, 5, 6, 3) == [(3, 1), (5, 2), (6, 0)], "1 and 2 of its own, then 7 of layer 0"
    fills = resolve(policy, 1, 0, 3, 4, 5, 6, 7)
    assert fills == [(0, 1), (3, 2), (4, 0), (5, 4), (6, 3)], "then layer 3, then layer 2"
    assert [held(policy, layer) for layer in range(4)] == [{}, {0: 1, 3: 2, 4: 0, 5: 4, 6: 3}, {}, {}]


def test_what_is_worth_less_goes_first_wherever_it_is():
    """By how long ago it was used: layer 2 has what goes first, then layer 0, and the layer itself comes last."""
    policy = policy_of(8, 4, layers=3)
    worth(policy, by_age(0.9, 0.9, 0.5, 0.3, 0.1))
    for ids in ([[], [], [4]], [[], [], []], [[5], [], []], [[], [3, 2], []]):
        step_of_layers(policy, *ids)
    assert [held(policy, layer) for layer in range(3)] == [{5: 1}, {2: 2, 3: 3}, {4: 0}]
    policy.begin_step()
    resolve(policy, 0)
    assert resolve(policy, 1, 6, 7) == [(6, 0), (7, 1)]
    assert [held(policy, layer) for layer in range(3)] == [{}, {2: 2, 3: 3, 6: 0, 7: 1}, {}]


def test_an_expert_is_worth_what_it_was_when_its_layer_was_resolved():
    """In the second step layer 1 was not resolved yet, so that its expert is worth as much as the miss; in the third less."""
    policy = policy_of(4, 2, layers=2)
    worth(policy, by_age(0.9, 0.1))
    assert step_of_layers(policy, [0], [1]) == [[(0, 0)], [(1, 1)]]
    assert step_of_layers(policy, [0, 2], []) == [[], []]
    assert step_of_layers(policy, [0, 2], []) == [[(2, 1)], []]


def test_what_another_layer_has_read_in_this_step_may_go():
    """What is used in each step is worth nothing, as learned here."""
    policy = policy_of(4, 2, layers=2)
    for _ in range(64):
        step_of_layers(policy, [0], [0])
    value = np.full((AGES, LATELY, LONG), 0.9)
    value[:, -1] = 0.0
    worth(policy, value)
    assert step_of_layers(policy, [0], [0, 3]) == [[], [(3, 0)]]
    assert [held(policy, layer) for layer in (0, 1)] == [{}, {0: 1, 3: 0}]


def test_what_an_earlier_layer_evicts_is_a_miss_in_the_same_step():
    policy = policy_of(4, 1, layers=2)
    worth(policy, by_age(0.9, 0.1))
    step_of_layers(policy, [], [1])
    step_of_layers(policy, [], [])
    used = np.array([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=bool)
    policy.begin_step()
    resolved = policy.resolve(used, np.full(used.shape, WHOLE))
    assert not resolved.hit.any()
    assert resolved.fills == [(0, 0, 0)]


def test_pools_neither_take_nor_number_each_others_slots():
    """Layers 0 and 2 share slots, layer 3 has its own, and layer 1 none."""
    policy = SlotPolicy(np.ones((4, 6), dtype=bool), [SlotPool([0, 2], 2), SlotPool([3], 1)])
    worth(policy, by_age(0.9, 0.1))
    ids = [[1], [2], [3, 4], [5]]
    assert step_of_layers(policy, *ids) == [[(1, 0)], [], [(3, 1)], [(5, 0)]]
    step_of_layers(policy, [], [], [], [])
    assert step_of_layers(policy, [], [], [2, 3, 4], [0]) == [[], [], [(2, 0)], [(0, 0)]]
    assert [held(policy, layer) for layer in range(4)] == [{}, {}, {2: 0, 3: 1}, {0: 0}]


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
    assert (policy.worth[0] == NOT_HELD).all()
    assert policy.now == before.now
    for name in ("events", "uses", "last", "lately", "long", "classes"):
        assert np.array_equal(getattr(policy, name), getattr(before, name)), name
    assert step(policy, 2, 5) == [(2, 0), (5, 1)]


def test_layers_resolved_one_by_one_decide_as_all_at_once():
    """A server resolves each layer when it runs, a replay all at once."""
    rng = np.random.default_rng(2)
    activated, share = rng.random((120, 3, 16)) < 0.2, rng.integers(0, WHOLE + 1, (3, 16))
    given_used, given_share = activated.copy(), share.copy()
    whole, by_layer = policy_of(16, 15, layers=3), policy_of(16, 15, layers=3)
    for used in activated:
        whole.begin_step()
        expected = whole.resolve(used, share)
        by_layer.begin_step()
        for layer in range(3):
            one = slice(layer, layer + 1)
            found = by_layer.resolve(used[one], share[one], one)
            assert np.array_equal(found.hit[0], expected.hit[layer])
            assert [(e, s) for _, e, s in found.fills] == [(e, s) for at, e, s in expected.fills if at == layer]
    for name in ("slot_of", "worth", "events", "uses", "classes"):
        assert np.array_equal(getattr(whole, name), getattr(by_layer, name)), name
    assert np.array_equal(activated, given_used)
    assert np.array_equal(share, given_share)


def test_what_lies_behind_a_layers_experts_never_counts():
    activated = np.random.default_rng(3).random((200, 2, 6)) < 0.3
    plain, padded = policy_of(6, 4, layers=2), SlotPolicy(np.arange(9)[None].repeat(2, axis=0) < 6, [SlotPool([0, 1], 4)])
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
    slots=st.tuples(st.integers(0, 24), st.integers(0, 12)),
    most=st.integers(0, 6),
    chance=st.floats(0, 1),
    resets=st.floats(0, 0.2),
)
def test_whatever_the_routing_each_slot_holds_the_expert_that_it_was_filled_with(seed, slots, most, chance, resets):
    rng, pools = np.random.default_rng(seed), [SlotPool([0, 2, 4], slots[0]), SlotPool([3], slots[1])]
    policy = SlotPolicy(np.ones((5, 10), dtype=bool), pools, most)
    of_layer = {layer: pool for pool, each in enumerate(pools) for layer in each.layers}
    filled: list[dict[int, tuple[int, int]]] = [{}, {}]
    for _ in range(40):
        share = rng.integers(0, WHOLE + 1, (5, 10)) * (rng.random((5, 10)) < 0.8)
        prefills, brings = rng.random() < 0.3, rng.random() < 0.3
        policy.begin_step()
        for layer in range(5):
            if brings and layer in of_layer:
                beside, had = rng.choice([None, 0, 2, 3]), policy.slot_of.copy()
                new = policy.bring(layer, share[layer], beside)
                missing = (share[layer] > 0) & (had[layer] == EMPTY)
                assert {expert for expert, _ in new} <= set(np.flatnonzero(missing).tolist())
                assert (policy.slot_of[layer][had[layer] != EMPTY] == had[layer][had[layer] != EMPTY]).all()
                if beside not in (None, layer):
                    assert np.array_equal(policy.slot_of[beside], had[beside])
                may_go = [other for other in pools[of_layer[layer]].layers if other not in (layer, beside)]
                free = slots[of_layer[layer]] - (had[list(pools[of_layer[layer]].layers)] != EMPTY).sum()
                assert len(new) == min(missing.sum(), free + (had[may_go] != EMPTY).sum())
                for expert, slot in new:
                    filled[of_layer[layer]][slot] = (layer, expert)
            one, used, before = slice(layer, layer + 1), rng.random((1, 10)) < chance, policy.slot_of != EMPTY
            read = used
            if prefills:
                read = used | (rng.random((1, 10)) < 0.5) if rng.random() < 0.5 else np.zeros_like(used)
                distance = np.where(used, rng.integers(0, TAIL, used.shape), TAIL)
                tails = Tails(distance, used * rng.integers(1, 1 << RATE_BITS))
                resolved = policy.resolve_prefill(read, tails, share[one], one, fill=not brings)
            else:
                resolved = policy.resolve(used, share[one], one, fill=not brings)
            after = policy.slot_of != EMPTY
            assert np.array_equal(resolved.hit, read & before[one])
            assert (after[one] | ~resolved.hit).all(), "what is hit stays"
            assert len(resolved.fills) <= (0 if brings else most)
            for _, expert, slot in resolved.fills:
                assert used[0, expert]
                assert share[layer, expert]
                assert not before[layer, expert]
                filled[of_layer[layer]][slot] = (layer, expert)
            new = [(at, expert) for at, expert in np.argwhere(after & ~before).tolist()]
            assert new == sorted((layer, expert) for _, expert, _ in resolved.fills)
        for pool, each in enumerate(pools):
            has = [(slot, (layer, e)) for layer in each.layers for e, slot in held(policy, layer).items()]
            assert sorted(has) == sorted(filled[pool].items())
            assert {slot for slot, _ in has} == set(range(len(has))), "in order, and none is given up"
            assert len(has) <= each.slots
            assert np.array_equal(policy.worth[pool] != NOT_HELD, policy.slot_of[list(each.layers)] != EMPTY)
        if rng.random() < resets:
            policy.reset()
            filled = [{}, {}]
    assert not held(policy, 1)


def test_worth_is_a_byte_on_a_logarithmic_scale():
    worths = worth_of(np.arange(1 << 21)).astype(int)
    assert (np.diff(worths) >= 0).all()
    assert worths[-1] < NOT_HELD
    values = np.arange(64, 1 << 20)
    assert (worths[2 * values + 1] == worths[values] + 8).all(), "eight steps in an octave"
    assert np.diff(np.unique(worths[values])).max() == 1


def prefill(
    policy: SlotPolicy, *tokens: Sequence[int], ends: Sequence[int] = (), read: bool = False, fill: bool = True
) -> list[tuple[int, int]]:
    """A prefill of one layer, whose ``tokens`` use experts, in place (``read``) or from copies. Returns the fills."""
    ids, experts = np.array(tokens), policy.present.shape[1]
    tails = Tails.of(ids, list(pairwise([0, *(ends or [len(ids)])])), experts)
    used = np.isin(np.arange(experts), ids)[None] & read
    policy.begin_step()
    resolved = policy.resolve_prefill(
        used, Tails(tails.distance[None], tails.rate[None]), np.full(used.shape, WHOLE), fill=fill
    )
    return [(expert, slot) for _, expert, slot in resolved.fills]


def test_tails_are_the_last_tokens_of_each_request():
    ids = np.array([[3, 0], *[[1, -1]] * (TAIL - 1), [2, 9], [0, 4], [2, 4]])
    tails = Tails.of(ids, [(0, TAIL + 1), (TAIL + 1, TAIL + 3), (TAIL + 3, TAIL + 99)], 5)
    assert tails.distance.tolist() == [1, 1, 0, TAIL, 0]
    once = 1 << RATE_BITS - LATELY_SHIFT
    assert tails.rate[[0, 2, 3, 4]].tolist() == [once - once // 16, 2 * once, 0, 2 * once - once // 16]
    many = Tails.of(np.zeros((40, 1), dtype=int), list(pairwise(range(41))), 2)
    assert many.rate.tolist() == [1 << RATE_BITS, 0], "a use in each step, at most"
    short = Tails.of(np.array([[0], [1], [2], [3]]), [(0, 1), (3, 4)], 5)
    assert short.distance.tolist() == [0, TAIL, TAIL, 0, TAIL], "the rows between them are of a request that goes on"


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


@pytest.mark.parametrize("prefills", [False, True])
def test_what_would_be_read_again_in_place_comes_first_and_takes_a_slot_from_what_is_worth_more(prefills):
    policy, share = policy_of(6, 2), np.full((1, 6), WHOLE)
    for _ in range(30):
        step(policy, 0, 1)
    assert step(policy, 2, 0, 1) == [], "worth less than both"
    policy.begin_step()
    used = np.isin(np.arange(6), [0, 3, 4])[None]
    again = np.isin(np.arange(6), [4])[None]
    if prefills:
        nothing = Tails(np.full((1, 6), TAIL), np.zeros((1, 6), dtype=int))
        resolved = policy.resolve_prefill(used, nothing, share, again=again)
    else:
        resolved = policy.resolve(used, share, again=again)
    assert resolved.fills == [(0, 4, 1)], "0 is read by this step, and 3 is worth too little"
    policy.begin_step()
    assert [expert for _, expert, _ in policy.resolve(used, share, again=again & False).fills] == [], "a hit"


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


def bring(
    policy: SlotPolicy, layer: int, beside: int | None = None, share: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    experts = policy.present.shape[1]
    return policy.bring(layer, np.full(experts, WHOLE) if share is None else np.array(share), beside)


def test_all_offloaded_experts_of_a_layer_are_brought_and_those_in_slots_stay():
    """Free slots come first, and are given to the experts of the highest value."""
    policy = policy_of(6, 9, layers=2)
    worth(policy, by_age(0.9, 0.5, 0.1))
    assert step_of_layers(policy, [3], [2]) == [[(3, 0)], [(2, 1)]]
    step_of_layers(policy, [5], [])
    policy.begin_step()
    assert bring(policy, 0, share=[0, WHOLE, 1, WHOLE, 0, WHOLE]) == [(1, 3), (2, 4)]
    assert held(policy, 0) == {3: 0, 5: 2, 1: 3, 2: 4}, "no residents"
    assert held(policy, 1) == {2: 1}
    assert bring(policy, 0, share=[0, WHOLE, 1, WHOLE, 0, WHOLE]) == []


def test_no_expert_is_brought_that_is_not_there():
    policy = SlotPolicy(np.arange(6)[None] < 4, [SlotPool([0], 9)])
    policy.begin_step()
    assert bring(policy, 0) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_what_is_brought_evicts_what_is_worth_least_in_other_layers():
    policy = policy_of(4, 6, layers=3)
    worth(policy, by_age(0.9, 0.9, 0.5, 0.3, 0.1))
    for ids in ([[], [], [2]], [[], [1], []], [[0], [], []], [[], [], [3]], [[1], [2], []]):
        step_of_layers(policy, *ids)
    assert [held(policy, layer) for layer in range(3)] == [{0: 2, 1: 4}, {1: 1, 2: 5}, {2: 0, 3: 3}]
    policy.begin_step()
    kept = copy.deepcopy(policy)
    assert bring(policy, 1, share=[WHOLE, 0, 0, WHOLE]) == [(0, 0), (3, 2)], "2 of layer 2, then 0 of layer 0"
    assert [held(policy, layer) for layer in range(3)] == [{1: 4}, {1: 1, 2: 5, 0: 0, 3: 2}, {3: 3}]
    assert bring(kept, 1, beside=2, share=[WHOLE, 0, 0, WHOLE]) == [(0, 2), (3, 4)], "both of layer 0"
    assert held(kept, 2) == {2: 0, 3: 3}


def test_where_slots_are_too_few_the_most_valuable_experts_are_brought():
    """No expert of the layer itself or of the one beside it goes, and none is brought twice."""
    policy = policy_of(5, 4, layers=3)
    worth(policy, by_age(0.9, 0.5, 0.1))
    step_of_layers(policy, [0], [1], [2])
    policy.begin_step()
    resolve(policy, 0)
    before = copy.deepcopy(policy)
    assert bring(policy, 0, beside=1, share=[WHOLE, 8, WHOLE, 12, 0]) == [(2, 3), (3, 2)]
    assert [held(policy, layer) for layer in range(3)] == [{0: 0, 2: 3, 3: 2}, {1: 1}, {}]
    assert bring(policy, 0, beside=1, share=[WHOLE, 8, WHOLE, 12, 0]) == []
    assert bring(before, 0) == [(1, 3), (2, 2), (3, 1)], "nothing is left of the other layers for 4"


def test_what_was_brought_is_worth_its_value():
    policy, share = policy_of(4, 4, layers=2), [WHOLE, WHOLE // 2, 0, WHOLE]
    worth(policy, by_age(0.8, 0.4))
    step_of_layers(policy, [], [3])
    step_of_layers(policy, [], [])
    policy.begin_step()
    bring(policy, 1, share=share)
    whole = policy.uses[-1] << VALUE_BITS
    value = np.array([whole, whole // 2, 0, 0]) // policy.events[-1]
    assert policy.worth[0][1].tolist() == [*worth_of(value[:2]).tolist(), NOT_HELD, policy.worth[0][1, 3]]
    assert held(policy, 1) == {3: 0, 0: 1, 1: 2}
    assert (policy.worth[0][0] == NOT_HELD).all()


def test_what_is_brought_takes_slots_of_its_own_pool_only():
    policy = SlotPolicy(np.ones((4, 3), dtype=bool), [SlotPool([0, 2], 4), SlotPool([1, 3], 4)])
    policy.begin_step()
    assert bring(policy, 1) == [(0, 0), (1, 1), (2, 2)]
    assert bring(policy, 2, beside=1) == [(0, 0), (1, 1), (2, 2)]
    assert bring(policy, 3, beside=2) == [(0, 3), (1, 0), (2, 1)], "that of another pool keeps nothing of this one"
    assert [held(policy, layer) for layer in range(4)] == [{}, {2: 2}, {0: 0, 1: 1, 2: 2}, {0: 3, 1: 0, 2: 1}]


@pytest.mark.parametrize("decodes", [True, False])
def test_a_step_that_brings_fills_no_slots_and_learns_as_others_do(decodes):
    filled, brought = policy_of(6, 4), policy_of(6, 4)
    for policy in (filled, brought):
        worth(policy, by_age(0.9, 0.1))
        step(policy, 0, 1)
    if decodes:
        used = np.isin(np.arange(6), (1, 3, 4))[None]
        for policy in (filled, brought):
            policy.begin_step()
        assert filled.resolve(used, np.full(used.shape, WHOLE)).fills
        resolved = brought.resolve(used, np.full(used.shape, WHOLE), fill=False)
        assert resolved.hit.tolist() == [[False, True, False, False, False, False]]
        assert resolved.fills == []
    else:
        assert prefill(filled, [5, 5], [1, 3], [1, 4], read=True)
        assert prefill(brought, [5, 5], [1, 3], [1, 4], read=True, fill=False) == []
    assert held(brought) == {0: 0, 1: 1}
    for name in ("last", "lately", "long", "classes", "events", "uses"):
        assert np.array_equal(getattr(brought, name), getattr(filled, name)), name
    assert np.array_equal(brought.worth[0][0, :2], filled.worth[0][0, :2])
    assert (brought.worth[0][0, :2] == worth_of(brought._values[brought.classes[0, 0, :2]])).all()
    assert (brought.worth[0][0, 2:] == NOT_HELD).all()


def test_what_was_never_used_counts_as_used_longest_ago():
    policy = policy_of(4, 0)
    step(policy, 1, 2)
    assert (policy.classes[0, 0] // (LATELY * LONG)).tolist() == [AGES - 1, 0, 0, AGES - 1]
    step(policy, 2)
    assert (policy.classes[0, 0] // (LATELY * LONG)).tolist() == [AGES - 1, 2, 0, AGES - 1]


def misses_of_lru(activated: np.ndarray, rows: int) -> int:
    """The misses of one cache of ``rows`` experts of all layers, which evicts the least recently used."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    misses = 0
    for used in activated:
        for key in map(tuple, np.argwhere(used).tolist()):
            misses += key not in cache
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > rows:
                cache.popitem(last=False)
    return misses


def misses(policy: SlotPolicy, activated: np.ndarray) -> int:
    return int(activated.sum() - run(policy, activated).sum())


@pytest.mark.slow
@pytest.mark.parametrize("skew", [0.0, 0.3, 0.6])
def test_one_pool_misses_no_more_than_a_cache_of_what_was_used_last(skew):
    trace = Law(64, 4, skew).trace(layers=3, requests=2, tokens=1000, seed=0)
    activated = trace.activated(trace.steps(range(2), 1))
    for rows in (24, 48, 96):
        assert misses(policy_of(64, rows, layers=3), activated) < 1.02 * misses_of_lru(activated, rows)


@pytest.mark.slow
def test_static_skew_is_served_as_by_a_list_of_the_hottest_experts():
    rng = np.random.default_rng(6)
    chance = np.minimum(6 * rng.dirichlet(np.full(64, 0.5), size=3), 0.9)
    activated = rng.random((4000, 3, 64)) < chance
    hits, later = run(policy_of(64, 48, layers=3), activated), activated[2000:]
    best = np.sort(chance, axis=None)[-48:].sum() / chance.sum()
    reached = hits[2000:].sum() / later.sum()
    recent = 1 - misses_of_lru(later, 48) / later.sum()
    assert reached > best - 0.02
    assert reached > recent + 0.05


@pytest.mark.slow
def test_layers_that_use_more_experts_take_more_of_the_pool():
    """Layer 0 uses 16 experts alike, layer 1 only 4. Apart, the slots of layer 1 would be of no use."""
    rng = np.random.default_rng(7)
    activated = np.zeros((1500, 2, 32), dtype=bool)
    activated[:, 0, :16], activated[:, 1, :4] = rng.random((1500, 16)) < 0.2, rng.random((1500, 4)) < 0.5
    policy = policy_of(32, 20, layers=2)
    together = misses(policy, activated)
    assert [len(held(policy, layer)) for layer in (0, 1)] == [16, 4]
    apart = SlotPolicy(np.ones((2, 32), dtype=bool), [SlotPool([0], 10), SlotPool([1], 10)])
    assert together == 20
    assert misses(apart, activated) > 10 * together


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
