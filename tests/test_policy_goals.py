"""The benchmark of the residency policies: its one command, on a trace small enough for a test."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields

import numpy as np
import pytest
from checkpoints import ROOT

from sglang_uvm_offload.adaptation import INTERVAL_STEPS
from sglang_uvm_offload.forecast import TUNING, Tuning
from sglang_uvm_offload.simulator import POLICIES, SHIPPED, Replay, replay
from sglang_uvm_offload.trace import Trace

sys.path.insert(0, str(ROOT / "benchmarks"))

import policy_goals


@pytest.fixture(scope="module")
def benchmark():
    return policy_goals


def small_trace(seed: int) -> Trace:
    """Twelve requests of 12 tokens in 2 layers of 8 experts, of which one uses two nearly always and the other five."""
    rng = np.random.default_rng(seed)
    picks = np.stack([rng.permutation(8)[rng.integers(0, hot, (144, 1))] for hot in (2, 5)], axis=1)
    picks = np.where(rng.random(picks.shape) < 0.2, rng.integers(0, 8, picks.shape), picks)
    return Trace(picks, np.full(12, 12), 8)


@pytest.fixture(scope="module")
def written(benchmark, tmp_path_factory):
    """What the one command writes for two traces of one model: the JSON, and the text."""
    folder = tmp_path_factory.mktemp("goals")
    for seed, name in enumerate(("here", "there")):
        small_trace(seed).save(folder / f"{name}.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "SWITCH_STEPS", 20)
        patch.setattr(benchmark, "DECISION_SIZES", ((2, 8), (4, 8)))
        patch.setattr(benchmark, "DECISIONS", 5)
        benchmark.main([str(folder / "here.npz"), str(folder / "there.npz"), "--out", str(folder / "out")])
    return json.loads((folder / "out" / "goals.json").read_text()), (folder / "out" / "goals.md").read_text()


def test_every_case_has_the_shipped_policy_its_rivals_and_its_variants(benchmark, written):
    report, _ = written
    by_case: dict[tuple, set[str]] = {}
    for result in report["results"]:
        by_case.setdefault((result["trace"], result["batch"], result["residency"]), set()).add(result["policy"])
    assert len(by_case) == 2 * len(benchmark.BATCHES) * len(benchmark.RESIDENCIES)
    expected = {
        *POLICIES,
        benchmark.UNIFORM,
        benchmark.FREE_MOVES,
        benchmark.AT_ONCE,
        benchmark.ALONE,
        *(f"every-{n}" for n in benchmark.INTERVALS),
    }
    expected |= {f"{field.name} x{factor}" for field in fields(Tuning) for factor in ("0.5", "2")}
    assert all(policies == expected for policies in by_case.values())


def test_every_variant_is_another_policy(benchmark, written):
    report, _ = written

    def link_times(policy: str) -> list[float]:
        return [result["step_seconds"] for result in report["results"] if result["policy"] == policy]

    for variant in (
        benchmark.UNIFORM,
        benchmark.FREE_MOVES,
        benchmark.AT_ONCE,
        benchmark.ALONE,
        "every-2",
        "every-16",
        "hysteresis x2",
        "horizon_touches x0.5",
    ):
        assert link_times(variant) != link_times(SHIPPED), variant


def test_the_shipped_policy_is_replayed_as_the_command_replays_it(written):
    report, _ = written
    found = [r for r in report["results"] if (r["trace"], r["policy"], r["batch"]) == ("there", SHIPPED, 1)]
    assert len(found) == 3
    for result in found:
        expected = replay(small_trace(1), SHIPPED, result["residency"], per_layer="global")
        assert result["coverage"] == pytest.approx(expected.coverage)
        assert result["step_seconds"] == pytest.approx(expected.step_seconds)


def test_the_text_has_a_row_for_each_goal_case_switch_and_left_out_trace(written):
    report, text = written
    assert len(report["goals"]) >= 10
    for goal in report["goals"]:
        assert f"| {goal['met']} | {goal['worst']} |" in text
    assert len(re.findall(r"^\| (?:here|there) \| [18] \| \d+% \|", text, re.M)) == 12
    assert len(re.findall(r"^\| (?:here \| there|there \| here) \|", text, re.M)) == len(report["switches"]) == 12
    assert [row["trace"] for row in report["left_out"]] == ["here", "there"]
    assert re.search(r"^\| any \| .+: \d\.\d{3} \| .+: \d\.\d{3} \|$", text, re.M)


def test_a_trace_left_out_is_judged_by_what_is_best_on_the_others(benchmark):
    """On a, half the hysteresis takes 70 % off; on b and c, double takes 20 % off."""
    seconds = {"a": {"hysteresis x0.5": 0.3}, "b": {"hysteresis x2": 0.8}, "c": {"hysteresis x2": 0.8}}
    table = {
        (trace, 1, 0.5): {
            name: Replay(name, 0.5, 1, 0, 0, 0, 0, seconds[trace].get(name, 1.0), [], [])
            for name in (SHIPPED, *benchmark.tunings())
        }
        for trace in seconds
    }
    assert benchmark.left_out(table, ["hysteresis"]) == [
        {"trace": "a", "chosen": "hysteresis x2", "link_time": 1.0},
        {"trace": "b", "chosen": "hysteresis x0.5", "link_time": 1.0},
        {"trace": "c", "chosen": "hysteresis x0.5", "link_time": 1.0},
    ]
    assert {row["chosen"] for row in benchmark.left_out(table, ["memory_steps"])} == {"as shipped"}


def test_files_that_are_no_traces_are_all_named(benchmark, tmp_path, capsys):
    (tmp_path / "broken.npz").write_bytes(b"PK not a zip")
    with pytest.raises(SystemExit):
        benchmark.main([str(tmp_path / "broken.npz"), str(tmp_path / "missing.npz"), "--out", str(tmp_path)])
    message = capsys.readouterr().err
    assert "broken.npz" in message
    assert "missing.npz" in message


def test_the_readme_quotes_the_results():
    report = json.loads((ROOT / "benchmarks" / "results" / "policy" / "goals.json").read_text())
    goals = {goal["goal"]: goal for goal in report["goals"]}
    coverage, moves, link = (
        goals[name]
        for name in (
            "coverage at least LRU's, within 0.5 points",
            "at most a quarter of LRU's moves",
            "step time at least 10 % below LRU's on average",
        )
    )
    assert coverage["worst"].startswith("+")
    cases, most = coverage["met"].split(" of ")[1], moves["worst"].split()[0]
    mean = link["worst"].split()[1]
    said = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"in each of {cases} cases with at most {most} of its moves, and brings {mean} of its bytes over the link on average"
        in said
    )


def test_the_results_are_those_of_this_benchmark(benchmark):
    """A goal, constant or policy that is added, or a value that is changed, needs a new run."""
    results = ROOT / "benchmarks" / "results" / "policy"
    report, text = json.loads((results / "goals.json").read_text()), (results / "goals.md").read_text()
    for goal in report["goals"]:
        assert f"| {goal['met']} | {goal['worst']} |" in text
    for field in fields(Tuning):
        for factor in benchmark.FACTORS:
            value = getattr(TUNING, field.name)
            assert f"| `{field.name}` | {value:g} | {factor * value:g} |" in text
    assert f"`INTERVAL_STEPS` {INTERVAL_STEPS}," in text


def test_the_design_document_refers_to_the_results_and_quotes_none_of_them():
    plan = (ROOT / "expert_offload_plan.md").read_text()
    section = plan.split("### Following the traffic")[1].split("\n#")[0]
    assert "benchmarks/results/policy/goals.md" in section
    assert not re.findall(r"\d(?:\.\d+)? ?%|\d+ of \d+|in \d+ of", section)
