"""The planner against published figures: the table is what the model predicts now, and every miss has its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import published
from sglang_uvm_offload.plan import explanation
from sglang_uvm_offload.plan.inputs import Assumptions
from sglang_uvm_offload.plan.machine import preset

CONFIGS = Path(__file__).parents[1] / "fixtures" / "models"
CONTENT = json.loads((published.HERE / "published.json").read_text())
MODELS = published.Models(CONFIGS, CONTENT["models"])
FIGURES = CONTENT["figures"]


def figure(source: str, **wanted: object) -> published.Figure:
    (found,) = [f for f in FIGURES if f["source"] == source and all(f.get(key) == value for key, value in wanted.items())]
    return found


@pytest.mark.slow
def test_the_table_is_what_the_model_predicts(tmp_path: Path) -> None:
    assert published.main([str(CONFIGS), "--out", str(tmp_path / "published.md")]) == 0
    assert (tmp_path / "published.md").read_text() == published.OUT.read_text()


def test_every_figure_has_a_source_and_every_source_a_figure() -> None:
    assert {each["source"] for each in FIGURES} == set(CONTENT["sources"])
    assert len([each for each in FIGURES if each["section"] != "own"]) >= 8
    for name, address in CONTENT["sources"].items():
        local = (published.OUT.parent / address).resolve()
        assert address.startswith("https://") or local.is_file(), name


def test_only_what_an_assumption_was_fitted_to_is_marked_as_fitted() -> None:
    fitted = [each["fitted"] for each in FIGURES if "fitted" in each]
    assert sorted(fitted) == ["latent_overhead_us", "latent_prefill_layer_ms", "layer_overhead_us", "prefill_layer_ms"]
    assert all(hasattr(Assumptions, name) for name in fitted)
    for each in (published.compare(each, MODELS) for each in FIGURES if "fitted" in each):
        assert each.ratios[0] == pytest.approx(1, abs=0.06), each.figure["what"]


def test_a_miss_without_a_reason_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = {**CONTENT, "figures": [each | {"published": each["published"] * 2} for each in FIGURES]}
    (tmp_path / "published.json").write_text(json.dumps(slower))
    monkeypatch.setattr(published, "HERE", tmp_path)
    assert published.main([str(CONFIGS), "--out", str(tmp_path / "published.md")]) == 1
    assert "off by more than 15% without a reason: DeepSeek-R1, 1 request" in capsys.readouterr().err
    assert not (tmp_path / "published.md").exists()


def test_a_range_misses_only_if_all_of_it_does() -> None:
    each = published.Compared({"published": 10.0, "what": "it"}, (8.0, 11.0))
    assert each.ratios == (0.8, 1.1)
    assert not each.missed
    assert published.Compared(each.figure, (8.0, 12.0)).missed
    assert published.unexplained([published.Compared(each.figure, (8.0,))]) == ["it"]
    assert not published.unexplained([published.Compared(each.figure | {"miss": "because"}, (8.0,))])


def test_a_range_begins_with_the_worst_published_link() -> None:
    seed = figure("seed", residents=200)
    machine, found = preset(seed["machine"]), published.hit_rates(MODELS[seed["model"]].family, 1, 200 / 256)
    usual, slow = (published.speed(seed, MODELS, found.lowest.rate, slow_link=slow) for slow in (False, True))
    missed = usual.missed_bytes / 1e9
    gained = missed / machine.link.slowest - missed / (machine.link_gbps * Assumptions.read_efficiency)
    assert slow.decode_step_s - usual.decode_step_s == pytest.approx(gained, rel=0.01)
    assert max(published.compare(seed, MODELS).predicted) == slow.decode_step_s / slow.resident_step_s


def test_each_unit_is_the_predictions_own() -> None:
    seed, r1 = figure("seed", residents=200), figure("R1 B200", requests=16)
    found = published.speed(r1, MODELS, 1.0)
    assert published.value(r1, found) == 1e3 * found.decode_step_s
    found = published.speed(seed, MODELS, 0.9)
    assert published.value(seed, found) == found.decode_step_s / found.resident_step_s
    assert published.value(figure("seed", residents=210), found) == pytest.approx(3.48 / found.decode_step_s)
    prompt = figure("GLM-5.2", section="prefill", machine="8xH200")
    found = published.speed(prompt, MODELS, 1.0)
    assert published.value(prompt, found) == pytest.approx(8192e3 / found.resident_prefill_tokens_s)
    assert published.value(prompt | {"unit": "tok/s"}, found) == found.resident_prefill_tokens_s


def test_the_rates_of_cpu_engines_that_a_plan_names_are_those_of_the_table() -> None:
    shares = [published.implied_share(each, MODELS) for each in FIGURES if each["section"] == "CPU engines"]
    named = re.findall(r"(?<!\d)\.\d\d", explanation.CPU_ENGINES)
    assert named == [f"{share:.2f}".lstrip("0") for share in shares]
    assert min(shares) < Assumptions().cpu_efficiency < max(shares)
    for source in ("KTransformers", "llama.cpp"):
        assert CONTENT["sources"][source] in explanation.CPU_ENGINES
