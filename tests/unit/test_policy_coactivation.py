"""The context: experts that are used together, or one after the other, foretell each other, and noise foretells nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_uvm_offload.policy.coactivation import MEAN_STEPS, RIDGE, RIDGE_TRANSITIONS, SCALES, Context
from sglang_uvm_offload.policy.forecast import TUNING
from sglang_uvm_offload.replay.baselines import Variant
from sglang_uvm_offload.replay.simulator import Workload, serve
from sglang_uvm_offload.replay.whole_experts import WholeExperts

E = 32
DECAY = 1 - 1 / 4096


def rate(*used: int) -> np.ndarray:
    return np.isin(np.arange(E), used).astype(np.float32)


def learned(steps: int, following: bool, seed: int = 0) -> Context:
    """A context after random traffic in which expert 7 is used in the step after expert 3, or, not ``following``, as often
    whenever."""
    rng, context, before = np.random.default_rng(seed), Context(E, 64), False
    for seen in range(steps):
        used = set(rng.choice(np.arange(8, E), 3, replace=False).tolist())
        leads = rng.random() < 0.1
        follows = before if following else rng.random() < 0.1
        used |= {expert for expert, it_is in ((3, leads), (7, follows)) if it_is}
        context.observe(rate(*used), 1, seen, DECAY)
        before = leads
    return context


def told(context: Context, used: int, seen: int) -> np.ndarray:
    context.observe(rate(used, 10), 1, seen, DECAY)
    return context.activations(0.5)


@pytest.mark.slow
def test_an_expert_that_follows_another_is_foretold_by_it():
    after_3, after_4 = (told(learned(3000, following=True), expert, 3000) for expert in (3, 4))
    assert after_3[7] > 0.2
    assert np.argmax(after_3) == 7
    assert abs(after_4[7]) < after_3[7] / 3


@pytest.mark.slow
def test_what_has_no_connection_foretells_little():
    after_3 = told(learned(3000, following=False), 3, 3000)
    assert np.abs(after_3).max() < 0.1


def test_before_anything_was_seen_nothing_is_foretold():
    context = Context(E, 64)
    assert not context.activations(0.9).any()
    context.observe(rate(1, 2), 1, 0, DECAY)
    assert not context.activations(0.9).any()


def test_two_of_them_agree_to_the_bit():
    one, other = (told(learned(200, following=True), 3, 200) for _ in range(2))
    assert (one == other).all()


@pytest.mark.parametrize("decay", [DECAY, 0.9])
def test_it_solves_the_equations_that_it_states(decay):
    """Beside a plain computation in float64, with decays so strong that the running weight is renewed many times."""
    rng, context = np.random.default_rng(1), Context(E, 8)
    rates = (rng.random((150, E)) < 0.2) / rng.integers(1, 3, (150, 1))
    means, states = np.zeros((len(SCALES) + 1, 8)), []
    for seen, now in enumerate(rates):
        context.observe(now.astype(np.float32), 1, seen, decay)
        share = np.maximum(1 - np.exp(-1 / np.array([*SCALES, MEAN_STEPS])), 1 / (seen + 1))
        share[0] = 1
        means = means + share[:, None] * (now @ context._signs - means)
        states.append((means[:-1] - means[1:]).ravel())
    weights = decay ** np.arange(len(states) - 2, -1, -1)
    before, after = np.array(states[:-1]), np.array(states[1:])
    square = (before * weights[:, None]).T @ (before - 0.8 * after)
    ridge = (RIDGE + RIDGE_TRANSITIONS / weights.sum()) * np.trace(square) / len(square)
    value = np.linalg.solve(square + ridge * np.eye(len(square)), (before * weights[:, None]).T @ rates[1:])
    assert context.activations(0.8) == pytest.approx(0.2 * (states[-1] @ value), rel=1e-3, abs=1e-5)


def topics(steps: int, changes: float, seed: int) -> np.ndarray:
    """``bool[steps, 4, E]``: one of three topics at a time, each with experts of its own in every layer, of which a step uses
    some; nothing else tells when a topic comes back."""
    rng = np.random.default_rng(seed)
    experts = [[rng.choice(E, 8, replace=False) for _ in range(4)] for _ in range(3)]
    activated, topic = np.zeros((steps, 4, E), dtype=bool), 0
    for step in activated:
        if rng.random() < changes:
            topic = rng.integers(3)
        for layer, of in zip(step, experts[topic], strict=True):
            layer[rng.choice(of, 2, replace=False)] = True
    return activated


@pytest.mark.slow
def test_a_topic_that_comes_back_is_known_by_its_first_experts():
    activated = topics(6000, changes=1 / 40, seed=2)
    workload = Workload(1, activated[:4000], activated[4000:])
    start = np.broadcast_to(np.arange(E) < 10, (4, E))

    def bytes_over_the_link(directions: int) -> float:
        tuning = replace(TUNING, directions=directions)
        policy = WholeExperts(np.full(4, 10), np.ones(4, dtype=int), np.ones((4, E), dtype=bool), tuning=tuning)
        return serve("it", Variant(policy, start, 1, 1), workload, 10 / E).step_seconds

    assert bytes_over_the_link(64) < 0.9 * bytes_over_the_link(0)


def test_the_running_weight_never_vanishes():
    context = Context(E, 4)
    for seen in range(2000):
        context.observe(rate(seen % E), 1, seen, 0.9)
        assert 1e-4 < context._weight <= 1
    assert np.isfinite(context._now_activation).all()


@pytest.mark.parametrize("before", [2, 5])
def test_a_batch_that_grows_at_once_is_no_reason_to_move(before):
    """What was seen last then outweighs all before. Without care the forecast leaves what is possible, and hundreds move."""
    rng, experts, layers = np.random.default_rng(0), 128, 20
    preferred = np.log(rng.dirichlet(np.full(experts, 0.3), layers) + 1e-9)
    policy = WholeExperts(np.full(layers, 40), np.ones(layers, dtype=int), np.ones((layers, experts), dtype=bool))
    resident = np.broadcast_to(np.arange(experts) < 40, (layers, experts))
    for step in range(before + 4):
        chosen = rng.gumbel(size=(1 if step < before else 64, layers, experts)) + preferred
        activated = np.zeros((layers, experts), dtype=int)
        for layer, of in zip(activated, np.argsort(-chosen, axis=2)[..., :8].transpose(1, 0, 2), strict=True):
            layer[np.unique(of)] = 1
        policy.observe(activated, 1)
        assert policy.decide(resident).promote.sum() < 10
