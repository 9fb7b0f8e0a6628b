"""The rules that choose residents."""

import numpy as np
import pytest

from sglang_uvm_offload.policy import adaptive as adaptive_module
from sglang_uvm_offload.policy import ranking
from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.policy.forecast import PREFILL_PRIOR_STEPS, SCALES, Forecast
from sglang_uvm_offload.replay.whole_experts import WholeExperts


def none(shape):
    return np.zeros(shape, dtype=bool)


def first(n, shape):
    return np.broadcast_to(np.arange(shape[1]) < n, shape).copy()


def chosen(scores, n, resident=None):
    scores = np.atleast_2d(np.asarray(scores, dtype=float))
    resident = none(scores.shape) if resident is None else np.atleast_2d(np.asarray(resident, dtype=bool))
    capacity = np.full(len(scores), n) if np.isscalar(n) else np.asarray(n)
    return [np.flatnonzero(row).tolist() for row in best(scores, capacity, resident, scores >= 0)]


def best(scores, capacity, resident, candidate):
    """``ranking.best`` of experts of one byte."""
    extents = Extents.whole(scores.shape, np.ones(len(scores)))
    flat = (array.ravel() for array in (scores, resident, candidate))
    density, resident, candidate = flat
    return ranking.best(extents, density, capacity, resident, candidate).reshape(scores.shape)


class TestSelect:
    def test_takes_the_hottest_of_each_layer(self):
        assert chosen([[1, 5, 3, 4], [9, 0, 8, 7]], 2) == [[1, 3], [0, 2]]

    def test_equal_scores_move_nothing(self):
        resident = np.random.default_rng(0).permuted(first(5, (7, 16)), axis=1)
        after = best(np.full((7, 16), 0.25), np.full(7, 5), resident, ~none((7, 16)))
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

    def test_what_is_no_candidate_is_never_chosen(self):
        assert chosen([[0, 0, -1, -1]], 3, resident=[[0, 0, 1, 0]]) == [[0, 1]]

    def test_extents_of_several_sizes_fill_the_room_best_first_and_then_with_what_fits(self):
        sizes = np.array([3, 3, 1, 2, 1])
        one = np.arange(5)
        extents = Extents((1, 5), np.zeros(5, dtype=int), sizes, one, one, sizes)
        for capacity, expected in ((10, [0, 1, 2, 3, 4]), (7, [0, 1, 2]), (5, [0, 2, 4]), (2, [2, 4]), (0, [])):
            found = ranking.best(extents, np.array([5.0, 4, 3, 2, 1]), np.array([capacity]), none(5), ~none(5))
            assert np.flatnonzero(found).tolist() == expected

    def test_among_equals_an_expert_comes_with_all_its_tensors(self):
        """Three experts of 2 + 1 bytes in two tensors: room for two is two whole ones, not three times the larger tensor."""
        sizes, experts = np.array([2, 2, 2, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])
        extents = Extents((1, 3), np.zeros(6, dtype=int), sizes, np.arange(6), experts, sizes)
        found = ranking.best(extents, np.ones(6), np.array([6]), none(6), ~none(6))
        assert np.flatnonzero(found).tolist() == [0, 1, 3, 4]

    def test_no_layer_and_no_expert(self):
        assert best(np.zeros((0, 4)), np.zeros(0, int), none((0, 4)), none((0, 4))).shape == (0, 4)
        assert best(np.zeros((2, 0)), np.zeros(2, int), none((2, 0)), none((2, 0))).shape == (2, 0)

    def test_does_not_change_its_arguments(self):
        scores, resident, capacity = np.array([[1.0, 2.0]]), np.array([[True, False]]), np.array([1])
        best(scores, capacity, resident, ~none((1, 2)))
        assert (scores.tolist(), resident.tolist(), capacity.tolist()) == ([[1, 2]], [[True, False]], [1])

    def test_refuses_what_does_not_fit_together(self):
        with pytest.raises(ValueError, match="do not match"):
            best(np.zeros((2, 4)), np.zeros(3, int), none((2, 4)), none((2, 4)))
        with pytest.raises(ValueError, match="do not match"):
            best(np.zeros((2, 4)), np.zeros(2, int), none((2, 3)), none((2, 4)))
        with pytest.raises(ValueError, match="not a number"):
            best(np.array([[np.nan, 1.0]]), np.array([1]), none((1, 2)), none((1, 2)))


