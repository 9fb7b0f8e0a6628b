"""How SGLang finds a model's shape and what errors say where it cannot. Recorded shapes, and the page of them, against what
publishers state."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from builders.shapes import asking_sglang
from builders.true_shape import config_folder

from benchmarks import model_sizes
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.plan import engine_shape
from sglang_uvm_offload.plan.engine_shape import shape_of, shape_of_config
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, NoExperts

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
QWEN3 = config_folder("Qwen/Qwen3-30B-A3B")
ROUNDED = (
    *("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5", "nvidia/Kimi-K2.5-NVFP4"),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct",
)
"""Models whose statement is rounded by more than 2 %."""


def fixture(name: str) -> Any:
    return json.loads((MODELS / f"{name}.json").read_text())


def qwen3() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((QWEN3 / "config.json").read_text())
    return config


# What is asked, and kept


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, str]]]:
    """What an SGLang is asked for that answers with the shape of Qwen3-30B-A3B."""
    line, found = msgspec.json.encode(shape_of(QWEN3)), list[dict[str, str]]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_shape, "_run", lambda files: found.extend(files) or [line] * len(files))
    monkeypatch.setattr(engine_shape, "_check_known", lambda config: None)
    with asking_sglang():
        monkeypatch.setattr(engine_shape, "_version", lambda: "1.2.3")
        yield found


def test_sglang_is_asked_once_for_a_configuration_and_arguments(asked: list[dict[str, str]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen3()))
    for _ in range(2):
        assert shape_of(tmp_path).name == str(tmp_path)
        assert shape_of(tmp_path / "config.json").name == str(tmp_path)
        assert shape_of(tmp_path, "named", quantization="fp8", dtype=None).name == "named"
    assert [json.loads(each["arguments.json"]) for each in asked] == [{}, {"quantization": "fp8"}]
    assert json.loads(asked[0]["config.json"]) == qwen3()
    (tmp_path / "hf_quant_config.json").write_text("{}")
    shape_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(qwen3() | {"vocab_size": 1}))
    shape_of(tmp_path)
    assert len(asked) == 4


@pytest.mark.parametrize("damage", [b"{}", b"", b"\xff\xfe", None])
def test_a_damaged_kept_shape_is_made_again(damage: bytes | None, asked: list[dict[str, str]], tmp_path: Path) -> None:
    found = [shape_of(QWEN3) for _ in range(2)]
    assert len(asked) == 1
    (kept,) = tmp_path.glob("cache/sglang-uvm-offload/shapes/*")
    kept.write_bytes(kept.read_bytes()[:-1] if damage is None else damage)
    found += [shape_of(QWEN3) for _ in range(2)]
    assert len(asked) == 2
    assert all(each == found[0] for each in found)


# What is not known


def test_without_sglang_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "_version", lambda: "")
    with pytest.raises(CheckpointError, match="SGLang is not installed"):
        shape_of(QWEN3)


@pytest.mark.parametrize("named", [["NoSuchModel"], None, [3], "Qwen3MoeForCausalLM"])
def test_sglang_is_not_asked_for_what_neither_it_nor_transformers_has(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "_run", lambda files: pytest.fail("SGLang is asked"))
    for model_type in ("../models", None, "no_such_moe", ["qwen3_moe"]):
        with pytest.raises(CheckpointError, match="has no class for the model, whose config names "):
            shape_of_config("it", qwen3() | {"architectures": named, "model_type": model_type})


@pytest.mark.sglang
def test_a_program_that_does_not_start_or_end_adds_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "PROGRAM", "no.such.program")
    with pytest.raises(CheckpointError, match=r"SGLang does not start for building the model: .*No module named 'no'"):
        shape_of(QWEN3, dtype="of a test")
    monkeypatch.setattr(engine_shape.child, "run_module", Mock(side_effect=subprocess.TimeoutExpired("program", 1)))
    with pytest.raises(CheckpointError, match=f"did not build the model within {engine_shape.MOST_SECONDS} seconds"):
        shape_of(QWEN3, dtype="of a test")


def test_what_sglang_says_is_one_line_and_kept_for_this_process_alone(
    asked: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = "ValueError: one\n\x1b[2Jtwo " + "three " * 1000
    lines = iter([json.dumps({"error": words}).encode(), json.dumps({"dense": "Q has no routed experts"}).encode()])
    monkeypatch.setattr(engine_shape, "_run", lambda files: [next(lines)])
    monkeypatch.setattr(engine_shape, "_failed", {})
    for _ in range(2):
        assert main(["plan", str(QWEN3), "--machine", "1xH200"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            "sglang-uvm-offload plan: error: SGLang does not build the model: ValueError: one ?[2Jtwo three "
        )
        assert len(line) < 400
    with pytest.raises(NoExperts, match="no routed experts"):
        shape_of(QWEN3, dtype="float16")
    assert not list(tmp_path.rglob("shapes/*")), "an error may pass"


@pytest.mark.parametrize("text", ["[]", '{"config": 3}', "{", "[" * 100_000, "\xff", '{"a": 1, "a": 2}'])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(CheckpointError, match=r"JSON list|its config is not an object|not JSON"):
            shape_of(path)


@pytest.mark.parametrize("layers", [0, 1 << 40, 1e300])
def test_numbers_of_layers_that_take_for_ever_are_refused_at_once(layers: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "_run", lambda files: pytest.fail("SGLang is asked"))
    config = qwen3() | {"num_hidden_layers": layers}
    for each in (config, {**config, "num_hidden_layers": 2, "text_config": config}):
        with pytest.raises(CheckpointError, match=r"num_hidden_layers is .*, not a number from 1 to 4096"):
            shape_of_config("it", each)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_experts": 1 << 17}, "48 layers of 131072 experts"),
        ({"num_experts": 1 << 14}, "48 layers of 16384 experts, more than 262144 in all"),
        ({"top_k": 129}, "routes a token to 129 of 128 experts"),
        ({"top_k": 0}, "top_k is 0"),
        ({"context_length": -4096}, "context_length is -4096"),
    ],
)
def test_a_model_that_sglang_builds_and_none_can_be_is_refused(changed: dict[str, int], reason: str) -> None:
    shape = json.loads(msgspec.json.encode(shape_of(QWEN3)))
    with pytest.raises(CheckpointError, match=reason):
        engine_shape._shape(json.dumps(shape | changed).encode())


# Published totals


@pytest.mark.parametrize("name", NAMES)
def test_totals_are_the_published_ones(name: str) -> None:
    """Published files also have the draft layers' copies of the vocabulary, and their headers."""
    published, shape = fixture(name)["published"], shape_of(MODELS / f"{name}.json")
    copies = (shape.embedding + shape.head) * bool(shape.draft_layers)
    assert published["source"].startswith("https://")
    if "parameters" in published:
        assert shape.total_parameters == pytest.approx(published["parameters"], rel=0.006)
    if "served_parameters" in published:
        assert shape.total_parameters - shape.draft_parameters == pytest.approx(published["served_parameters"], rel=0.01)
    if "bytes" in published:
        assert shape.total_bytes + copies == pytest.approx(published["bytes"], rel=0.011)
    layers = sum(layer.nbytes for layer in (*shape.layers, *shape.draft_layers))
    assert layers + shape.embedding + shape.head + shape.other == shape.total_bytes


