"""Published configurations by SGLang's own classes: what they hold is what their publishers state, and the page says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from builders.hostile import Hostile
from builders.true_shape import CONFIGS, config_folder

from benchmarks import model_sizes
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.sizing.checkpoint import from_config
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape
from sglang_uvm_offload.sizing.engine_shape import shapes_by_engine
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, read_json

SAMPLE = (
    *("Qwen/Qwen3.5-35B-A3B", "MiniMaxAI/MiniMax-M2.5", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "openai/gpt-oss-20b"),
    *("moonshotai/Kimi-Linear-48B-A3B-Instruct", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "google/gemma-4-26B-A4B"),
    *("nvidia/Qwen3-235B-A22B-NVFP4", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B-FP8"),
)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointShape]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        folders = {model: config_folder(model) for model in SAMPLE}
        made = dict(zip(SAMPLE, shapes_by_engine(folders), strict=True))
        patch.setattr("sglang_uvm_offload.sizing.engine_shape.PROGRAM", "no.such.program")
        assert made == dict(zip(SAMPLE, shapes_by_engine(folders), strict=True)), "it is kept"
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("model", SAMPLE)
def test_the_page_has_what_the_program_makes(model: str, shapes: dict[str, CheckpointShape]) -> None:
    row = model_sizes.row(model, shapes[model])
    assert row.line() in model_sizes.OUT.read_text()
    assert abs(row.difference) <= model_sizes.WITHIN or model == "moonshotai/Kimi-Linear-48B-A3B-Instruct"


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B-FP8", "openai/gpt-oss-20b"])
def test_sglangs_class_and_the_rules_say_the_same(model: str, shapes: dict[str, CheckpointShape]) -> None:
    """Of families that have both: experts to the byte but for scales, which SGLang holds apart for a layer; weights to 1 %."""
    built, ruled = shapes[model], from_config(model, read_json(config_folder(model) / "config.json"))
    for one in (
        "num_layers",
        "num_experts",
        "top_k",
        "context_length",
        "hidden_size",
        "expert_size",
        "heads",
        "kv",
        "scale_block",
    ):
        assert getattr(built, one) == getattr(ruled, one), one
    assert built.moe_layers == ruled.moe_layers
    for one in ("expert_bytes", "total_bytes", "active_parameters", "embedding", "head", "expert_parameters"):
        assert getattr(built, one) == pytest.approx(getattr(ruled, one), rel=0.01), one
    for mine, theirs in zip(built.layers, ruled.layers, strict=True):
        parts = {part.name: part for part in mine.experts}
        for part in theirs.experts:
            if part.name.endswith("weight"):
                assert parts[part.name].split == part.split
                assert parts[part.name].nbytes == pytest.approx(part.nbytes, rel=0.07)  # gpt-oss keeps scales in tensors beside
        assert mine.attention + mine.keys_values == pytest.approx(theirs.attention + theirs.keys_values, rel=0.01)
        assert mine.keys_values == pytest.approx(theirs.keys_values, rel=0.01)
        assert mine.feed_forward == pytest.approx(theirs.feed_forward, rel=0.01)


@pytest.mark.nightly
def test_layers_are_what_they_are(shapes: dict[str, CheckpointShape]) -> None:
    nemotron = shapes["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]
    pattern = read_json(config_folder(nemotron.name) / "config.json")["hybrid_override_pattern"]
    assert list(nemotron.moe_layers) == [index for index, kind in enumerate(pattern) if kind == "E"]
    assert nemotron.kv.state_layers == {index for index, kind in enumerate(pattern) if kind == "M"}
    assert nemotron.kv.empty_layers == {index for index, kind in enumerate(pattern) if kind not in "M*"}
    linear = shapes["moonshotai/Kimi-Linear-48B-A3B-Instruct"]
    config = read_json(config_folder(linear.name) / "config.json")
    assert linear.total_parameters == 49_122_681_728  # as counted in its files: tests/fixtures/configs/README.md
    assert set(range(27)) - linear.kv.state_layers == {n - 1 for n in config["linear_attn_config"]["full_attn_layers"]}
    assert linear.shared_parameters == 26 * 3 * config["hidden_size"] * config["moe_intermediate_size"]


@pytest.mark.nightly
def test_draft_layers_are_apart(shapes: dict[str, CheckpointShape]) -> None:
    for model, experts in (("deepseek-ai/DeepSeek-V3", 256), ("Qwen/Qwen3.5-35B-A3B", 256)):
        (draft,) = shapes[model].draft_layers
        assert draft.index == shapes[model].num_layers
        assert draft.expert_bytes == pytest.approx(shapes[model].layers[-1].expert_bytes)
        assert shapes[model].draft_parameters > experts * shapes[model].expert_parameters


@pytest.mark.nightly
def test_packed_weights_are_counted_one_by_one(shapes: dict[str, CheckpointShape]) -> None:
    packed = shapes["nvidia/Qwen3-235B-A22B-NVFP4"]
    assert packed.quantization == "modelopt_fp4"
    assert packed.total_parameters == pytest.approx(235e9, rel=0.001)
    assert packed.expert_bytes == pytest.approx(227e9 * (0.5 + 1 / 16), rel=0.002)  # four bits, and a byte for 16 of them


def test_plan_prints_what_a_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder of a checkpoint that holds code under the names of libraries, of which none runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hostile = Hostile(tmp_path / "model")
    shutil.copy(config_folder("Qwen/Qwen3-Next-80B-A3B-Thinking") / "config.json", hostile.folder)
    monkeypatch.chdir(hostile.folder)
    assert main(["plan", "config.json", "--machine", "1xH200", "--json"]) == 0
    assert hostile.ran == []
    planned = json.loads(capsys.readouterr().out)
    assert planned["total_parameters"] == pytest.approx(80e9, rel=0.02)
    assert planned["active_parameters"] == pytest.approx(3.9e9, rel=0.02)
    assert planned["shared_parameters"] == pytest.approx(48 * 3 * 2048 * 512, rel=0.001)
    assert (planned["num_experts"], planned["top_k"], planned["moe_layers"]) == (512, 10, 48)


def test_what_sglang_does_not_build_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = read_json(config_folder("Qwen/Qwen3.5-35B-A3B") / "config.json") | {"architectures": ["NoSuchModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"SGLang does not build the model: .*NoSuchModel"):
        shapes_by_engine({"it": tmp_path})
    assert not list(tmp_path.rglob("shapes/*")), "an error may pass"


@pytest.mark.nightly
def test_the_page_is_the_programs(tmp_path: Path) -> None:
    assert model_sizes.main([str(CONFIGS), "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == model_sizes.OUT.read_text()