class TestScore:
    def test_without_prefill_it_is_activations_per_decode_step(self):
        activations = np.array([[8, 4, 0, 4]])
        assert ranking.score(activations, 8, np.zeros((1, 4))).tolist() == [[1.0, 0.5, 0.0, 0.5]]

    def test_without_decode_it_ranks_by_share_of_prefill_tokens(self):
        routed = np.array([[1, 500, 20, 0], [4, 3, 2, 1]])
        scores = ranking.score(np.zeros((2, 4)), 0, routed)
        assert np.argsort(-scores, axis=1).tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
        assert (scores >= 0).all()

    def test_any_number_of_prefill_tokens_weighs_no_more_than_the_prior(self):
        activations, routed = np.array([[300, 700, 0]]), np.array([[1000, 10, 0]])
        scores = [ranking.score(activations, 1000, routed * n) for n in (1, 10**6)]
        assert np.allclose(*scores)
        assert scores[0][0, 1] > scores[0][0, 0]

    def test_a_few_decode_steps_do_not_outweigh_a_clear_prior(self):
        scores = ranking.score(np.array([[0, 1, 1]]), 1, np.array([[900, 50, 50]]))
        assert scores[0, 0] > scores[0, 1]

    def test_the_prior_vanishes_with_decode_steps(self):
        rate, steps = np.array([[0.9, 0.4, 0.7]]), 10**6
        assert np.allclose(ranking.score(rate * steps, steps, np.array([[0, 10**6, 0]])), rate, atol=1e-4)

    def test_a_layer_without_traffic_scores_zero(self):
        scores = ranking.score(np.array([[0, 0], [3, 1]]), 4, np.array([[0, 0], [0, 0]]))
        assert scores.tolist() == [[0, 0], [0.75, 0.25]]
        assert ranking.score(np.zeros((1, 2)), 0, np.zeros((1, 2))).tolist() == [[0, 0]]

    def test_equal_routing_gives_exactly_equal_scores(self):
        scores = ranking.score(np.full((3, 7), 11), 33, np.full((3, 7), 5))
        assert len(np.unique(scores)) == 1


def adaptive(layers=3, experts=16, capacity=4, **options):
    candidate = options.pop("candidate", np.ones((layers, experts), dtype=bool))
    expert_bytes = np.asarray(options.pop("expert_bytes", [10] * layers))
    capacity = np.broadcast_to(capacity, layers).copy()
    return WholeExperts(capacity, expert_bytes, candidate, **options)


def routed(rng, chance, steps=1):
    """Activations of ``steps`` steps that use each expert with its chance."""
    return (rng.random((steps, *chance.shape)) < chance).sum(axis=0)