def test_documents_say_how_large_the_experts_of_deepseek_v3s_draft_layer_are() -> None:
    (draft,) = shape_of(MODELS / "deepseek-v3.json").draft_layers
    size = f"{draft.expert_bytes / 2**30:.1f} GiB"
    root = MODELS.parents[2]
    assert f"(DeepSeek-V3's take {size})" in (root / "docs/flags.md").read_text()
    assert f"(DeepSeek-V3's have {size})" in (root / "CHANGELOG.md").read_text()


def test_the_page_compares_with_what_is_stated() -> None:
    page = model_sizes.OUT.read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and "/" in line.split("|")[1]]
    assert [row[0] for row in rows] == list(model_sizes.PUBLISHED)
    assert len(rows) >= 40
    for model, total, stated, _, _, active, *_, source in rows:
        published = model_sizes.PUBLISHED[model]
        assert (float(stated), float(active)) == (published["total"], published["active"])
        assert f"({published['source']})" in source
        if model not in ROUNDED:
            assert float(total) == pytest.approx(published["total"], rel=model_sizes.WITHIN)
    near = sum(abs(float(total) / float(stated) - 1) <= model_sizes.WITHIN for _, total, stated, *_ in rows)
    assert f"{near} of {len(rows)} totals" in page
    assert json.loads((model_sizes.HERE / "model_sizes.json").read_text())["models"] == model_sizes.PUBLISHED
