"""The rules that choose residents."""

import numpy as np
import pytest
from builders.policies import WholeExperts, whole

from sglang_uvm_offload.policy import adaptive as adaptive_module
from sglang_uvm_offload.policy import ranking
from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.policy.forecast import PREFILL_PRIOR_STEPS, SCALES, Forecast

SHAPE = (3, 16)


def none(shape=SHAPE):
    return np.zeros(shape, dtype=bool)


def first(n, shape=SHAPE):
    return np.broadcast_to(np.arange(shape[1]) < n, shape).copy()


def best(scores, capacity, resident, candidate):
    """``ranking.best`` of experts of one byte."""
    extents = whole(scores.shape, np.ones(len(scores)))
    flat = (array.ravel() for array in (scores, resident, candidate))
    density, resident, candidate = flat
    return ranking.best(extents, density, capacity, resident, candidate).reshape(scores.shape)


class TestBest:
    @pytest.mark.parametrize(
        ("scores", "capacity", "resident", "chosen"),
        [
            ([[1, 5, 3, 4], [9, 0, 8, 7]], [2, 2], None, [[1, 3], [0, 2]]),
            ([[2, 1, 1, 1, 0]], [2], [[0, 0, 0, 1, 1]], [[0, 3]]),  # among equals a resident stays,
            ([[1, 1, 1, 1]], [2], None, [[0, 1]]),  # then the lower id comes
            ([[3, 2, 1]] * 3, [0, 1, 9], None, [[], [0], [0, 1, 2]]),
            ([[0]], [1], None, [[0]]),
            ([[0, 0, -1, -1]], [3], [[0, 0, 1, 0]], [[0, 1]]),  # below 0: no candidate
        ],
    )
    def test_takes_the_hottest_of_each_layer(self, scores, capacity, resident, chosen):
        scores = np.array(scores, dtype=float)
        resident = none(scores.shape) if resident is None else np.array(resident, dtype=bool)
        found = best(scores, np.array(capacity), resident, scores >= 0)
        assert [np.flatnonzero(row).tolist() for row in found] == chosen

    def test_equal_scores_move_nothing(self):
        resident = np.random.default_rng(0).permuted(first(5, (7, 16)), axis=1)
        after = best(np.full((7, 16), 0.25), np.full(7, 5), resident, ~none((7, 16)))
        assert (after == resident).all()

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

    @pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
    def test_no_layer_and_no_expert(self, shape):
        assert best(np.zeros(shape), np.zeros(shape[0], int), none(shape), none(shape)).shape == shape

    def test_refuses_what_does_not_fit_together(self):
        with pytest.raises(ValueError, match="do not match"):
            best(np.zeros((2, 4)), np.zeros(3, int), none((2, 4)), none((2, 4)))
        with pytest.raises(ValueError, match="not a number"):
            best(np.array([[np.nan, 1.0]]), np.array([1]), none((1, 2)), none((1, 2)))


class TestScore:
    def test_it_is_activations_per_decode_step_or_else_a_rank_by_the_share_of_prefill_tokens(self):
        activations, nothing = np.array([[8, 4, 0, 4], [0, 0, 0, 0]]), np.zeros((2, 4))
        assert ranking.score(activations, 8, nothing).tolist() == [[1.0, 0.5, 0.0, 0.5], [0, 0, 0, 0]]
        scores = ranking.score(nothing, 0, np.array([[1, 500, 20, 0], [4, 3, 2, 1]]))
        assert np.argsort(-scores, axis=1).tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
        assert ranking.score(nothing, 0, nothing).tolist() == nothing.tolist()

    def test_the_prior_weighs_much_among_few_decode_steps_and_vanishes_among_many(self):
        few = ranking.score(np.array([[0, 1, 1]]), 1, np.array([[900, 50, 50]]))
        assert few[0, 0] > few[0, 1]
        activations, routed = np.array([[300, 700, 0]]), np.array([[1000, 10, 0]])
        scores = [ranking.score(activations, 1000, routed * n) for n in (1, 10**6)]
        assert np.allclose(*scores), "any number of prefill tokens weighs the same"
        assert scores[0][0, 1] > scores[0][0, 0]
        rate, steps = np.array([[0.9, 0.4, 0.7]]), 10**6
        assert np.allclose(ranking.score(rate * steps, steps, np.array([[0, 10**6, 0]])), rate, atol=1e-4)