def serve(adaptive_policy, resident, chance, steps, interval=1, seed=0, max_bytes=np.inf):
    """Independent steps; returns the residents at the end and how many were promoted."""
    rng, promoted = np.random.default_rng(seed), 0
    for _ in range(steps // interval):
        adaptive_policy.observe(routed(rng, chance, interval), interval)
        moves = adaptive_policy.decide(resident, max_bytes)
        assert not (moves.promote & resident).any()
        assert not (moves.demote & ~resident).any()
        resident = (resident | moves.promote) & ~moves.demote
        promoted += int(moves.promote.sum())
    return resident, promoted


def skewed(layers=3, experts=16, hot=slice(8, 12)):
    chance = np.full((layers, experts), 0.02)
    chance[:, hot] = 0.6
    return chance


class TestAdaptive:
    @pytest.mark.slow
    @pytest.mark.parametrize("interval", [1, 7, 32])
    def test_hot_experts_become_resident_and_then_nothing_moves(self, interval):
        p, chance = adaptive(), skewed()
        resident, moves = serve(p, first(4, chance.shape), chance, 256, interval)
        assert (resident == (chance > 0.5)).all()
        assert moves <= 15
        assert serve(p, resident, chance, 512, interval, seed=1)[1] == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("pattern", ["all", "none", "in turn", "one by one", "random"])
    def test_all_equal_routing_never_moves_anything(self, pattern):
        p, resident, rng = adaptive(), first(4, (3, 16)), np.random.default_rng(0)
        for step in range(600):
            activations = np.zeros((3, 16), dtype=int)
            if pattern == "all":
                activations[:] = 1
            elif pattern == "in turn":
                activations[:, [(4 * step + i) % 16 for i in range(4)]] = 1
            elif pattern == "one by one":
                activations[:, step % 16] = 1
            elif pattern == "random":
                activations = (rng.permuted(np.arange(48).reshape(3, 16) % 16, axis=1) < 4).astype(int)
            p.observe(activations, 1)
            moves = p.decide(resident)
            assert not moves.promote.any()
            assert not moves.demote.any()

    @pytest.mark.slow
    def test_a_change_of_traffic_is_followed(self):
        p = adaptive()
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 2000)
        resident, _ = serve(p, resident, skewed(hot=slice(2, 6)), 200)
        assert (resident == (skewed(hot=slice(2, 6)) > 0.5)).all()

    @pytest.mark.slow
    def test_a_burst_of_one_step_moves_nothing(self):
        p = adaptive()
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 1000)
        p.observe(np.ones((3, 16), dtype=int), 1)
        assert not p.decide(resident).promote.any()

    def test_idle_time_forgets_nothing(self):
        p, twin = adaptive(), adaptive()
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 50)
        serve(twin, first(4, (3, 16)), skewed(), 50)
        for _ in range(1000):
            p.observe(np.zeros((3, 16), dtype=int), 0)
            assert not p.decide(resident).promote.any()
        cold = np.zeros((3, 16), dtype=bool)
        assert (p.decide(cold).promote == twin.decide(cold).promote).all()
        assert p.decide(cold).promote.any()

    @pytest.mark.slow
    def test_one_long_prefill_does_not_outweigh_decode(self):
        p = adaptive()
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 1000)
        prefill = np.zeros((3, 16), dtype=int)
        prefill[:, :4] = 10**6
        p.observe(np.zeros((3, 16), dtype=int), 0, prefill)
        assert not p.decide(resident).promote.any()

    def test_without_a_decode_step_nothing_moves(self):
        """What persists is not known yet; the choice from the prefill is ``best``'s."""
        p = adaptive()
        prefill = np.zeros((3, 16), dtype=int)
        prefill[:, 8:10] = 500
        p.observe(np.zeros((3, 16), dtype=int), 0, prefill)
        assert not p.decide(first(4, (3, 16))).promote.any()

    @pytest.mark.slow
    def test_where_requests_differ_the_prefill_of_one_informs_its_decode(self):
        hits = []
        for hinted in (False, True):
            p, resident = adaptive(), first(4, (3, 16))
            rng, served = np.random.default_rng(0), 0
            for _ in range(100):
                start = int(rng.integers(4)) * 4
                chance = skewed(hot=slice(start, start + 4))
                if hinted:
                    p.observe(np.zeros((3, 16), dtype=int), 0, routed(rng, chance, 100))
                for _ in range(40):
                    moves = p.decide(resident)
                    resident = (resident | moves.promote) & ~moves.demote
                    activations = routed(rng, chance)
                    served += int((activations * resident).sum())
                    p.observe(activations, 1)
            hits.append(served)
        assert hits[1] > 1.02 * hits[0]

    def test_two_tenants_that_alternate_share_the_memory(self):
        p, resident, moves = adaptive(), first(4, (3, 16)), 0
        for turn in range(60):
            hot = slice(0, 4) if turn % 2 else slice(8, 12)
            resident, moved = serve(p, resident, skewed(hot=hot), 4, seed=turn)
            moves += moved if turn >= 20 else 0
        # Following every turn would take 40 x 12.
        assert moves < 40 * 3

    def test_steps_that_activation_more_experts_change_nothing_in_kind(self):
        chance = np.minimum(3 * skewed(), 0.99)
        resident, _ = serve(adaptive(), first(4, (3, 16)), chance, 300)
        assert (resident == (chance > 0.5)).all()

    def test_every_expert_resident(self):
        p = adaptive(
            capacity=16,
        )
        resident, moves = serve(p, first(16, (3, 16)), skewed(), 100)
        assert resident.all()
        assert moves == 0

    def test_no_resident_at_all(self):
        p = adaptive(
            capacity=0,
        )
        assert serve(p, none((3, 16)), skewed(), 100)[1] == 0

    def test_one_expert(self):
        p = adaptive(
            layers=2,
            experts=1,
            capacity=1,
        )
        resident, moves = serve(p, none((2, 1)), np.ones((2, 1)), 50)
        assert resident.all()
        assert moves == 2

    def test_every_step_uses_every_expert(self):
        assert serve(adaptive(), first(4, (3, 16)), np.ones((3, 16)), 300)[1] == 0

    def test_as_many_residents_as_a_step_uses(self):
        chance = np.zeros((3, 16))
        chance[:, 8:12] = 1
        resident, moves = serve(adaptive(), first(4, (3, 16)), chance, 100)
        assert (resident == (chance > 0)).all()
        assert moves == 12

    @pytest.mark.slow
    def test_a_layer_without_traffic_keeps_its_floor(self):
        chance = skewed()
        chance[1] = 0
        resident, _ = serve(adaptive(floor=2), first(4, (3, 16)), chance, 500)
        assert resident[1].sum() >= 2
        assert (resident[[0, 2]] >= (chance[[0, 2]] > 0.5)).all()
        assert resident.sum() <= 12

    def test_what_is_no_candidate_is_neither_moved_nor_counted(self):
        candidate = np.ones((3, 16), dtype=bool)
        candidate[:, 15] = False
        candidate[2] = False
        p = adaptive(candidate=candidate, capacity=[4, 4, 0])
        chance = skewed()
        chance[:, 15] = 1
        resident, _ = serve(p, first(4, (3, 16)) | ~candidate, chance, 300)
        assert resident[~candidate].all()
        assert (resident[:2, :15] == (chance > 0.5)[:2, :15]).all()

    def test_moves_stay_within_the_bound_and_the_hottest_come_first(self):
        p, resident = adaptive(), first(4, (3, 16))
        chance = skewed()
        chance[:, 8] = 1.0
        rng = np.random.default_rng(0)
        for _ in range(100):
            p.observe(routed(rng, chance), 1)
        for expected in (3, 3, 3, 3, 0):
            moves = p.decide(resident, max_bytes=39)
            assert moves.promote.sum() == moves.demote.sum() == expected
            if resident[:, 8].sum() == 0:
                assert moves.promote[:, 8].all()
            resident = (resident | moves.promote) & ~moves.demote
        assert not p.decide(first(4, (3, 16)), max_bytes=0).promote.any()

    def test_lost_residents_are_brought_back(self):
        p = adaptive()
        resident, _ = serve(p, first(4, (3, 16)), skewed(), 200)
        lost = resident.copy()
        lost[1] = False
        moves = p.decide(lost)
        assert (moves.promote == (resident & ~lost)).all()
        assert not moves.demote.any()

    @pytest.mark.slow
    def test_dearer_moves_make_fewer_of_them(self):
        chance = np.random.default_rng(1).uniform(0, 0.6, (3, 16))
        moves = [serve(adaptive(move_cost=cost), first(4, (3, 16)), chance, 1500)[1] for cost in (1e-3, 1.0, 100.0)]
        assert moves[0] > moves[1] > moves[2]

    def test_the_counts_of_always_resident_experts_change_no_decision(self):
        candidate = np.arange(16)[None, :].repeat(3, axis=0) < 15
        rng, chance, ends = np.random.default_rng(0), np.random.default_rng(1).uniform(0, 0.5, (3, 16)), []
        steps = [routed(rng, chance) for _ in range(200)]
        for always_resident_activations in (0, 1000):
            p, resident = adaptive(candidate=candidate), first(4, (3, 16))
            for activations in steps:
                p.observe(np.where(candidate, activations, always_resident_activations), 1)
                moves = p.decide(resident)
                resident = (resident | moves.promote) & ~moves.demote
            ends.append(resident)
        assert (ends[0] == ends[1]).all()
        assert (ends[0] != first(4, (3, 16))).any()

    @pytest.mark.slow
    def test_ranks_with_the_same_counts_decide_alike(self):
        chance = np.random.default_rng(1).uniform(0, 0.6, (3, 16))
        a, b = (serve(adaptive(), first(4, (3, 16)), chance, 300)[0] for _ in range(2))
        assert (a == b).all()

    def test_does_not_change_its_arguments(self):
        p, resident, activations = adaptive(), first(4, (3, 16)), np.zeros((3, 16), dtype=int)
        activations[:, 9] = 1
        for _ in range(20):
            p.observe(activations, 1, activations)
            p.decide(resident)
        assert (resident == first(4, (3, 16))).all()
        assert activations.sum() == 3


