"""The rules that choose residents."""

import numpy as np
import pytest

from sglang_uvm_offload import policy


def none(shape):
    return np.zeros(shape, dtype=bool)


def first(n, shape):
    return np.broadcast_to(np.arange(shape[1]) < n, shape).copy()


def chosen(scores, n, resident=None, pinned=None):
    scores = np.atleast_2d(np.asarray(scores, dtype=float))
    resident = none(scores.shape) if resident is None else np.atleast_2d(np.asarray(resident, dtype=bool))
    pinned = none(scores.shape) if pinned is None else np.atleast_2d(np.asarray(pinned, dtype=bool))
    capacity = np.full(len(scores), n) if np.isscalar(n) else np.asarray(n)
    return [np.flatnonzero(row).tolist() for row in policy.select(scores, capacity, resident, pinned)]


class TestSelect:
    def test_takes_the_hottest_of_each_layer(self):
        assert chosen([[1, 5, 3, 4], [9, 0, 8, 7]], 2) == [[1, 3], [0, 2]]

    def test_equal_scores_move_nothing(self):
        resident = np.random.default_rng(0).permuted(first(5, (7, 16)), axis=1)
        after = policy.select(np.full((7, 16), 0.25), np.full(7, 5), resident, none((7, 16)))
        assert (after == resident).all()

    def test_among_equals_a_resident_stays_then_the_lower_id_comes(self):
        assert chosen([2, 1, 1, 1, 0], 2, resident=[0, 0, 0, 1, 1]) == [[0, 3]]
        assert chosen([1, 1, 1, 1], 2) == [[0, 1]]

    def test_each_layer_has_its_own_capacity(self):
        assert chosen([[3, 2, 1], [3, 2, 1], [3, 2, 1]], [0, 1, 3]) == [[], [0], [0, 1, 2]]

    def test_a_capacity_beyond_the_experts_takes_them_all(self):
        assert chosen([3, 2, 1], 9) == [[0, 1, 2]]

    def test_one_expert(self):
        assert chosen([0], 1) == [[0]]
        assert chosen([0], 0) == [[]]

    def test_pinned_experts_are_always_resident_and_cost_no_capacity(self):
        assert chosen([5, 4, 3, 9], 2, pinned=[0, 0, 0, 1]) == [[0, 1, 3]]
        assert chosen([5, 4, 3, 0], 0, pinned=[0, 0, 0, 1]) == [[3]]

    def test_slots_that_are_no_expert_are_never_chosen(self):
        assert chosen([[0, 0, -1, -1]], 3, resident=[[0, 0, 1, 0]]) == [[0, 1]]

    def test_no_layer_and_no_expert(self):
        assert policy.select(np.zeros((0, 4)), np.zeros(0, int), none((0, 4)), none((0, 4))).shape == (0, 4)
        assert policy.select(np.zeros((2, 0)), np.zeros(2, int), none((2, 0)), none((2, 0))).shape == (2, 0)

    def test_does_not_change_its_arguments(self):
        scores, resident, pinned = np.array([[1.0, 2.0]]), np.array([[True, False]]), np.array([[False, False]])
        policy.select(scores, np.array([1]), resident, pinned)
        assert scores.tolist() == [[1, 2]]
        assert resident.tolist() == [[True, False]]

    def test_refuses_what_does_not_fit_together(self):
        with pytest.raises(ValueError, match="fit together"):
            policy.select(np.zeros((2, 4)), np.zeros(3, int), none((2, 4)), none((2, 4)))
        with pytest.raises(ValueError, match="fit together"):
            policy.select(np.zeros((2, 4)), np.zeros(2, int), none((2, 3)), none((2, 4)))
        with pytest.raises(ValueError, match="not a number"):
            policy.select(np.array([[np.nan, 1.0]]), np.array([1]), none((1, 2)), none((1, 2)))


