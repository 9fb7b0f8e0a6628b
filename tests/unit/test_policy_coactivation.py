"""The context: experts that are used together, or one after the other, foretell each other, and noise foretells nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders.policies import WholeExperts

from sglang_uvm_offload.policy.coactivation import MEAN_STEPS, RIDGE, RIDGE_TRANSITIONS, SCALES, Context
from sglang_uvm_offload.policy.forecast import TUNING

E = 32
DECAY = 1 - 1 / 4096


def rate(*used: int) -> np.ndarray:
    return np.isin(np.arange(E), used).astype(np.float32)


def told(used: int, following: bool = True, steps: int = 3000) -> np.ndarray:
    """What the use of an expert foretells after random traffic in which expert 7 is used in the step after expert 3, or, not
    ``following``, as often whenever."""
    rng, context, before = np.random.default_rng(0), Context(E, 64), False
    for seen in range(steps):
        others = set(rng.choice(np.arange(8, E), 3, replace=False).tolist())
        leads = rng.random() < 0.1
        follows = before if following else rng.random() < 0.1
        others |= {expert for expert, it_is in ((3, leads), (7, follows)) if it_is}
        context.observe(rate(*others), 1, seen, DECAY)
        before = leads
    context.observe(rate(used, 10), 1, steps, DECAY)
    return context.activations(0.5)


@pytest.mark.slow
def test_an_expert_that_follows_another_is_foretold_by_it():
    after_3, after_4 = told(3), told(4)
    assert after_3[7] > 0.2
    assert np.argmax(after_3) == 7
    assert abs(after_4[7]) < after_3[7] / 3
    assert np.abs(told(3, following=False)).max() < 0.1, "what has no connection foretells little"


def test_two_of_them_agree_to_the_bit():
    assert (told(3, steps=200) == told(3, steps=200)).all()


@pytest.mark.parametrize("decay", [DECAY, 0.9])
def test_it_solves_the_equations_that_it_states(decay):
    """Beside a plain computation in float64, with decays so strong that the running weight is renewed many times."""
    rng, context = np.random.default_rng(1), Context(E, 8)
    rates = (rng.random((150, E)) < 0.2) / rng.integers(1, 3, (150, 1))
    means, states = np.zeros((len(SCALES) + 1, 8)), []
    for seen, now in enumerate(rates):
        context.observe(now.astype(np.float32), 1, seen, decay)
        assert 1e-4 < context._weight <= 1
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
    activated = topics(4000, changes=1 / 40, seed=2)

    def over_the_link(directions: int) -> int:
        """Experts that were read or moved in the second half."""
        tuning, every = replace(TUNING, directions=directions), np.ones((4, E), dtype=bool)
        policy = WholeExperts(np.full(4, 10), np.ones(4, dtype=int), every, tuning=tuning)
        resident, crossed = np.broadcast_to(np.arange(E) < 10, (4, E)), []
        for used in activated:
            moves = policy.decide(resident)
            resident = (resident | moves.promote) & ~moves.demote
            crossed.append(np.count_nonzero(used & ~resident) + np.count_nonzero(moves.promote))
            policy.observe(used.astype(int), 1)
        return sum(crossed[2000:])

    assert over_the_link(64) < 0.9 * over_the_link(0)


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