def test_a_prompt_changes_no_rate_of_the_last_steps():
    """It tells which experts its own decode steps will use on the whole, not which the next ones do."""
    forecast = Forecast(np.ones((1, 4), dtype=bool))
    for _ in range(50):
        forecast.observe(np.array([[1, 0, 0, 0]]), 1)
    before = forecast._rates.copy()
    forecast.hint(np.array([[0, 0, 0, 500]]))
    gained = forecast._rates[:, 3] - before[:, 3]
    assert gained[SCALES <= PREFILL_PRIOR_STEPS].tolist() == [0, 0, 0]
    assert (np.diff(gained[SCALES > PREFILL_PRIOR_STEPS]) < 0).all(), "the longer the scale, the less"
    assert gained[-1] > 0


class TestSeed:
    def steps_until_hot(self, seeded):
        """Live steps of the usual traffic until all hot experts are resident, after a profile of ``seeded``."""
        p, resident, rng = adaptive(), first(4, (3, 16)), np.random.default_rng(0)
        if seeded is not None:
            p.seed(seeded * 10**6, 10**6, np.zeros((3, 16), dtype=int))
        for step in range(500):
            if (resident == (skewed() > 0.5)).all():
                return step
            p.observe(routed(rng, skewed()), 1)
            moves = p.decide(resident)
            resident = (resident | moves.promote) & ~moves.demote
        return 500

    def test_a_matching_profile_brings_the_hot_experts_sooner(self):
        assert self.steps_until_hot(skewed()) < 0.75 * self.steps_until_hot(None)

    def test_live_traffic_soon_overrules_a_foreign_profile(self):
        foreign = self.steps_until_hot(skewed(hot=slice(0, 4)))
        assert foreign <= self.steps_until_hot(None) + adaptive_module.SEED_STEPS

    def test_a_profile_alone_moves_nothing(self):
        """Residents at load are chosen from it already; whether its rates persist, live steps have to show."""
        p = adaptive()
        p.seed(skewed() * 1000, 1000, np.zeros((3, 16), dtype=int))
        assert not p.decide(first(4, (3, 16))).promote.any()

    def test_a_profile_without_decode_steps_or_without_any_is_taken(self):
        for prefill in (np.zeros((3, 16), dtype=int), np.full((3, 16), 7)):
            p = adaptive()
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

    @pytest.mark.slow
    def test_no_layer_falls_below_the_floor(self):
        chance = np.full((2, 16), 0.02)
        chance[0] = 0.9
        p = adaptive(layers=2, floor=3)
        resident = first(4, (2, 16))
        for max_bytes in (np.inf, 10):
            resident, _ = serve(p, resident, chance, 300, max_bytes=max_bytes)
            assert resident.sum(axis=1).tolist() == [5, 3]

    @pytest.mark.slow
    def test_the_budget_is_bytes_where_layers_differ_in_size(self):
        chance = np.full((2, 16), 0.02)
        chance[1, :12] = 0.6
        p = adaptive(layers=2, floor=1, expert_bytes=[40, 10])
        resident, _ = serve(p, first(4, (2, 16)), chance, 500)
        assert resident[1, :12].all()
        assert (resident.sum(axis=1) @ [40, 10]) <= 4 * 50
        assert resident[0].sum() >= 1