class TestScore:
    def test_without_prefill_it_is_touches_per_decode_step(self):
        touches = np.array([[8, 4, 0, 4]])
        assert policy.score(touches, 8, np.zeros((1, 4))).tolist() == [[1.0, 0.5, 0.0, 0.5]]

    def test_without_decode_it_ranks_by_share_of_prefill_tokens(self):
        routed = np.array([[1, 500, 20, 0], [4, 3, 2, 1]])
        scores = policy.score(np.zeros((2, 4)), 0, routed)
        assert np.argsort(-scores, axis=1).tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
        assert (scores >= 0).all()

    def test_any_number_of_prefill_tokens_weighs_no_more_than_the_prior(self):
        touches, routed = np.array([[300, 700, 0]]), np.array([[1000, 10, 0]])
        scores = [policy.score(touches, 1000, routed * n) for n in (1, 10**6)]
        assert np.allclose(*scores)
        assert scores[0][0, 1] > scores[0][0, 0]

    def test_a_few_decode_steps_do_not_outweigh_a_clear_prior(self):
        scores = policy.score(np.array([[0, 1, 1]]), 1, np.array([[900, 50, 50]]))
        assert scores[0, 0] > scores[0, 1]

    def test_the_prior_vanishes_with_decode_steps(self):
        rate, steps = np.array([[0.9, 0.4, 0.7]]), 10**6
        assert np.allclose(policy.score(rate * steps, steps, np.array([[0, 10**6, 0]])), rate, atol=1e-4)

    def test_a_layer_without_traffic_scores_zero(self):
        scores = policy.score(np.array([[0, 0], [3, 1]]), 4, np.array([[0, 0], [0, 0]]))
        assert scores.tolist() == [[0, 0], [0.75, 0.25]]
        assert policy.score(np.zeros((1, 2)), 0, np.zeros((1, 2))).tolist() == [[0, 0]]

    def test_equal_routing_gives_exactly_equal_scores(self):
        scores = policy.score(np.full((3, 7), 11), 33, np.full((3, 7), 5))
        assert len(np.unique(scores)) == 1


def adaptive(layers=3, experts=16, capacity=4, per_layer="global", **options):
    candidate = options.pop("candidate", np.ones((layers, experts), dtype=bool))
    expert_bytes = np.asarray(options.pop("expert_bytes", [10] * layers))
    capacity = np.broadcast_to(capacity, layers).copy()
    return policy.AdaptivePolicy(capacity, expert_bytes, candidate, per_layer, **options)


def routed(rng, chance, steps=1):
    """Touches of ``steps`` steps that use each expert with its chance."""
    return (rng.random((steps, *chance.shape)) < chance).sum(axis=0)


