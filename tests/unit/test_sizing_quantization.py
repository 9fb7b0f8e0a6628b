"""Which quantisation a checkpoint states, in which file, and which tensors it then has."""

from __future__ import annotations

import json
import shutil

import pytest
from builders.true_shape import CONFIGS, checkpoint, config_folder

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.sizing.checkpoint import from_config, load
from sglang_uvm_offload.sizing.config_tensors import tensors_of
from sglang_uvm_offload.sizing.quantization import quantization_of, read_config
from sglang_uvm_offload.sizing.quantized_linear import QuantizedLinear, UnknownTensors
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError
from sglang_uvm_offload.sizing.text_config import text_config

QWEN = "nvidia/Qwen3-235B-A22B-NVFP4"
BESIDE = "hf_quant_config.json"
MACHINE = ["--machine", "8xH20"]


@pytest.mark.parametrize("folder", sorted(CONFIGS.glob("nvidia--*-NVFP4")), ids=lambda folder: folder.name)
def test_a_checkpoint_of_modelopt_is_what_its_files_state(folder):
    quant = quantization_of(text_config(read_config(folder / "config.json")))
    assert quant["quant_method"] == ("modelopt_mixed" if "Qwen3.6" in folder.name else "modelopt_fp4")


@pytest.mark.slow
def test_nvfp4_that_is_stated_beside_the_config_takes_a_third_of_the_bytes():
    plain, packed = load(config_folder("Qwen/Qwen3-235B-A22B") / "config.json"), load(config_folder(QWEN) / "config.json")
    assert (packed.quantization, packed.quantization_from) == ("modelopt_fp4", BESIDE)
    assert packed.total_parameters == plain.total_parameters
    assert packed.total_bytes == pytest.approx(134e9, rel=0.005)  # 470 GB without it
    parts = {part.name: part.nbytes for part in packed.layers[0].experts}
    hidden, size = 4096, 1536
    assert parts["w2.weight"] == hidden * size // 2
    assert parts["w2.weight_scale"] == hidden * size // 16
    assert parts["w13.weight_scale_2"] == 2 * 4


@pytest.mark.slow
def test_kimi_k2_5_takes_the_disk_that_is_stated_of_the_same_layers():
    """Some 600 GB of Kimi-K2-Thinking, in the same format:
    https://github.com/kvcache-ai/ktransformers/blob/15c624dcaeabddcf4cba83756737d9df22a6adf1/doc/en/kt-kernel/Kimi-K2-Thinking-Native.md"""
    assert load(config_folder("moonshotai/Kimi-K2.5") / "config.json").total_bytes == pytest.approx(600e9, rel=0.02)


