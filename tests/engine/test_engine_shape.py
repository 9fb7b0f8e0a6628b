"""Models by SGLang's own classes: they hold what their files hold, and what their publishers state; and the page says so."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from builders import shapes as recorded_shapes
from builders.hostile import Hostile
from builders.released import released_tensors
from builders.shapes import asking_sglang
from builders.true_shape import CONFIGS, config_folder
from checkpoints import Checkpoints
from safetensors import safe_open

from benchmarks import model_sizes
from scripts.config_tensors import read_config, tensors_of
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.plan import engine_shape
from sglang_uvm_offload.plan.engine_shape import shape_of, shapes_of
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, NoExperts, TensorInfo, read_json

SAMPLE = (
    *("Qwen/Qwen3.5-35B-A3B", "MiniMaxAI/MiniMax-M2.5", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "openai/gpt-oss-20b"),
    *("moonshotai/Kimi-Linear-48B-A3B-Instruct", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "google/gemma-4-26B-A4B"),
    *("nvidia/Qwen3-235B-A22B-NVFP4", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B-FP8"),
)


@pytest.fixture(scope="module", autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is recorded, or kept by earlier tests. SGLang has resolved a launch in this process, for a model and a GPU with
    which it shares images by CUDA."""
    with asking_sglang(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CUDA_IPC_TRANSPORT", "1")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shapes(fresh: None) -> dict[str, ModelShape]:
    folders = {model: config_folder(model) for model in SAMPLE}
    made = dict(zip(SAMPLE, shapes_of(folders), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_shape, "PROGRAM", "no.such.program")
        assert made == dict(zip(SAMPLE, shapes_of(folders), strict=True)), "it is kept"
    return made


# Against the tensors of files


_NONE = re.compile(r"gate\.weight|^mtp\.|vision")


def experts_by_layer(tensors: Iterable[TensorInfo]) -> dict[int, int]:
    """Bytes, by the names of tensors, of layers that are numbered after the others if they draft."""
    found: Counter[int] = Counter()
    for tensor in tensors:
        if (layer := re.search(r"layers\.(\d+)\.(?!.*shared).*experts", tensor.name)) and not _NONE.search(tensor.name):
            found[int(layer[1])] += tensor.nbytes
    return dict(found)


def in_file(folder: Path) -> list[TensorInfo]:
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 -- it has no other iterator
    return [TensorInfo(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()]


MADE = (
    *((family, {}) for family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")),
    ("qwen3_moe", {"quant": "fp8"}),
)


def test_experts_take_the_bytes_of_their_files_in_each_layer(checkpoints: Checkpoints) -> None:
    folders = [checkpoints(family, **options) for family, options in MADE]
    for folder, shape in zip(folders, shapes_of({str(folder): folder for folder in folders}), strict=True):
        config, held = read_config(folder), in_file(folder)
        layers = (*shape.layers, *shape.draft_layers)
        within = 0.006 if "gpt_oss" in config["model_type"] else 0  # whose biases SGLang keeps in float32
        found = {layer.index: layer.expert_bytes for layer in layers if layer.experts}
        assert found == pytest.approx(experts_by_layer(held), rel=within, abs=0), folder
        copies = [each for each in held if f"layers.{config['num_hidden_layers']}." in each.name]
        twice = sum(each.nbytes for each in copies if re.search(r"embed_tokens|shared_head\.head", each.name))
        stored = sum(each.nbytes for each in held) - twice
        assert shape.total_bytes == pytest.approx(stored, rel=0.03), "some small weights are kept in float32"


def tensors_in(model: str) -> list[TensorInfo]:
    """The tensors of a published model, as its files name them."""
    folder = config_folder(model)
    try:
        return list(tensors_of(read_config(folder)))
    except CheckpointError:
        return list(released_tensors(model))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model",
    [
        *("deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B-FP8", "openai/gpt-oss-20b", "nvidia/Qwen3-235B-A22B-NVFP4"),
        *("Qwen/Qwen3.5-35B-A3B", "google/gemma-4-26B-A4B"),
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ],
)
def test_experts_of_published_models_take_the_bytes_of_their_files(model: str, shapes: dict[str, ModelShape]) -> None:
    shape, held = shapes[model], tensors_in(model)
    stated = experts_by_layer(held)
    for layer in shape.layers:
        assert layer.expert_bytes == pytest.approx(stated.get(layer.index, 0), rel=1e-4), layer.index


@pytest.mark.nightly
def test_layers_are_what_they_are(shapes: dict[str, ModelShape]) -> None:
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
def test_draft_layers_are_apart(shapes: dict[str, ModelShape]) -> None:
    for model, experts in (("deepseek-ai/DeepSeek-V3", 256), ("Qwen/Qwen3.5-35B-A3B", 256)):
        (draft,) = shapes[model].draft_layers
        assert draft.index == shapes[model].num_layers
        assert draft.expert_bytes == pytest.approx(shapes[model].layers[-1].expert_bytes)
        assert shapes[model].draft_parameters > experts * shapes[model].expert_parameters


@pytest.mark.nightly
def test_packed_weights_are_counted_one_by_one(shapes: dict[str, ModelShape]) -> None:
    packed = shapes["nvidia/Qwen3-235B-A22B-NVFP4"]
    assert packed.quantization == "modelopt_fp4"
    assert packed.total_parameters == pytest.approx(235e9, rel=0.001)
    assert packed.expert_bytes == pytest.approx(227e9 * (0.5 + 1 / 16), rel=0.002)  # four bits, and a byte for 16 of them


def test_plan_prints_what_a_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder of a checkpoint that holds code under the names of libraries, of which none runs."""
    hostile = Hostile(tmp_path / "model")
    shutil.copy(config_folder("Qwen/Qwen3-Next-80B-A3B-Thinking") / "config.json", hostile.folder)
    monkeypatch.chdir(hostile.folder)
    assert main(["plan", "config.json", "--machine", "1xH200", "--json"]) == 0
    assert hostile.ran == []
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [engine_shape.PROGRESS]
    planned = json.loads(printed.out)
    assert planned["total_parameters"] == pytest.approx(80e9, rel=0.02)
    assert planned["active_parameters"] == pytest.approx(3.9e9, rel=0.02)
    assert (planned["num_experts"], planned["top_k"], planned["moe_layers"]) == (512, 10, 48)


def test_what_sglang_does_not_build_is_refused_with_its_reason(tmp_path: Path) -> None:
    """One process builds all; a hostile one ends in an error of its own."""
    config = read_json(config_folder("Qwen/Qwen3.5-35B-A3B") / "config.json")
    qwen3 = read_json(config_folder("Qwen/Qwen3-30B-A3B") / "config.json")
    quantized = {"quant_method": "fp8", "weight_block_size": [128]}
    cases = {
        "class": (config | {"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        "dense": (qwen3 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "has no routed experts"),
        "huge": (qwen3 | {"hidden_size": 1 << 62}, "SGLang does not build the model: "),
        "more than huge": (qwen3 | {"vocab_size": 10**40}, "SGLang does not build the model: "),
        "negative": (qwen3 | {"moe_intermediate_size": -64}, "SGLang does not build the model: "),
        "types": (qwen3 | {"num_attention_heads": "many"}, "SGLang does not build the model: "),
        "lists": (qwen3 | {"hidden_size": [2048]}, "SGLang does not build the model: "),
        "quantized": (qwen3 | {"quantization_config": quantized}, "SGLang does not build the model: "),
        "memory": (qwen3 | {"layer_types": ["full_attention"] * 10**6}, "SGLang does not build the model: "),
    }
    for name, (values, _) in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    asked = [{**engine_shape._files(tmp_path / name), "arguments.json": "{}"} for name in cases]
    for line, (name, (_, reason)) in zip(engine_shape._run(asked), cases.items(), strict=True):
        refusal = engine_shape._refusal(json.loads(line))
        assert reason in str(refusal), name
        assert isinstance(refusal, NoExperts) == (name == "dense")


# What a launch changes


def test_a_launch_holds_what_its_arguments_make_of_the_model(checkpoints: Checkpoints) -> None:
    given = ({}, {"quantization": "fp8"}, {"dtype": "float32"}, {"model_override_args": '{"num_hidden_layers": 2}'})
    wrong = ({"quantization": "awq"}, {"quantization": "nothing"})
    files = engine_shape._files(checkpoints("qwen3_moe"))
    lines = engine_shape._run([{**files, "arguments.json": json.dumps(each)} for each in (*given, *wrong)])
    plain, fp8, wide, fewer = map(engine_shape._shape, lines[: len(given)])
    assert (plain.quantization, fp8.quantization) == ("none", "fp8")
    scales = 2 * plain.num_experts * len(plain.moe_layers) * 4
    assert plain.expert_bytes / 2 < fp8.expert_bytes <= plain.expert_bytes / 2 + 2 * scales
    assert fp8.total_parameters == plain.total_parameters
    assert wide.expert_bytes == 2 * plain.expert_bytes
    assert fewer.layers == plain.layers[:2]
    awq, nothing = (str(engine_shape._refusal(json.loads(line))) for line in lines[len(given) :])
    assert "SGLang does not build the model: ValueError: Cannot find the config file for awq" in awq
    assert "Unknown quantization method: nothing" in nothing


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_experts_of_four_bits_take_four_bits_without_a_gpu(method: str, tmp_path: Path) -> None:
    """SGLang computes these by Marlin, which it takes for CUDA alone: elsewhere AWQ leaves experts in 16 bits, and GPTQ is no
    method."""
    stated: dict[str, object] = {"zero_point": True, "version": "gemm"} if method == "awq" else {"sym": True, "desc_act": False}
    config = read_config(config_folder("Qwen/Qwen3-30B-A3B"))
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128, **stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(tmp_path)
    assert shape.quantization == f"{method}_marlin"
    bits = 4 + (16 + 4) / 128  # a group's scale and zero point
    assert shape.expert_bytes == pytest.approx(48 * 128 * 3 * 2048 * 768 * bits / 8, rel=0.01)


@pytest.mark.nightly
def test_a_method_that_the_files_state_changes_nothing_and_another_is_sglangs_error() -> None:
    packed = config_folder("nvidia/Qwen3-235B-A22B-NVFP4")
    assert shape_of(packed).layers == shape_of(packed, quantization="modelopt_fp4").layers
    fp8 = config_folder("Qwen/Qwen3-30B-A3B-FP8")
    with pytest.raises(CheckpointError, match=r"\(fp8\) does not match the quantization method specified"):
        shape_of(fp8, quantization="awq")
    converted = shape_of(fp8, quantization="modelopt_fp4")
    assert converted.expert_bytes == pytest.approx(48 * 128 * 3 * 2048 * 768 * 4.5 / 8, rel=0.001)
    assert converted.layers[0].attention == shape_of(fp8).layers[0].attention, "of the others none is converted"


@pytest.mark.nightly
def test_what_is_recorded_is_what_sglang_says() -> None:
    """All that other tests read of ``fixtures/shapes.json`` for published configurations."""
    paths = [*(path for path in CONFIGS.iterdir() if path.is_dir()), *CONFIGS.with_name("models").glob("*.json")]
    files = [{**engine_shape._files(path), "arguments.json": "{}"} for path in sorted(paths)]
    recorded = [(each, line) for each in files if (line := recorded_shapes.recorded(engine_shape._key(each)))]
    assert len(recorded) >= 8
    for (_, line), now in zip(recorded, engine_shape._run([each for each, _ in recorded]), strict=True):
        assert json.loads(line) == json.loads(now)


@pytest.mark.nightly
def test_the_page_is_the_programs(tmp_path: Path) -> None:
    assert model_sizes.main([str(CONFIGS), "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == model_sizes.OUT.read_text()