def serve(adaptive_policy, resident, chance, steps, interval=1, seed=0, max_bytes=np.inf):
    """Independent steps; returns the residents at the end and how many were promoted."""
    rng, moves = np.random.default_rng(seed), 0
    for _ in range(steps // interval):
        adaptive_policy.observe(routed(rng, chance, interval), interval)
        plan = adaptive_policy.plan(resident, max_bytes)
        assert not (plan.promote & resident).any()
        assert not (plan.demote & ~resident).any()
        resident = (resident | plan.promote) & ~plan.demote
        moves += int(plan.promote.sum())
    return resident, moves


def skewed(layers=3, experts=16, hot=slice(8, 12)):
    chance = np.full((layers, experts), 0.02)
    chance[:, hot] = 0.6
    return chance


BOTH = pytest.mark.parametrize("per_layer", ["uniform", "global"])


@BOTH
class TestAdaptive:
    @pytest.mark.parametrize("interval", [1, 7, 32])
    def test_hot_experts_become_resident_and_then_nothing_moves(self, per_layer, interval):
        p, chance = adaptive(per_layer=per_layer), skewed()
        resident, moves = serve(p, first(4, chance.shape), chance, 256, interval)
        assert (resident == (chance > 0.5)).all()
        assert moves <= 15
        assert serve(p, resident, chance, 512, interval, seed=1)[1] == 0

    @pytest.mark.parametrize("pattern", ["all", "none", "in turn", "one by one", "random"])
    def test_all_equal_routing_never_moves_anything(self, per_layer, pattern):
        p, resident, rng = adaptive(per_layer=per_layer), first(4, (3, 16)), np.random.default_rng(0)
        for step in range(600):
            touches = np.zeros((3, 16), dtype=int)
            if pattern == "all":
                touches[:] = 1
            elif pattern == "in turn":
                touches[:, [(4 * step + i) % 16 for i in range(4)]] = 1
            elif pattern == "one by one":
                touches[:, step % 16] = 1
            elif pattern == "random":
                touches = (rng.permuted(np.arange(48).reshape(3, 16) % 16, axis=1) < 4).astype(int)
            p.observe(touches, 1)
            plan = p.plan(resident)
            assert not plan.promote.any()
            assert not plan.demote.any()

    def test_a_change_of_traffic_is_followed(self, per_layer):
        p = adaptive(per_layer=per_layer)
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 2000)
        resident, _ = serve(p, resident, skewed(hot=slice(2, 6)), 200)
        assert (resident == (skewed(hot=slice(2, 6)) > 0.5)).all()

    def test_a_burst_of_one_step_moves_nothing(self, per_layer):
        p = adaptive(per_layer=per_layer)
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 1000)
        p.observe(np.ones((3, 16), dtype=int), 1)
        assert not p.plan(resident).promote.any()

    def test_idle_time_forgets_nothing(self, per_layer):
        p, twin = adaptive(per_layer=per_layer), adaptive(per_layer=per_layer)
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 50)
        serve(twin, first(4, (3, 16)), skewed(), 50)
        for _ in range(1000):
            p.observe(np.zeros((3, 16), dtype=int), 0)
            assert not p.plan(resident).promote.any()
        cold = np.zeros((3, 16), dtype=bool)
        assert (p.plan(cold).promote == twin.plan(cold).promote).all()
        assert p.plan(cold).promote.any()

    def test_one_long_prefill_does_not_outweigh_decode(self, per_layer):
        p = adaptive(per_layer=per_layer)
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 1000)
        prefill = np.zeros((3, 16), dtype=int)
        prefill[:, :4] = 10**6
        p.observe(np.zeros((3, 16), dtype=int), 0, prefill)
        assert not p.plan(resident).promote.any()

    def test_without_a_decode_step_nothing_moves(self, per_layer):
        """What persists is not known yet; the choice from the prefill is ``select``'s."""
        p = adaptive(per_layer=per_layer)
        prefill = np.zeros((3, 16), dtype=int)
        prefill[:, 8:10] = 500
        p.observe(np.zeros((3, 16), dtype=int), 0, prefill)
        assert not p.plan(first(4, (3, 16))).promote.any()

    def test_where_requests_differ_the_prefill_of_one_informs_its_decode(self, per_layer):
        hits = []
        for hinted in (False, True):
            p, resident = adaptive(per_layer=per_layer), first(4, (3, 16))
            rng, served = np.random.default_rng(0), 0
            for _ in range(100):
                start = int(rng.integers(4)) * 4
                chance = skewed(hot=slice(start, start + 4))
                if hinted:
                    p.observe(np.zeros((3, 16), dtype=int), 0, routed(rng, chance, 100))
                for _ in range(40):
                    plan = p.plan(resident)
                    resident = (resident | plan.promote) & ~plan.demote
                    touches = routed(rng, chance)
                    served += int((touches * resident).sum())
                    p.observe(touches, 1)
            hits.append(served)
        assert hits[1] > 1.02 * hits[0]

    def test_two_tenants_that_alternate_share_the_memory(self, per_layer):
        p, resident, moves = adaptive(per_layer=per_layer), first(4, (3, 16)), 0
        for turn in range(60):
            hot = slice(0, 4) if turn % 2 else slice(8, 12)
            resident, moved = serve(p, resident, skewed(hot=hot), 4, seed=turn)
            moves += moved if turn >= 20 else 0
        # Following every turn would take 40 x 12.
        assert moves < 40 * 3

    def test_steps_that_touch_more_experts_change_nothing_in_kind(self, per_layer):
        chance = np.minimum(3 * skewed(), 0.99)
        resident, _ = serve(adaptive(per_layer=per_layer), first(4, (3, 16)), chance, 300)
        assert (resident == (chance > 0.5)).all()

    def test_every_expert_resident(self, per_layer):
        p = adaptive(capacity=16, per_layer=per_layer)
        resident, moves = serve(p, first(16, (3, 16)), skewed(), 100)
        assert resident.all()
        assert moves == 0

    def test_no_resident_at_all(self, per_layer):
        p = adaptive(capacity=0, per_layer=per_layer)
        assert serve(p, none((3, 16)), skewed(), 100)[1] == 0

    def test_one_expert(self, per_layer):
        p = adaptive(layers=2, experts=1, capacity=1, per_layer=per_layer)
        resident, moves = serve(p, none((2, 1)), np.ones((2, 1)), 50)
        assert resident.all()
        assert moves == 2

    def test_every_step_uses_every_expert(self, per_layer):
        assert serve(adaptive(per_layer=per_layer), first(4, (3, 16)), np.ones((3, 16)), 300)[1] == 0

    def test_as_many_residents_as_a_step_uses(self, per_layer):
        chance = np.zeros((3, 16))
        chance[:, 8:12] = 1
        resident, moves = serve(adaptive(per_layer=per_layer), first(4, (3, 16)), chance, 100)
        assert (resident == (chance > 0)).all()
        assert moves == 12

    def test_a_layer_without_traffic_keeps_its_floor(self, per_layer):
        chance = skewed()
        chance[1] = 0
        resident, _ = serve(adaptive(per_layer=per_layer, floor=2), first(4, (3, 16)), chance, 500)
        assert resident[1].sum() >= 2
        assert (resident[[0, 2]] >= (chance[[0, 2]] > 0.5)).all()
        assert resident.sum() <= 12

    def test_what_is_no_candidate_is_neither_moved_nor_counted(self, per_layer):
        candidate = np.ones((3, 16), dtype=bool)
        candidate[:, 15] = False
        candidate[2] = False
        p = adaptive(per_layer=per_layer, candidate=candidate, capacity=[4, 4, 0])
        chance = skewed()
        chance[:, 15] = 1
        resident, _ = serve(p, first(4, (3, 16)) | ~candidate, chance, 300)
        assert resident[~candidate].all()
        assert (resident[:2, :15] == (chance > 0.5)[:2, :15]).all()

    def test_moves_stay_within_the_bound_and_the_hottest_come_first(self, per_layer):
        p, resident = adaptive(per_layer=per_layer), first(4, (3, 16))
        chance = skewed()
        chance[:, 8] = 1.0
        rng = np.random.default_rng(0)
        for _ in range(100):
            p.observe(routed(rng, chance), 1)
        for expected in (3, 3, 3, 3, 0):
            plan = p.plan(resident, max_bytes=39)
            assert plan.promote.sum() == plan.demote.sum() == expected
            if resident[:, 8].sum() == 0:
                assert plan.promote[:, 8].all()
            resident = (resident | plan.promote) & ~plan.demote
        assert not p.plan(first(4, (3, 16)), max_bytes=0).promote.any()

    def test_lost_residents_are_brought_back(self, per_layer):
        p = adaptive(per_layer=per_layer)
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 200)
        lost = resident.copy()
        lost[1] = False
        plan = p.plan(lost)
        assert (plan.promote == (resident & ~lost)).all()
        assert not plan.demote.any()

    def test_dearer_moves_make_fewer_of_them(self, per_layer):
        chance = np.random.default_rng(1).uniform(0, 0.6, (3, 16))
        moves = [
            serve(adaptive(per_layer=per_layer, move_cost=cost), first(4, (3, 16)), chance, 1500)[1]
            for cost in (1e-3, 1.0, 100.0)
        ]
        assert moves[0] > moves[1] > moves[2]

    def test_a_small_lasting_difference_pays_back_in_the_end(self, per_layer):
        chance = np.full((3, 16), 0.0)
        chance[:, 8:12] = 0.02
        chance[:, 12:] = 0.9
        p = adaptive(capacity=8, per_layer=per_layer)
        resident, _ = serve(p, first(8, (3, 16)), chance, 4000)
        assert resident[:, 8:].all()

    def test_a_small_lasting_difference_gets_its_turn_under_a_tight_bound_too(self, per_layer):
        chance = np.zeros((3, 16))
        chance[:, 8:12] = 0.02
        chance[:, 12:] = 0.9
        p = adaptive(capacity=8, per_layer=per_layer)
        resident, _ = serve(p, first(8, (3, 16)), chance, 4000, max_bytes=10)
        assert resident[:, 8:].all()

    def test_the_counts_of_pinned_experts_change_no_decision(self, per_layer):
        candidate = np.arange(16)[None, :].repeat(3, axis=0) < 15
        rng, chance, ends = np.random.default_rng(0), np.random.default_rng(1).uniform(0, 0.5, (3, 16)), []
        steps = [routed(rng, chance) for _ in range(200)]
        for pinned_touches in (0, 1000):
            p, resident = adaptive(per_layer=per_layer, candidate=candidate), first(4, (3, 16))
            for touches in steps:
                p.observe(np.where(candidate, touches, pinned_touches), 1)
                plan = p.plan(resident)
                resident = (resident | plan.promote) & ~plan.demote
            ends.append(resident)
        assert (ends[0] == ends[1]).all()
        assert (ends[0] != first(4, (3, 16))).any()

    def test_ranks_with_the_same_counts_decide_alike(self, per_layer):
        chance = np.random.default_rng(1).uniform(0, 0.6, (3, 16))
        a, b = (serve(adaptive(per_layer=per_layer), first(4, (3, 16)), chance, 300)[0] for _ in range(2))
        assert (a == b).all()

    def test_does_not_change_its_arguments(self, per_layer):
        p, resident, touches = adaptive(per_layer=per_layer), first(4, (3, 16)), np.zeros((3, 16), dtype=int)
        touches[:, 9] = 1
        for _ in range(20):
            p.observe(touches, 1, touches)
            p.plan(resident)
        assert (resident == first(4, (3, 16))).all()
        assert touches.sum() == 3


