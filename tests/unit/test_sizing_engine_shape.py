"""When SGLang is asked for a model's shape, and what is said where it cannot be; and the page of shapes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from builders.true_shape import config_folder

from benchmarks import model_sizes
from sglang_uvm_offload.sizing import engine_shape
from sglang_uvm_offload.sizing.checkpoint import from_config, load
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, read_json

UNRULED = config_folder("Qwen/Qwen3.5-35B-A3B")
ROUNDED = (
    *("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5", "nvidia/Kimi-K2.5-NVFP4"),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct",
)
"""Models whose statement is rounded by more than 2 %."""


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_the_rules_serve_where_they_know_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "PROGRAM", "no.such.program")
    file = config_folder("Qwen/Qwen3-30B-A3B") / "config.json"
    assert engine_shape.load_any(file) == load(file)
    assert engine_shape.load_any(file.parent) == load(file)


def test_without_sglang_an_unknown_family_is_refused_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "installed", lambda: False)
    with pytest.raises(CheckpointError, match="tensors of a 'qwen3_5_moe_text' checkpoint are not known"):
        engine_shape.load_any(UNRULED)


def test_sglang_is_not_asked_for_what_neither_it_nor_transformers_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "shapes_by_engine", lambda paths: pytest.fail("SGLang is asked"))
    config = read_json(UNRULED / "config.json") | {"architectures": ["NoSuchModel"], "model_type": "../models"}
    del config["text_config"]["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="tensors of a None checkpoint are not known"):
        engine_shape.load_any(tmp_path)


@pytest.mark.sglang
def test_a_program_that_does_not_start_adds_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "installed", lambda: True)
    monkeypatch.setattr(engine_shape, "PROGRAM", "no.such.program")
    with pytest.raises(CheckpointError, match=r"are not known from its config.*does not start.*No module named 'no'"):
        engine_shape.load_any(UNRULED)


@pytest.mark.sglang
def test_a_program_that_does_not_end_adds_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shape, "installed", lambda: True)

    def never(module: str, *_: str, seconds: float) -> None:
        raise subprocess.TimeoutExpired(module, seconds)

    monkeypatch.setattr(engine_shape.child, "run_module", never)
    with pytest.raises(CheckpointError, match="did not build the model within 300 seconds"):
        engine_shape.load_any(UNRULED)


@pytest.mark.sglang
@pytest.mark.parametrize("damage", [b"{}", b"", b"null", b"[1", b"\xff\xfe", b'{"plain": {"layers": []}}', None])
def test_a_damaged_kept_shape_is_made_again(damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(engine_shape, "_run", lambda folders: asked.append(folders) or ['{"what": "the program prints"}'])
    for _ in range(2):
        assert engine_shape._printed([{"config.json": "{}"}]) == [{"what": "the program prints"}]
    assert len(asked) == 1
    (kept,) = tmp_path.glob("cache/sglang-uvm-offload/shapes/*")
    kept.write_bytes(kept.read_bytes()[:-1] if damage is None else damage)
    for _ in range(2):
        assert engine_shape._printed([{"config.json": "{}"}]) == [{"what": "the program prints"}]
    assert len(asked) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "active", "shared"),
    [
        ("deepseek-ai/DeepSeek-V3", 37.55e9, 58 * 3 * 7168 * 2048),
        ("Qwen/Qwen3-30B-A3B", 3.35e9, 0),
        ("mistralai/Mixtral-8x7B-v0.1", 12.88e9, 0),
    ],
)
def test_weights_that_a_token_uses_are_counted_by_the_rules_too(model: str, active: float, shared: int) -> None:
    shape = from_config(model, read_json(config_folder(model) / "config.json"))
    assert shape.active_parameters == pytest.approx(active, rel=0.001)
    assert shape.shared_parameters == shared


@pytest.mark.slow
def test_lists_of_one_number_a_layer_are_read() -> None:
    """As Hunyuan-A13B and ERNIE-4.5-VL write them; the plan takes the most of any layer."""
    config = read_json(config_folder("Qwen/Qwen3-30B-A3B") / "config.json")
    lists = {"num_experts_per_tok": [8] * 47 + [4], "num_experts": [128] * 48, "moe_intermediate_size": [768] * 48}
    with pytest.raises(CheckpointError, match="not a size"):
        from_config("model", config | {"hidden_size": [2048]})
    for name, value in lists.items():
        if name != "moe_intermediate_size":
            shape = from_config("model", config | {name: value})
            assert (shape.num_experts, shape.top_k) == (128, 8)


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
