"""benchmarks/block_residency.py: the manager keeps the best blocks, and the committed table is of the committed figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import block_residency
from sglang_uvm_offload.replay.simulator import Workload

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "blocks"


def cases() -> list[block_residency.Case]:
    return [
        block_residency.Case(**each | {"mib": tuple(each["mib"])}) for each in json.loads((RESULTS / "blocks.json").read_text())
    ]


def test_the_committed_table_is_that_of_the_committed_figures():
    assert (RESULTS / "blocks.md").read_text() == block_residency.table(cases())


def test_the_committed_times_of_decisions_are_those_of_the_committed_figures():
    record = json.loads((RESULTS / "decisions.json").read_text())
    decisions = [block_residency.Decision(**each | {"mib": tuple(each["mib"])}) for each in record["decisions"]]
    assert (RESULTS / "decisions.md").read_text() == block_residency.decisions_table(decisions, record["machine"])
    assert [each.mib for each in decisions] == list(block_residency.DECISION_SHAPES)


def test_a_decision_is_timed_over_the_extents_of_its_experts(monkeypatch):
    monkeypatch.setattr(block_residency, "DECISION_LAYERS", 3)
    monkeypatch.setattr(block_residency, "DECISION_STEPS", (1, 3))
    timed = block_residency.decision((3.0, 1.5))
    assert timed.extents == 3 * (256 * 3 // 2 + 256 * 3 // 4)
    assert 0 < timed.decide_ms <= timed.both_ms


def test_the_manager_was_within_a_point_of_the_best_blocks_after_each_warm_up():
    assert len(cases()) == len(block_residency.SHAPES) * len(block_residency.BUDGETS)
    for each in cases():
        assert each.best_experts < each.best_blocks < each.any_byte
        assert each.after_warmup >= each.best_blocks - block_residency.GOAL


@pytest.mark.parametrize("mib", [(3.0, 1.5), (2.75, 1.375), (5.0,), (0.75, 0.375)], ids=str)
def test_after_a_warm_up_the_manager_keeps_the_best_blocks(mib):
    rng = np.random.default_rng(0)
    chance = rng.dirichlet(np.full(24, 0.3), 4) * 3
    activated = rng.random((300, 4, 24)) < chance
    workload, counts = Workload(1, activated[:150], activated[150:]), activated.sum(axis=0)
    shape = block_residency.Shape(4, 24, mib, 12)
    reached = block_residency.after_warmup(shape, workload, counts)
    assert reached == pytest.approx(shape.best_blocks(counts))
    assert shape.best_experts(counts) <= reached <= block_residency.any_byte(counts, 12) + 0.05