@BOTH
class TestSeed:
    def steps_until_hot(self, per_layer, seeded):
        """Live steps of the usual traffic until all hot experts are resident, after a profile of ``seeded``."""
        p, resident, rng = adaptive(per_layer=per_layer), first(4, (3, 16)), np.random.default_rng(0)
        if seeded is not None:
            p.seed(seeded * 10**6, 10**6, np.zeros((3, 16), dtype=int))
        for step in range(500):
            if (resident == (skewed() > 0.5)).all():
                return step
            p.observe(routed(rng, skewed()), 1)
            plan = p.plan(resident)
            resident = (resident | plan.promote) & ~plan.demote
        return 500

    def test_a_matching_profile_brings_the_hot_experts_sooner(self, per_layer):
        assert self.steps_until_hot(per_layer, skewed()) < 0.75 * self.steps_until_hot(per_layer, None)

    def test_live_traffic_soon_overrules_a_foreign_profile(self, per_layer):
        foreign = self.steps_until_hot(per_layer, skewed(hot=slice(0, 4)))
        assert foreign <= self.steps_until_hot(per_layer, None) + policy.SEED_STEPS

    def test_however_long_a_foreign_profile_is_small_differences_of_live_traffic_get_their_turn(self, per_layer):
        chance, foreign = np.zeros((3, 16)), np.zeros((3, 16))
        chance[:, 8:12], chance[:, 12:] = 0.02, 0.9
        foreign[:, :4], foreign[:, 12:] = 0.1, 0.9
        p = adaptive(capacity=8, per_layer=per_layer)
        p.seed(foreign * 10**6, 10**6, np.zeros((3, 16), dtype=int))
        resident, _ = serve(p, first(8, (3, 16)), chance, 6000)
        assert resident[:, 8:].all()

    def test_a_profile_alone_moves_nothing(self, per_layer):
        """Residents at load are chosen from it already; whether its rates persist, live steps have to show."""
        p = adaptive(per_layer=per_layer)
        p.seed(skewed() * 1000, 1000, np.zeros((3, 16), dtype=int))
        assert not p.plan(first(4, (3, 16))).promote.any()

    def test_a_profile_without_decode_steps_or_without_any_is_taken(self, per_layer):
        for prefill in (np.zeros((3, 16), dtype=int), np.full((3, 16), 7)):
            p = adaptive(per_layer=per_layer)
            p.seed(np.zeros((3, 16), dtype=int), 0, prefill)
            resident, _ = serve(p, first(4, (3, 16)), skewed(), 256)
            assert (resident == (skewed() > 0.5)).all()


