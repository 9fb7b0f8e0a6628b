"""Hit rates of measured routing: the shipped curves, how a plan reads them, and the script that makes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import routing_curves as made
from sglang_uvm_offload.plan import routing_curves
from sglang_uvm_offload.plan.routing_curves import hit_rates, source_of
from sglang_uvm_offload.replay.simulator import replay, slot_splits
from sglang_uvm_offload.residency.slot_split import default_share
from sglang_uvm_offload.routing.trace import Trace

CONTENT = json.loads(made.OUT.read_text())
CURVES = [(curve, policy) for curve in CONTENT["curves"] for policy in routing_curves.POLICIES if policy in curve]


def curve_of(trace: str, requests: int) -> dict[str, list[float]]:
    (found,) = [c for c in CONTENT["curves"] if c["traces"] == [trace] and c["requests"] == requests and "warmup" in c]
    return found


# What ships


def test_every_curve_rises_with_residency_and_beats_chance() -> None:
    for curve, policy in CURVES:
        rates = curve[policy]
        assert rates == sorted(rates)
        assert len(rates) == len(CONTENT["residencies"])
        assert all(rate > residency for rate, residency in zip(rates, CONTENT["residencies"], strict=True))


def test_every_curve_has_traces_with_a_source_and_the_file_is_small() -> None:
    assert {trace for curve, _ in CURVES for trace in curve["traces"]} == set(CONTENT["traces"]) == set(made.SOURCES)
    for name, trace in CONTENT["traces"].items():
        assert trace["source"] == made.SOURCES[name].text
        assert trace["families"] == list(made.SOURCES[name].families)
        assert len(trace["sha256"]) == 16
        assert source_of(name).startswith(f"{name} ({trace['model']}, {trace['top_k']} of {trace['experts']} experts a token;")
    assert made.OUT.stat().st_size < 8192


def test_a_curve_with_slots_is_of_the_share_that_auto_takes_for_the_model() -> None:
    assert {default_share(trace["experts"]) for trace in CONTENT["traces"].values()} == {routing_curves.MEASURED_SHARE}
    assert all(("slots" in curve) != ("other_slots" in curve) for curve in CONTENT["curves"])


# Reading them


def test_a_measured_point_is_read_as_it_is_and_points_between_by_a_line() -> None:
    warmup = curve_of("dsv2lite-summary", 1)["warmup"]
    assert hit_rates("deepseek_v3", 1, 0.5).lowest.rate == warmup[3]
    assert hit_rates("deepseek_v3", 1, 0.5625).lowest.rate == pytest.approx((warmup[3] + warmup[4]) / 2)
    assert hit_rates("deepseek_v3", 1, 0.0625).other.rate == pytest.approx(hit_rates("deepseek_v3", 1, 0.125).other.rate / 2)
    for residency in (0, 1):
        found = hit_rates("deepseek_v3", 1, residency)
        assert {found.other.rate, found.lowest.rate, found.highest.rate} == {residency}


def test_the_curves_are_those_of_the_models_kind_or_of_all() -> None:
    assert hit_rates("gpt_oss", 1, 0.5).lowest.traces == hit_rates("gpt_oss", 1, 0.5).highest.traces == ("gpt-oss-20b-decode",)
    assert hit_rates("glm_moe_dsa", 1, 0.5).highest.traces == ("dsv2lite-translation",)
    unknown = hit_rates("qwen3_moe", 1, 0.5)
    assert (unknown.lowest.traces, unknown.highest.traces) == (("dsv2lite-summary",), ("gpt-oss-20b-decode",))


def test_the_number_of_requests_is_the_nearest_that_was_measured() -> None:
    assert [hit_rates("gpt_oss", n, 0.5).lowest.requests for n in (1, 3, 7, 9, 500)] == [1, 4, 4, 16, 16]
    assert hit_rates("gpt_oss", 1, 0.5).highest.rate > hit_rates("gpt_oss", 16, 0.5).highest.rate
    found = hit_rates("gpt_oss", 16, 0.5).highest
    assert found.described() == "residents that follow the traffic, 16 at once: gpt-oss-20b-decode"
    assert found.policy in routing_curves.POLICIES


def test_with_slots_the_curves_are_those_with_slots() -> None:
    one = curve_of("dsv2lite-summary", 1)
    found = hit_rates("deepseek_v3", 1, 0.5, slot_share=1.0)
    assert (found.lowest.rate, found.lowest.policy) == (one["slots"][3], "slots")
    assert found.highest.rate == curve_of("dsv2lite-translation", 1)["slots"][3]
    (other,) = [curve for curve in CONTENT["curves"] if "other" in curve]
    assert (found.other.rate, found.other.policy) == (other["other_slots"][3], "other_slots")
    few = hit_rates("deepseek_v3", 1, 0.5, slot_share=0.5).lowest.rate
    assert few == pytest.approx((one["warmup"][3] + one["slots"][3]) / 2), "half the measured share brings half"
    assert found.lowest.described() == "slots alone, 1 at once: dsv2lite-summary"


# Making them


def small_trace(seed: int, requests: int = 12) -> Trace:
    rng = np.random.default_rng(seed)
    picks = np.stack([np.argsort(rng.random((requests * 8, 8)) * np.arange(1, 9) ** 2)[:, :2] for _ in range(2)], axis=1)
    return Trace(picks, np.full(requests, 8), 8)


@pytest.mark.slow
def test_at_one_request_a_curve_is_what_replay_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "RESIDENCIES", (0.25, 0.5))
    trace = small_trace(1)
    one, four = made.curves("small", trace)
    assert (one["requests"], four["requests"]) == (1, 4), "of six judged requests no 16 run at once"
    for policy, name in (("warmup", "static"), ("continuous", "adaptive")):
        assert one[policy] == [round(replay(trace, name, residency).hit_rate, 3) for residency in (0.25, 0.5)]
    splits = [split for residency in (0.25, 0.5) for split in slot_splits(trace, residency) if split.slot_share == 0.5]
    assert one["slots"] == [round(split.hit_rate, 3) for split in splits]


def test_tokens_that_share_an_expert_count_each() -> None:
    ids = np.zeros((8, 1, 1), dtype=int)
    ids[6:] = 1
    trace = Trace(ids, np.full(4, 2), 4)
    counts = made.uses(trace, np.array([[4, 6], [5, -1]]))
    assert counts[:, 0].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    shared = made.uses(trace, np.array([[0, 2, 4]]))
    assert shared[0, 0].tolist() == [3, 0, 0, 0]
    (rate,) = {made.hit_rate(made.Fixed(np.array([[True, False, False, False]])), [], shared > 0, shared)}
    assert rate == 1.0
    both = made.uses(trace, np.array([[0, 2, 6]]))
    assert made.hit_rate(made.Fixed(np.array([[True, False, False, False]])), [], both > 0, both) == pytest.approx(2 / 3)


def test_other_traffic_is_judged_with_residents_of_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    source = made.Source("m", ("f",), "nowhere")
    monkeypatch.setattr(made, "SOURCES", {"a": source, "b": source, "c": made.Source("n", (), "")})
    monkeypatch.setattr(made, "RESIDENCIES", (0.5,))
    apart = {
        "a": Trace(np.zeros((8, 1, 1), dtype=int), np.full(4, 2), 2),
        "b": Trace(np.ones((8, 1, 1), dtype=int), np.full(4, 2), 2),
    }
    assert list(made.other(apart, "m")) == [{"traces": ["a", "b"], "requests": 1, "other": [0.0], "other_slots": [0.0]}]
    assert next(iter(made.other(apart | {"b": apart["a"]}, "m")))["other"] == [1.0]
    assert not list(made.other({"c": small_trace(1)}, "n")), "no second trace of that model"


@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_the_skew_of_a_trace_is_that_of_its_experts_probabilities(skew: float) -> None:
    """Half of the experts are never offloaded; among the others probabilities vary as much as a beta distribution's."""
    rng, experts, layers, requests = np.random.default_rng(0), 128, 2, 60
    likely = rng.beta(2, 30, (layers, experts // 2)) if skew else np.full((layers, experts // 2), 1 / 16)
    resident = np.ones((layers, experts // 2))
    odds = np.concatenate([resident, likely / likely.mean() / 16], axis=1)
    ids = np.argsort(np.log(rng.random((requests * 20, layers, experts))) / odds, axis=2)[:, :, -6:]
    found = made.expert_skew(Trace(ids, np.full(requests, 20), experts))
    assert found == pytest.approx(skew, abs=0.12)


def test_the_script_writes_what_a_plan_reads_and_refuses_a_trace_without_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(made, "RESIDENCIES", (0.5,))
    for name in ("dsv2lite-intent", "dsv2lite-summary"):
        small_trace(len(name)).save(tmp_path / f"{name}.npz")
    out = tmp_path / "out.json"
    names = [str(tmp_path / f"{name}.npz") for name in ("dsv2lite-summary", "dsv2lite-intent")]
    assert made.main([*names, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert set(content) == set(CONTENT)
    assert list(content["traces"]) == ["dsv2lite-intent", "dsv2lite-summary"]
    assert [sorted(curve) for curve in content["curves"]] == 4 * [["continuous", "requests", "slots", "traces", "warmup"]] + [
        ["other", "other_slots", "requests", "traces"]
    ]
    small_trace(1).save(tmp_path / "mine.npz")
    with pytest.raises(SystemExit):
        made.main([str(tmp_path / "mine.npz"), "--out", str(out)])
    assert "no source is recorded for mine" in capsys.readouterr().err