@pytest.mark.slow
def test_modules_that_are_excluded_keep_their_dtype():
    tensors = {
        t.name: t.dtype for t in tensors_of(text_config(read_config(config_folder("nvidia/GLM-5.1-NVFP4") / "config.json")))
    }
    assert tensors["model.layers.0.mlp.gate_proj.weight"] == "BF16"
    assert tensors["model.layers.10.mlp.shared_experts.up_proj.weight"] == "BF16"
    assert tensors["model.layers.10.mlp.experts.3.up_proj.weight"] == "U8"
    assert tensors["model.layers.78.mlp.experts.3.up_proj.weight"] == "BF16"


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_the_plan_says_which_file_decided(tmp_path, capsys, packed):
    shutil.copytree(config_folder(QWEN), tmp_path / "model")
    if not packed:
        (tmp_path / "model" / BESIDE).unlink()
    main(["plan", str(tmp_path / "model" / "config.json"), *MACHINE])
    expected = f"modelopt_fp4, by {BESIDE}" if packed else "none, by config.json"
    assert f"quantisation: {expected}" in capsys.readouterr().out
    main(["plan", str(tmp_path / "model" / "config.json"), *MACHINE, "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert f"{plan['quantization']}, by {plan['quantization_from']}" == expected


@pytest.mark.parametrize(
    ("flag", "model", "reason"),
    [
        ("modelopt_fp4", "Qwen/Qwen3-235B-A22B", "nothing states"),
        ("awq", "Qwen/Qwen3-235B-A22B", "nothing states"),
        ("fp8", QWEN, "modelopt_fp4 by hf_quant_config.json"),
    ],
)
def test_a_flag_that_no_file_bears_out_is_refused_by_the_plan(capsys, flag, model, reason):
    assert main(["plan", str(config_folder(model) / "config.json"), *MACHINE, "--quantization", flag]) == 2
    error = capsys.readouterr().err
    assert f"--quantization {flag}" in error
    assert reason in error


@pytest.mark.parametrize("flag", ["modelopt", "modelopt_fp4"])
def test_a_flag_that_names_what_the_files_state_changes_nothing(capsys, flag):
    for arguments in ([], ["--quantization", flag]):
        main(["plan", str(config_folder(QWEN) / "config.json"), *MACHINE, "--json", *arguments])
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]


@pytest.mark.slow
def test_headers_decide_where_no_file_states_a_quantisation(tmp_path):
    folder = checkpoint(QWEN, tmp_path / "model")
    stated = load(folder)
    (folder / BESIDE).unlink()
    shape = load(folder)
    assert (shape.quantization, shape.quantization_from) == ("not stated", "the headers of its tensors")
    assert (shape.total_bytes, shape.expert_bytes) == (stated.total_bytes, stated.expert_bytes)


# SGLang 0.5.23's create_weights, per method: (dtype, shape) of a layer of 256 x 512.
TENSORS = {
    "fp8": ({"weight_block_size": [128, 128]}, {"weight": ("F8_E4M3", (256, 512)), "weight_scale_inv": ("F32", (2, 4))}),
    "awq": (
        {"bits": 4, "group_size": 128},
        {"qweight": ("I32", (512, 32)), "qzeros": ("I32", (4, 32)), "scales": ("F16", (4, 256))},
    ),
    "modelopt_fp8": ({}, {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())}),
    "mxfp8": ({}, {"weight": ("F8_E4M3", (256, 512)), "weight_scale_inv": ("U8", (256, 16))}),
}


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        ("model.layers.3.mlp", True),
        ("model.layers.3", True),
        ("language_model.model.layers.3.mlp.experts", True),
        ("language_model", True),
        ("model.language_model", True),
        ("re:.*layers.3.mlp$", True),
        ("model.layers.30", False),
        ("mlp.experts", False),
    ],
)
def test_a_module_is_left_out_with_one_that_holds_it(pattern, plain):
    linear = QuantizedLinear({"quant_method": "mxfp8", "ignored_layers": [pattern]}, "BF16")
    for expert in (0, 1):
        found = {tensor.dtype for tensor in linear.tensors(f"model.layers.3.mlp.experts.{expert}.up_proj", 256, 512)}
        assert found == ({"BF16"} if plain else {"F8_E4M3", "U8"})


@pytest.mark.parametrize("method", TENSORS)
def test_a_layers_tensors_are_those_that_sglang_loads(method):
    settings, expected = TENSORS[method]
    found = QuantizedLinear({"quant_method": method, **settings}, "BF16").tensors("a", 256, 512)
    assert {tensor.name.removeprefix("a."): (tensor.dtype, tensor.shape) for tensor in found} == expected


def compressed(form, weights, **group):
    quant = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", "re:.*self_attn.*"]}
    return QuantizedLinear(
        {**quant, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **group}}}, "BF16"
    )