class TestGlobalBudget:
    def test_a_layer_gets_what_its_traffic_deserves(self):
        chance = np.full((2, 16), 0.02)
        chance[0, :7] = 0.6
        chance[1, :1] = 0.6
        resident, _ = serve(adaptive(layers=2, floor=1), first(4, (2, 16)), chance, 500)
        assert (resident == (chance > 0.5)).all()

    def test_no_layer_falls_below_the_floor(self):
        chance = np.full((2, 16), 0.02)
        chance[0] = 0.9
        p = adaptive(layers=2, floor=3)
        resident = first(4, (2, 16))
        for max_bytes in (np.inf, 10):
            resident, _ = serve(p, resident, chance, 300, max_bytes=max_bytes)
            assert resident.sum(axis=1).tolist() == [5, 3]

    def test_the_budget_is_bytes_where_layers_differ_in_size(self):
        chance = np.full((2, 16), 0.02)
        chance[1, :12] = 0.6
        p = adaptive(layers=2, floor=1, expert_bytes=[40, 10])
        resident, _ = serve(p, first(4, (2, 16)), chance, 500)
        assert resident[1, :12].all()
        assert (resident.sum(axis=1) @ [40, 10]) <= 4 * 50
        assert resident[0].sum() >= 1

    def test_uniform_keeps_each_layer_at_its_capacity(self):
        chance = np.full((2, 16), 0.02)
        chance[0] = 0.9
        resident, _ = serve(adaptive(layers=2, per_layer="uniform"), first(4, (2, 16)), chance, 300)
        assert resident.sum(axis=1).tolist() == [4, 4]