def adaptive(shape=SHAPE, capacity=4, expert_bytes=10, candidate=None, **options):
    layers = shape[0]
    candidate = ~none(shape) if candidate is None else candidate
    return WholeExperts(
        np.broadcast_to(capacity, layers), np.broadcast_to(np.asarray(expert_bytes), layers).copy(), candidate, **options
    )


def routed(rng, chance, steps=1):
    """Activations of ``steps`` steps that use each expert with its chance."""
    return (rng.random((steps, *chance.shape)) < chance).sum(axis=0)


def serve(policy, resident, chance, steps, interval=1, seed=0, max_bytes=np.inf):
    """Independent steps; returns the residents at the end and how many were promoted."""
    rng, promoted = np.random.default_rng(seed), 0
    for _ in range(steps // interval):
        policy.observe(routed(rng, chance, interval), interval)
        moves = policy.decide(resident, max_bytes)
        assert not (moves.promote & resident).any()
        assert not (moves.demote & ~resident).any()
        resident = (resident | moves.promote) & ~moves.demote
        promoted += int(moves.promote.sum())
    return resident, promoted


def skewed(hot=slice(8, 12), shape=SHAPE):
    chance = np.full(shape, 0.02)
    chance[:, hot] = 0.6
    return chance


NOTHING = np.zeros(SHAPE, dtype=int)


class TestAdaptive:
    @pytest.mark.slow
    @pytest.mark.parametrize("interval", [1, 32])
    def test_hot_experts_become_resident_and_then_nothing_moves(self, interval):
        p, chance = adaptive(), skewed()
        resident, moves = serve(p, first(4), chance, 256, interval)
        assert (resident == (chance > 0.5)).all()
        assert moves <= 15
        assert serve(p, resident, chance, 512, interval, seed=1)[1] == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("pattern", ["all", "none", "in turn", "random"])
    def test_all_equal_routing_never_moves_anything(self, pattern):
        p, resident, rng = adaptive(), first(4), np.random.default_rng(0)
        for step in range(300):
            activations = NOTHING.copy()
            if pattern == "all":
                activations[:] = 1
            elif pattern == "in turn":
                activations[:, [(4 * step + i) % 16 for i in range(4)]] = 1
            elif pattern == "random":
                activations = (rng.permuted(np.arange(48).reshape(3, 16) % 16, axis=1) < 4).astype(int)
            p.observe(activations, 1)
            moves = p.decide(resident)
            assert not moves.promote.any()
            assert not moves.demote.any()

    @pytest.mark.slow
    def test_a_change_of_traffic_is_followed_and_neither_a_burst_nor_a_long_prefill_is(self):
        p, prefill = adaptive(), NOTHING.copy()
        resident, _ = serve(p, first(4), skewed(), 1000)
        prefill[:, :4] = 10**6
        p.observe(NOTHING, 0, prefill)
        assert not p.decide(resident).promote.any()
        p.observe(NOTHING + 1, 1)
        assert not p.decide(resident).promote.any()
        resident, _ = serve(p, resident, skewed(hot=slice(2, 6)), 200)
        assert (resident == (skewed(hot=slice(2, 6)) > 0.5)).all()

    def test_idle_time_forgets_nothing(self):
        p, twin = adaptive(), adaptive()
        resident, _ = serve(p, first(4), skewed(), 50)
        serve(twin, first(4), skewed(), 50)
        for _ in range(100):
            p.observe(NOTHING, 0)
            assert not p.decide(resident).promote.any()
        assert (p.decide(none()).promote == twin.decide(none()).promote).all()
        assert p.decide(none()).promote.any()

    def test_without_a_decode_step_nothing_moves(self):
        """What persists is not known yet; the choice from the prefill, or a profile, is ``best``'s."""
        p, seeded, prefill = adaptive(), adaptive(), NOTHING.copy()
        prefill[:, 8:10] = 500
        p.observe(NOTHING, 0, prefill)
        seeded.seed(skewed() * 1000, 1000, NOTHING)
        assert not p.decide(first(4)).promote.any()
        assert not seeded.decide(first(4)).promote.any()

    @pytest.mark.slow
    def test_where_requests_differ_the_prefill_of_one_informs_its_decode(self):
        hits = []
        for hinted in (False, True):
            p, resident = adaptive(), first(4)
            rng, served = np.random.default_rng(0), 0
            for _ in range(60):
                start = int(rng.integers(4)) * 4
                chance = skewed(hot=slice(start, start + 4))
                if hinted:
                    p.observe(NOTHING, 0, routed(rng, chance, 100))
                for _ in range(40):
                    moves = p.decide(resident)
                    resident = (resident | moves.promote) & ~moves.demote
                    activations = routed(rng, chance)
                    served += int((activations * resident).sum())
                    p.observe(activations, 1)
            hits.append(served)
        assert hits[1] > 1.02 * hits[0]

    def test_what_is_no_candidate_is_neither_moved_nor_counted(self):
        candidate = ~none()
        candidate[:, 15] = False
        candidate[2] = False
        chance = skewed()
        ends = []
        for always_used in (0, 1):
            chance[:, 15] = always_used
            resident, _ = serve(adaptive(candidate=candidate, capacity=[4, 4, 0]), first(4) | ~candidate, chance, 150)
            assert resident[~candidate].all()
            assert (resident[:2, :15] == (skewed() > 0.5)[:2, :15]).all()
            ends.append(resident)
        assert (ends[0] == ends[1]).all()

    def test_moves_stay_within_the_bound_and_the_hottest_come_first(self):
        p, resident, chance = adaptive(), first(4), skewed()
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
        assert not p.decide(first(4), max_bytes=0).promote.any()
        lost = resident & (np.arange(3) != 1)[:, None]
        moves = p.decide(lost)
        assert (moves.promote == (resident & ~lost)).all(), "lost residents are brought back"
        assert not moves.demote.any()

    @pytest.mark.slow
    def test_ranks_with_the_same_counts_decide_alike_and_arguments_stay_as_they_were(self):
        chance = np.random.default_rng(1).uniform(0, 0.6, SHAPE)
        a, b = (serve(adaptive(), first(4), chance, 300)[0] for _ in range(2))
        assert (a == b).all()
        p, resident, activations = adaptive(), first(4), NOTHING.copy()
        activations[:, 9] = 1
        for _ in range(20):
            p.observe(activations, 1, activations)
            p.decide(resident)
        assert (resident == first(4)).all()
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
        p, resident, rng = adaptive(), first(4), np.random.default_rng(0)
        if seeded is not None:
            p.seed(seeded * 10**6, 10**6, NOTHING)
        for step in range(500):
            if (resident == (skewed() > 0.5)).all():
                return step
            p.observe(routed(rng, skewed()), 1)
            moves = p.decide(resident)
            resident = (resident | moves.promote) & ~moves.demote
        return 500

    def test_a_matching_profile_brings_the_hot_experts_sooner_and_a_foreign_one_is_soon_overruled(self):
        cold = self.steps_until_hot(None)
        assert self.steps_until_hot(skewed()) < 0.75 * cold
        assert self.steps_until_hot(skewed(hot=slice(0, 4))) <= cold + adaptive_module.SEED_STEPS

    @pytest.mark.parametrize("prefill", [NOTHING, NOTHING + 7])
    def test_a_profile_without_decode_steps_or_without_any_is_taken(self, prefill):
        p = adaptive()
        p.seed(NOTHING, 0, prefill)
        resident, _ = serve(p, first(4), skewed(), 256)
        assert (resident == (skewed() > 0.5)).all()


class TestBudget:
    def test_a_layer_gets_what_its_traffic_deserves(self):
        chance = np.full((2, 16), 0.02)
        chance[0, :7] = 0.6
        chance[1, :1] = 0.6
        resident, _ = serve(adaptive((2, 16)), first(4, (2, 16)), chance, 500)
        assert (resident == (chance > 0.5)).all()


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

    @pytest.mark.parametrize("seed", range(20))
    def test_chooses_as_sorting_everything_would(self, seed):
        rng = np.random.default_rng(seed)
        layers, experts = int(rng.integers(1, 5)), int(rng.integers(1, 12))
        expert_bytes = rng.integers(1, 4, layers) * 10 if seed % 2 else 10
        p = adaptive(
            (layers, experts), rng.integers(0, experts + 1, layers), expert_bytes=expert_bytes, floor=int(rng.integers(0, 4))
        )
        size = layers * experts
        for _ in range(20):
            candidate = rng.random(size) < 0.9
            resident = candidate & (rng.random(size) < rng.random())
            if rng.random() < 0.5:
                resident = p._pack(np.zeros(size), candidate, none(size))
            key = rng.integers(0, 8, size) / 4
            chosen = p._pack(key, candidate, resident)
            assert (chosen == self.sorted_out(p.budget, key, candidate)).all()