@pytest.mark.parametrize(
    ("form", "weights", "group", "expected"),
    [
        (
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
            {},
            {"weight_packed": ("I32", (256, 64)), "weight_shape": ("I64", (2,)), "weight_scale": ("BF16", (256, 16))},
        ),
        (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            {"input_activations": {"num_bits": 4}},
            {
                **{"weight_packed": ("U8", (256, 256)), "weight_scale": ("F8_E4M3", (256, 32))},
                **{"weight_global_scale": ("F32", (1,)), "input_global_scale": ("F32", (1,))},
            },
        ),
        (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            {},
            {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("BF16", (256, 1))},
        ),
        (
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {},
            {"weight": ("I8", (256, 512)), "weight_scale": ("BF16", (256, 1))},
        ),
        (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32},
            {},
            {"weight_packed": ("U8", (256, 256)), "weight_scale": ("U8", (256, 16))},
        ),
    ],
)
def test_formats_of_compressed_tensors(form, weights, group, expected):
    linear = compressed(form, weights, **group)
    found = {tensor.name.removeprefix("mlp.a."): (tensor.dtype, tensor.shape) for tensor in linear.tensors("mlp.a", 256, 512)}
    assert found == expected
    assert [tensor.dtype for tensor in linear.tensors("model.layers.0.self_attn.q_proj", 256, 512)] == ["BF16"]


def test_a_format_that_is_not_known_is_refused_by_name():
    with pytest.raises(UnknownTensors, match="marlin-24"):
        compressed("marlin-24", {"num_bits": 4}).tensors("a", 256, 512)


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
@pytest.mark.parametrize("pattern", ["mlp.experts", "model.layers.0.", "experts.1.up_proj"])
def test_fp8_leaves_out_modules_by_any_run_of_their_names_parts(key, pattern):
    """As ``is_layer_skipped`` of SGLang compares them: Qwen3.6's configs name no layer."""
    linear = QuantizedLinear({"quant_method": "fp8", "weight_block_size": [128, 128], key: [pattern, "mlp.expert"]}, "BF16")
    assert [tensor.dtype for tensor in linear.tensors("model.layers.0.mlp.experts.1.up_proj", 256, 512)] == ["BF16"]
    assert len(linear.tensors("model.layers.1.mlp.shared_experts.up_proj", 256, 512)) == 2


def test_gptq_leaves_out_or_quantises_otherwise_what_its_rules_name():
    rules = {"-:.*experts.*": {}, r"+:.*\.q_proj": {"bits": 8}, r".*\.k_proj": {"group_size": 64}, ".*": {"bits": 8}}
    linear = QuantizedLinear({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": rules}, "BF16")

    def shapes(name):
        return {tensor.name.removeprefix(f"{name}."): tensor.shape for tensor in linear.tensors(name, 256, 512)}

    assert shapes("mlp.experts.0.up_proj") == {"weight": (256, 512)}
    assert (shapes("a.q_proj")["qweight"], shapes("a.q_proj")["scales"]) == ((128, 256), (4, 256))
    assert (shapes("a.k_proj")["qweight"], shapes("a.k_proj")["scales"]) == ((64, 256), (8, 256))


def test_mxfp4_of_other_families_than_gpt_oss_is_not_counted_as_16_bits():
    config = read_config(config_folder("Qwen/Qwen3-30B-A3B") / "config.json")
    with pytest.raises(UnknownTensors, match="tensors of a 'qwen3_moe' checkpoint in mxfp4 are not known"):
        from_config("m", config | {"quantization_config": {"quant_method": "mxfp4"}})


def test_a_pattern_that_is_no_regular_expression_is_refused():
    config = read_config(config_folder("Qwen/Qwen3-30B-A3B") / "config.json")
    quant = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:["], "config_groups": {}}
    with pytest.raises(CheckpointError, match="the config is malformed: unterminated character set"):
        from_config("m", config | {"quantization_config": quant})


def test_experts_that_stay_in_16_bits_have_no_blocks_of_scales_to_divide():
    config = read_config(config_folder("Qwen/Qwen3-30B-A3B-FP8") / "config.json")
    assert from_config("m", config).scale_block == 128
    kept = config["quantization_config"] | {"modules_to_not_convert": ["mlp.experts"]}
    assert from_config("m", config | {"quantization_config": kept}).scale_block == 1