class TestPacking:
    """Only what is contested is sorted; that must choose as sorting everything does."""

    @staticmethod
    def sorted_out(p, key, candidate, uniform):
        """The rule itself: a layer's best ``floor`` come first, then all by key, as long as they fit."""
        chosen = np.zeros(key.shape, dtype=bool)
        by_layer = [sorted(np.flatnonzero(c), key=lambda e, k=k: (-k[e], e)) for k, c in zip(key, candidate, strict=True)]
        if uniform:
            for row, ids, room in zip(chosen, by_layer, p._capacity, strict=True):
                row[ids[:room]] = True
            return chosen
        first = {(layer, e) for layer, ids in enumerate(by_layer) for e in ids[: p._floor[layer]]}
        used = 0
        for layer, e in sorted(zip(*np.nonzero(candidate), strict=True), key=lambda at: (at not in first, -key[at], *at)):
            used += p._bytes[layer, e]
            if used > p._budget:
                break
            chosen[layer, e] = True
        return chosen

    @pytest.mark.parametrize("per_layer", ["uniform", "global"])
    @pytest.mark.parametrize("seed", range(40))
    def test_chooses_as_sorting_everything_would(self, per_layer, seed):
        rng = np.random.default_rng(seed)
        layers, experts = int(rng.integers(1, 5)), int(rng.integers(1, 12))
        expert_bytes = rng.integers(1, 4, layers) * 10 if seed % 2 else np.full(layers, 10)
        capacity = rng.integers(0, experts + 1, layers)
        floor = int(rng.integers(0, 4))
        p = adaptive(layers, experts, capacity, per_layer, expert_bytes=expert_bytes, floor=floor)
        for _ in range(20):
            candidate = rng.random((layers, experts)) < 0.9
            resident = candidate & (rng.random(candidate.shape) < rng.random())
            if rng.random() < 0.5:
                resident = p._pack(np.zeros(candidate.shape), candidate, none(candidate.shape))
            key = rng.integers(0, 8, candidate.shape) / 4
            chosen = p._pack(key, candidate, resident)
            assert (chosen == self.sorted_out(p, key, candidate, per_layer == "uniform")).all()

    def test_where_nothing_is_contested_nothing_is_sorted(self, monkeypatch):
        p, resident = adaptive(), first(4, (3, 16))
        key = np.where(resident, 2.0, 1.0)
        monkeypatch.setattr(policy, "_rank", None)
        monkeypatch.setattr(np, "argsort", lambda keys, **_: np.arange(len(keys)) if not len(keys) else pytest.fail("sorted"))
        assert (p._pack(key, np.ones((3, 16), dtype=bool), resident) == resident).all()


class TestAdaptiveRefuses:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"capacity": -1}, "at least 0"),
            ({"expert_bytes": [0, 10, 10]}, "more"),
            ({"expert_bytes": [10]}, "fit together"),
            ({"floor": -1}, "at least 0"),
            ({"move_cost": 0.0}, "more"),
            ({"per_layer": "both"}, "uniform or global"),
        ],
    )
    def test_what_cannot_be(self, options, message):
        with pytest.raises(ValueError, match=message):
            adaptive(**options)

    def test_counts_of_another_shape(self):
        with pytest.raises(ValueError, match="touches"):
            adaptive().observe(np.zeros((3, 15)), 1)