class TestPacking:
    """Only what is contested is sorted; that must choose as sorting everything does."""

    @staticmethod
    def sorted_out(budget, key, candidate):
        """The rule itself: a layer's best, up to its floor, come first, then all by key, as long as they fit; then smaller
        ones that still fit."""
        nbytes, layer, first = budget.extents.nbytes, budget.extents.layer, set()
        for index, floor in enumerate(budget.floor):
            taken = 0
            for at in sorted(np.flatnonzero(candidate & (layer == index)), key=lambda at: (-key[at], at)):
                if taken < floor:
                    first.add(at)
                taken += nbytes[at]
        chosen, waiting = np.zeros(key.shape, dtype=bool), np.flatnonzero(candidate)
        waiting, left = sorted(waiting, key=lambda at: (at not in first, -key[at], at)), budget.nbytes
        while waiting := [at for at in waiting if nbytes[at] <= left]:
            while waiting and nbytes[waiting[0]] <= left:
                left -= nbytes[waiting[0]]
                chosen[waiting.pop(0)] = True
        return chosen

    @pytest.mark.parametrize("seed", range(40))
    def test_chooses_as_sorting_everything_would(self, seed):
        rng = np.random.default_rng(seed)
        layers, experts = int(rng.integers(1, 5)), int(rng.integers(1, 12))
        expert_bytes = rng.integers(1, 4, layers) * 10 if seed % 2 else np.full(layers, 10)
        capacity = rng.integers(0, experts + 1, layers)
        floor = int(rng.integers(0, 4))
        p = adaptive(layers, experts, capacity, expert_bytes=expert_bytes, floor=floor)
        size = layers * experts
        for _ in range(20):
            candidate = rng.random(size) < 0.9
            resident = candidate & (rng.random(size) < rng.random())
            if rng.random() < 0.5:
                resident = p._pack(np.zeros(size), candidate, none(size))
            key = rng.integers(0, 8, size) / 4
            chosen = p._pack(key, candidate, resident)
            assert (chosen == self.sorted_out(p.budget, key, candidate)).all()

    def test_where_nothing_is_contested_nothing_is_sorted(self, monkeypatch):
        p, resident = adaptive(), first(4, (3, 16)).ravel()
        key = np.where(resident, 2.0, 1.0)
        monkeypatch.setattr(adaptive_module, "within_floor", None)
        monkeypatch.setattr(np, "argsort", lambda keys, **_: np.arange(len(keys)) if not len(keys) else pytest.fail("sorted"))
        assert (p._pack(key, np.ones(48, dtype=bool), resident) == resident).all()


class TestAdaptiveRefuses:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"capacity": -1}, "at least 0"),
            ({"expert_bytes": [0, 10, 10]}, "above 0"),
            ({"expert_bytes": [10]}, "do not match"),
            ({"floor": -1}, "at least 0"),
            ({"move_cost": 0.0}, "above 0"),
        ],
    )
    def test_what_cannot_be(self, options, message):
        with pytest.raises(ValueError, match=message):
            adaptive(**options)

    def test_counts_of_another_shape(self):
        with pytest.raises(ValueError, match="activations"):
            adaptive().observe(np.zeros((3, 15)), 1)
