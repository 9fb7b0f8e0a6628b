"""What a launch changes of a checkpoint: values of its config, and the format of its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from builders.true_shape import checkpoint, config_folder
from checkpoints import Checkpoints
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.conversion import Conversion, conversion
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.overrides import overridden
from sglang_uvm_offload.sizing.safetensors_header import read_json

pytestmark = pytest.mark.sglang

BF16, FP8 = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-FP8"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stored")
    return {model: checkpoint(model, folder / model.rpartition("/")[2]) for model in (BF16, FP8)}


@pytest.mark.parametrize(
    ("method", "stated"),
    [
        (None, "none"),
        ("fp8", "fp8"),
        ("modelopt_fp4", "modelopt_fp4"),
        ("modelopt_fp4", "not stated"),
        ("moe_wna16", "gptq"),
        ("awq_marlin", "awq"),
        ("w8a8_int8", "compressed-tensors"),
    ],
)
def test_a_method_that_confirms_what_the_checkpoint_is_converts_nothing(method, stated):
    assert conversion(method, stated) is None


@pytest.mark.parametrize(
    ("method", "stated"), [("fp8", "none"), ("modelopt_fp4", "fp8"), ("quark_mxfp4", "modelopt_fp4"), ("nvfp4_online", "fp8")]
)
def test_a_method_that_converts_is_named(method, stated):
    assert str(conversion(method, stated)).startswith(f"--quantization {method} converts the checkpoint as it loads")


def test_what_is_converted_to_fp8_takes_what_an_fp8_checkpoint_takes(stored):
    published = load(stored[FP8])
    made = Conversion("fp8", "none").applied(load(stored[BF16], "bfloat16"))
    assert made.expert_bytes == pytest.approx(published.expert_bytes, rel=0.001)  # but for the scales of its blocks
    for each, dense in zip(published.layers, made.layers, strict=True):
        assert each.attention <= dense.attention, "of the others none is counted as converted"
        assert each.replicated <= dense.replicated
    assert published.total_bytes < made.total_bytes


@pytest.mark.parametrize(("model", "method"), [(BF16, "modelopt_fp4"), (FP8, "nvfp4_online")])
def test_methods_for_experts_leave_the_rest_as_it_is(stored, model, method):
    before = load(stored[model], "bfloat16")
    made = Conversion(method, before.quantization).applied(before)
    weights = before.expert_parameters * before.num_experts * len(before.moe_layers)
    assert made.expert_bytes == pytest.approx(weights * 4.5 / 8, rel=0.001)
    assert [layer.attention for layer in made.layers] == [layer.attention for layer in before.layers]
    assert before.total_bytes - made.total_bytes == before.expert_bytes - made.expert_bytes


def test_what_a_method_that_is_not_known_makes_is_not_guessed(stored):
    before = load(stored[BF16], "bfloat16")
    assert Conversion("some_new_one", "none").applied(before) == before


def test_plan_counts_what_the_flag_converts(stored, capsys):
    def planned(*flags: str) -> dict[str, object]:
        assert main(["plan", str(stored[BF16]), "--machine", "1xH200", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    plain, converted = planned(), planned("--quantization", "fp8")
    assert converted["expert_bytes"] == pytest.approx(plain["expert_bytes"] / 2, rel=0.001)
    assert any("--quantization fp8 converts the checkpoint as it loads" in note for note in converted["notes"])


def test_plan_takes_a_config_alone_for_no_proof_that_modelopt_left_the_weights_as_they_were(capsys):
    assert (
        main(["plan", str(config_folder(BF16) / "config.json"), "--machine", "1xH200", "--quantization", "modelopt_fp4"]) == 2
    )
    assert "nothing states that the checkpoint is quantised" in capsys.readouterr().err


# Values of the config


@pytest.mark.parametrize(
    ("model", "part", "changed"),
    [
        ("Qwen/Qwen3.5-35B-A3B", "text_config", {"num_experts_per_tok": 4}),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "linear_attn_config", {"kda_layers": [1, 2]}),
        ("Qwen/Qwen3-30B-A3B-FP8", "quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_a_part_of_a_config_is_changed_or_replaced_as_by_sglang(model, part, changed):
    theirs = getattr(get_config(str(config_folder(model)), False, model_override_args={part: changed}), part)
    ours = overridden(read_json(config_folder(model) / "config.json"), json.dumps({part: changed}))[part]
    if part == "text_config":
        assert [ours[name] for name in ("num_experts_per_tok", "num_experts")] == [4, 256]
        assert (theirs.num_experts_per_tok, theirs.num_experts) == (4, 256)
    else:
        assert ours == theirs == changed


def test_overrides_are_values_by_name():
    config = {
        "a": 1,
        "rope_scaling": {"factor": 2, "type": "yarn"},
        "text_config": {"b": 1, "c": 2},
        "quantization_config": {"d": 1},
    }
    changed = '{"a": 2, "rope_scaling": {"factor": 4}, "text_config": {"b": 3}, "quantization_config": {"e": 1}, "f": {"g": 1}}'
    assert overridden(config, changed) == {
        **{"a": 2, "rope_scaling": {"factor": 4, "type": "yarn"}, "text_config": {"b": 3, "c": 2}},
        **{"quantization_config": {"e": 1}, "f": {"g": 1}},
    }
    assert overridden(config, "") == overridden(config, "{}") == config


def test_a_launch_with_fewer_layers_loads_fewer(checkpoints: Checkpoints):
    folder = checkpoints("qwen3_moe")
    whole, half = (ModelFiles(str(folder), overrides=text).shape() for text in ("", '{"num_hidden_layers": 2}'))
    assert half.num_layers == 2 < whole.num_layers
    assert half.layers == whole.layers[:2]


def test_weights_in_a_servers_own_form_are_counted_by_the_config(checkpoints: Checkpoints, tmp_path: Path):
    folder = checkpoints("qwen3_moe")
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model-rank-0-part-0.safetensors").write_bytes(b"in a form of its own")
    described = ModelFiles(str(tmp_path)).described("bfloat16")
    assert described.expert_bytes == load(folder, "bfloat16").expert_bytes
