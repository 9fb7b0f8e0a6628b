"""The benchmark of the number of drafts: what a step is taken to use, what it keeps and costs, and the committed page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import draft_length as study
from sglang_uvm_offload.replay.draft_steps import DraftSteps
from sglang_uvm_offload.routing.trace import Trace

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "drafts"
MACHINE = study.Machine("a machine", 1e9, 1e12)
MODEL = study.Model(1e6, 0.0, 0.0, 1000.0)


def steps_of(residency: float) -> DraftSteps:
    """Two requests of three tokens, each token with two experts of its own, in one layer of eight experts."""
    ids = np.arange(6)[:, None, None] + np.array([0, 1])
    return DraftSteps.of(Trace(ids % 8, np.array([3, 3]), 8), residency, 3)


def test_a_step_uses_the_experts_of_its_tokens_and_none_of_the_next_request():
    steps = steps_of(0.0)
    assert steps.missed.tolist() == [[2, 3, 4, 4], [2, 3, 3, 3], [2, 2, 2, 2]] * 2
    assert not steps.hit.any()
    assert (steps.warmup, steps.per_token) == (3, 2)


def test_all_are_hits_where_all_are_resident():
    steps = steps_of(1.0)
    assert not steps.missed.any()
    assert steps.hit.tolist() == steps_of(0.0).missed.tolist()


def test_a_kept_token_costs_its_share_of_steps_and_of_passes_of_the_draft_layer():
    """Of the three scored tokens: with two right drafts one step, with none three; a layer takes a millisecond."""
    steps, cost = steps_of(0.0), study.Cost(MODEL, MACHINE, 1, 2)
    right = np.full(6, 3)
    reads = 4e6 / MACHINE.link
    assert study.served(study.Fixed(3), steps, right, cost) == (pytest.approx((reads + 0.001 + 3 * 0.001) / 3), [0, 0, 0, 1])
    alone, _ = study.served(study.Fixed(0), steps, right, cost, speculates=False)
    assert alone == pytest.approx(2e6 / MACHINE.link + 0.001)
    zero, _ = study.served(study.Fixed(0), steps, right, cost)
    assert zero == pytest.approx(alone + 0.001)
    wrong, _ = study.served(study.Fixed(3), steps, np.zeros(6, dtype=int), cost)
    assert wrong == pytest.approx(((4 + 3 + 2) * 1e6 / MACHINE.link + 3 * 0.004) / 3)


def test_drafts_are_kept_as_often_as_was_published():
    tokens = 20_000
    steps = DraftSteps(*(np.zeros((tokens, 4)) for _ in range(2)), np.ones(tokens), np.arange(tokens), 0, 1)
    for drafts in study.ACCEPTANCE:
        right = study.accepted(drafts, steps)
        published = np.mean(drafts.kept, axis=0)
        assert [(right > position).mean() for position in range(3)] == pytest.approx(published, abs=0.02)


def test_the_committed_page_is_that_of_the_committed_figures():
    cases = [study.Case(**case) for case in json.loads((RESULTS / "drafts.json").read_text())]
    assert (RESULTS / "drafts.md").read_text() == study.markdown(cases)
    assert cases
    assert all(tuple(case.seconds) == study.NAMES for case in cases)
