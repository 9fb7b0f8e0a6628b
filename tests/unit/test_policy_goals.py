"""The benchmark of the residency policies: its one command, on a trace small enough for a test."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import numpy as np
import pytest
from checkpoints import ROOT

from benchmarks.policy import __main__ as command
from benchmarks.policy import residents
from benchmarks.policy.decayed_counts import DecayedCounts
from sglang_uvm_offload.policy.forecast import TUNING, Tuning
from sglang_uvm_offload.replay.baselines import NAMES
from sglang_uvm_offload.replay.policies import SHIPPED
from sglang_uvm_offload.replay.simulator import Replay, replay
from sglang_uvm_offload.residency.adaptation import INTERVAL_STEPS
from sglang_uvm_offload.routing.trace import Trace


@pytest.fixture(scope="module")
def benchmark():
    return residents


def small_trace(seed: int) -> Trace:
    """Twelve requests of 12 tokens in 2 layers of 8 experts, of which one uses two nearly always and the other five."""
    rng = np.random.default_rng(seed)
    picks = np.stack([rng.permutation(8)[rng.integers(0, hot, (144, 1))] for hot in (2, 5)], axis=1)
    picks = np.where(rng.random(picks.shape) < 0.2, rng.integers(0, 8, picks.shape), picks)
    return Trace(picks, np.full(12, 12), 8)


@pytest.fixture(scope="module")
def written(benchmark, tmp_path_factory):
    """What the one command writes for two traces of one model: the JSON, and the texts, by name."""
    folder = tmp_path_factory.mktemp("goals")
    for seed, name in enumerate(("here", "there")):
        small_trace(seed).save(folder / f"{name}.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "SWITCH_STEPS", 20)
        patch.setattr(benchmark, "DECISION_SIZES", ((2, 8), (4, 8)))
        patch.setattr(benchmark, "DECISIONS", 5)
        traces = [str(folder / "here.npz"), str(folder / "there.npz")]
        options = ["--out", str(folder / "out"), "--json", str(folder / "all.json"), "--tunings", "--decisions"]
        command.main(["residents", *traces, *options])
    return json.loads((folder / "all.json").read_text()), {path.stem: path.read_text() for path in (folder / "out").iterdir()}


def test_every_case_has_the_shipped_policy_its_rivals_and_its_variants(benchmark, written):
    report, _ = written
    by_case: dict[tuple, set[str]] = {}
    for result in report["results"]:
        by_case.setdefault((result["trace"], result["batch"], result["residency"]), set()).add(result["policy"])
    assert len(by_case) == 2 * len(benchmark.BATCHES) * len(benchmark.RESIDENCIES)
    expected = {
        *NAMES,
        SHIPPED,
        benchmark.FREE_MOVES,
        benchmark.AT_ONCE,
        benchmark.ALONE,
        *(f"every-{n}" for n in benchmark.INTERVALS),
        *benchmark.decays(),
    }
    expected |= {f"{field.name} x{factor}" for field in fields(Tuning) for factor in ("0.5", "2")}
    assert all(policies == expected for policies in by_case.values())


def test_every_variant_is_another_policy(benchmark, written):
    report, _ = written

    def link_times(policy: str) -> list[float]:
        return [result["step_seconds"] for result in report["results"] if result["policy"] == policy]

    for variant in (
        benchmark.FREE_MOVES,
        benchmark.AT_ONCE,
        benchmark.ALONE,
        "every-2",
        "every-16",
        "hysteresis x2",
        "horizon_activations x0.5",
        "16 steps, 1.5",
    ):
        assert link_times(variant) != link_times(SHIPPED), variant


@pytest.mark.slow
def test_the_shipped_policy_is_replayed_as_the_command_replays_it(written):
    report, _ = written
    found = [r for r in report["results"] if (r["trace"], r["policy"], r["batch"]) == ("there", SHIPPED, 1)]
    assert len(found) == 3
    for result in found:
        expected = replay(small_trace(1), SHIPPED, result["residency"])
        assert result["hit_rate"] == pytest.approx(expected.hit_rate)
        assert result["step_seconds"] == pytest.approx(expected.step_seconds)


def test_the_texts_have_a_row_for_each_goal_case_switch_and_left_out_trace(written):
    report, texts = written
    text = texts["goals"]
    assert len(report["goals"]) >= 10
    for goal in report["goals"]:
        assert f"| {goal['met']} | {goal['worst']} |" in text
    assert len(re.findall(r"^\| (?:here|there) \| [18] \| \d+% \|", text, re.M)) == 12
    assert len(re.findall(r"^\| (?:here \| there|there \| here) \|", text, re.M)) == len(report["switches"]) == 12
    assert len(re.findall(r"^\| (?:here|there) \| [18] \| \d+ steps, ", text, re.M)) == len(report["beside_decayed"]) == 4
    assert re.search(r"^\| any \| .+: \d\.\d{3} \| .+: \d\.\d{3} \|$", texts["tunings"], re.M)
    assert len(re.findall(r"^\| [24] \| 8 \| [\d.]+ \| [\d.]+ \|$", texts["decisions"], re.M)) == 2


def test_only_the_goals_are_written_where_no_more_is_asked_for(benchmark, tmp_path, monkeypatch):
    small_trace(0).save(tmp_path / "here.npz")
    monkeypatch.setattr(benchmark, "BATCHES", (8,))
    monkeypatch.setattr(benchmark, "RESIDENCIES", (0.5,))
    command.main(["residents", str(tmp_path / "here.npz"), "--out", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["goals.md"]


def table_of(seconds: dict[str, dict[str, float]], names) -> dict:
    """One case a trace, in which each policy takes so many seconds, 1 where nothing is said."""
    return {
        (trace, 1, 0.5): {name: Replay(name, 0.5, 1, 0, 0, 0, 0, took.get(name, 1.0), [], []) for name in names}
        for trace, took in seconds.items()
    }


def test_a_trace_left_out_is_judged_by_what_is_best_on_the_others(benchmark):
    """On a, half the hysteresis takes 70 % off; on b and c, double takes 20 % off."""
    names = [SHIPPED, "hysteresis x0.5", "hysteresis x2"]
    seconds = {"a": {"hysteresis x0.5": 0.3}, "b": {"hysteresis x2": 0.8}, "c": {"hysteresis x2": 0.8}}
    table = table_of(seconds, names)
    assert benchmark.left_out(table, names) == {"a": "hysteresis x2", "b": "hysteresis x0.5", "c": "hysteresis x0.5"}
    assert set(benchmark.left_out(table_of({"a": {}, "b": {}}, names), names).values()) == {SHIPPED}


def test_decayed_counts_are_judged_by_constants_that_are_best_on_the_others(benchmark):
    quick, slow = "16 steps, 1.5", "512 steps, 3"
    table = table_of({"a": {quick: 0.5}, "b": {slow: 0.8}}, [SHIPPED, *benchmark.decays()])
    for cell in table.values():
        cell |= {name: replace(result, hit_rate=0.5) for name, result in cell.items() if name != SHIPPED}
        cell[SHIPPED] = replace(cell[SHIPPED], hit_rate=0.6)
    a, b = benchmark.beside_decayed(table)
    assert (a["decayed"], a["link_time"], a["hindsight"], a["hindsight_link_time"]) == (slow, 1.0, quick, 2.0)
    assert (b["decayed"], b["link_time"], b["hindsight"], b["hindsight_link_time"]) == (quick, 1.0, slow, 1.25)
    assert a["hit_rate"] == pytest.approx(0.1)


def test_decayed_counts_follow_the_traffic_and_hold_still_for_less_than_the_threshold():
    layers = np.array([2]), np.array([10]), np.ones((1, 4), dtype=bool), 1
    policy, resident = DecayedCounts(*layers, decay_steps=100, threshold=3.0), np.array([[True, True, False, False]])
    hot = np.array([[0, 1, 1, 0]])
    for moved in (False, False, False, True):
        policy.observe(hot, 1)
        assert policy.decide(resident).promote.any() == moved
    assert policy.decide(resident).promote.tolist() == [[False, False, True, False]]
    assert policy.decide(resident).demote.tolist() == [[True, False, False, False]]


@pytest.fixture(scope="module")
def committed() -> dict[str, str]:
    return {path.stem: path.read_text() for path in (ROOT / "benchmarks" / "results" / "policy").glob("*.md")}


def test_the_readme_quotes_the_results(committed):
    goals = {name: (met, worst) for name, met, worst in re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", committed["goals"], re.M)}
    hit_rate, moves, link = (
        goals[name]
        for name in (
            "hit rate at least LRU's, within 0.5 points",
            "at most a quarter of LRU's moves",
            "step time at least 10 % below LRU's on average",
        )
    )
    assert hit_rate[1].startswith("+")
    cases, most = hit_rate[0].split(" of ")[1], moves[1].split()[0]
    mean = link[1].split()[1]
    said = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    assert (
        f"in each of {cases} cases with at most {most} of its moves, and reads {mean} of its bytes over the link on average"
        in said
    )


def test_the_results_are_those_of_this_benchmark(benchmark, committed):
    """A constant that is added, or a value that is changed, needs a new run."""
    for field in fields(Tuning):
        for factor in benchmark.FACTORS:
            value = getattr(TUNING, field.name)
            assert f"| `{field.name}` | {value:g} | {factor * value:g} |" in committed["tunings"]
    assert f"`INTERVAL_STEPS` {INTERVAL_STEPS}" in committed["goals"]


def test_the_design_document_refers_to_the_results_and_quotes_none_of_them():
    plan = (ROOT / "expert_offload_plan.md").read_text()
    section = plan.split("### Following the traffic")[1].split("\n#")[0]
    assert "benchmarks/results/policy/goals.md" in section
    assert not re.findall(r"\d(?:\.\d+)? ?%|\d+ of \d+|in \d+ of", section)
