"""Reading a checkpoint's shape: from headers, from a config, and refusing what contradicts itself."""

import dataclasses
import gc
import json
import struct
from pathlib import Path

import pytest

from sglang_uvm_offload.sizing.checkpoint import from_config, from_tensors, load, parameters
from sglang_uvm_offload.sizing.config_tensors import tensors_of
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, TensorInfo, read_folder, read_header

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
MAX_HEADER_BYTES = 100_000_000
"""The library's limit."""
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))

MADE = [
    *((family, {}) for family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")),
    *(("qwen3_moe", {"quant": quant}) for quant in ("fp8", "int8", "gptq")),
    ("qwen3_moe", {"dtype": "float32"}),
]


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def fixture(name):
    return json.loads((MODELS / f"{name}.json").read_text())


def total(shape):
    layers = (*shape.layers, *shape.draft_layers)
    kinds = ("expert_bytes", "attention", "keys_values", "feed_forward", "replicated")
    inside = sum(getattr(layer, kind) for layer in layers for kind in kinds)
    return inside + shape.embedding + shape.head + shape.other + shape.draft_vocabulary


# The same answer from headers and from a config


@pytest.mark.parametrize(("family", "options"), MADE, ids=lambda value: str(value))
def test_a_config_tells_the_very_tensors_that_the_checkpoint_holds(checkpoints, family, options):
    folder = checkpoints(family, **options)
    config = json.loads((folder / "config.json").read_text())
    held = {tensor.name: tensor for tensor in read_folder(folder)}
    assert {tensor.name: tensor for tensor in tensors_of(config)} == held
    from_file = load(folder)
    derived = from_config(str(folder), config)
    assert from_file == dataclasses.replace(derived, from_headers=True)
    file = folder / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert total(from_file) == from_file.total_bytes == file.stat().st_size - header


def test_bytes_of_the_experts_are_those_of_their_files(checkpoints):
    shape = load(checkpoints("qwen3_moe", quant="fp8"))
    hidden, size, experts = 512, 128, 8
    weight, scales = 3 * hidden * size, 3 * (hidden // 128) * (size // 128) * 4
    assert [layer.expert_bytes for layer in shape.layers] == [experts * (weight + scales)] * 2
    parts = {part.name: (part.nbytes, part.split) for part in shape.layers[0].experts}
    assert parts["w13.weight"] == (2 * hidden * size, True)
    assert parts["w2.weight"] == (hidden * size, True)
    assert parts["w13.weight_scale_inv"] == (2 * 4 * 4, True)
    assert shape.expert_parameters == weight
    assert shape.top_k == 2


def test_biases_of_the_down_projection_are_whole_on_every_rank(checkpoints):
    parts = {part.name: part.split for part in load(checkpoints("gpt_oss")).layers[0].experts}
    assert parts == {"w13.weight": True, "w13.bias": True, "w2.weight": True, "w2.bias": False}


def test_scales_of_output_channels_are_whole_on_every_rank(checkpoints):
    parts = {part.name: part.split for part in load(checkpoints("qwen3_moe", quant="int8")).layers[0].experts}
    assert parts["w13.weight_scale"] is True
    assert parts["w2.weight_scale"] is False


def test_drafting_layers_are_kept_apart_and_their_vocabulary_is_not_counted_twice(checkpoints):
    shape = load(checkpoints("glm4_moe"))
    assert len(shape.draft_layers) == 1
    assert shape.draft_layers[0].expert_bytes == shape.layers[-1].expert_bytes
    assert shape.draft_vocabulary == shape.embedding + shape.head
    assert shape.moe_layers == (1, 2)


# Published totals


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_totals_are_the_published_ones(name):
    """Tolerances: a published count is rounded to three digits or better; a file is larger than its tensors by the headers."""
    published, shape = fixture(name)["published"], from_config(name, fixture(name)["config"])
    elements = sum(tensor.elements for tensor in tensors_of(fixture(name)["config"]))
    assert published["source"].startswith("https://")
    if "elements" in published:
        assert elements == published["elements"]
    if "parameters" in published:
        assert shape.total_parameters == pytest.approx(published["parameters"], rel=0.005)
    if "served_parameters" in published:
        drafts = sum(layer.parameters for layer in shape.draft_layers) + shape.draft_vocabulary // 2
        drafts += sum(shape.expert_parameters * shape.num_experts for layer in shape.draft_layers if layer.experts)
        assert shape.total_parameters - drafts == pytest.approx(published["served_parameters"], rel=0.01)
    if "bytes" in published:
        assert shape.total_bytes == pytest.approx(published["bytes"], rel=0.001)
    assert total(shape) == shape.total_bytes


@pytest.mark.slow
def test_deepseek_v3_is_671_gb_of_which_experts_are_97_percent():
    shape = from_config("deepseek", fixture("deepseek-v3")["config"])
    draft = sum(layer.expert_bytes + layer.attention + layer.feed_forward + layer.replicated for layer in shape.draft_layers)
    served = shape.total_bytes - draft - shape.draft_vocabulary
    assert served == pytest.approx(671e9, rel=0.01)
    assert shape.expert_bytes / served == pytest.approx(0.97, abs=0.005)


@pytest.mark.slow
def test_documents_say_how_large_the_experts_of_deepseek_v3s_draft_layer_are():
    (draft,) = load(MODELS / "deepseek-v3.json").draft_layers
    size = f"{draft.expert_bytes / 2**30:.1f} GiB"
    root = MODELS.parents[2]
    assert f"(DeepSeek-V3's take {size})" in (root / "docs/flags.md").read_text()
    assert f"(DeepSeek-V3's have {size})" in (root / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_kimi_k2_has_the_number_of_parameters_that_loaders_report():
    assert from_config("kimi", fixture("kimi-k2")["config"]).total_parameters == 1_026_408_232_448


def test_parameters_count_packed_weights_and_no_scales():
    assert parameters(TensorInfo("a.qweight", "I32", (4, 8))) == 256
    assert parameters(TensorInfo("a.gate_up_proj_blocks", "U8", (2, 4, 16))) == 256
    assert parameters(TensorInfo("a.weight_scale_inv", "F32", (4, 4))) == 0
    assert parameters(TensorInfo("a.qzeros", "I32", (4, 4))) == 0
    assert parameters(TensorInfo("a.weight", "I8", (4, 4))) == 16


def test_every_fixture_names_where_its_numbers_are_from():
    assert {"deepseek-v3", "glm-4.5", "glm-4.5-air", "glm-5-fp8", "gpt-oss-120b", "kimi-k2", "qwen3-235b-a22b"} == set(NAMES)
    for name in NAMES:
        assert any(source.startswith("https://") for source in fixture(name)["source"])
        assert fixture(name)["original"] == f"https://huggingface.co/{fixture(name)['name']}/blob/main/config.json"


# Headers that cannot be trusted


def test_a_header_is_read_without_the_data(tmp_path):
    file = write(tmp_path / "big.safetensors", {"a": entry("U8", (1 << 36,), (0, 1 << 36)), "__metadata__": {"format": "pt"}})
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + (1 << 36))
    assert read_header(file) == [TensorInfo("a", "U8", (1 << 36,))]


def test_a_tensor_of_four_bit_elements_takes_half_a_byte_each(tmp_path):
    assert read_header(write(tmp_path / "f", {"a": entry("F4", (2, 5), (0, 5))}, b"12345"))[0].nbytes == 5


BROKEN = {
    "empty": (b"", b"", None, "header too small"),
    "length beyond the file": ({"a": entry()}, b"", 1000, "invalid header length"),
    "length without bound": ({"a": entry()}, bytes(16), MAX_HEADER_BYTES + 1, "header too large"),
    "length of all ones": ({"a": entry()}, bytes(16), (1 << 64) - 1, "header too large"),
    "no JSON": (b"{oops}", b"", None, "invalid JSON"),
    "no UTF-8": (b'{"\xff": 1}', b"", None, "invalid UTF-8"),
    "nested without end": (b"[" * 200_000, b"", None, "invalid JSON"),
    "no object": ([1], b"", None, "invalid JSON"),
    "a name twice, for two tensors": (
        b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry(offsets=(16, 32))).encode() + b"}",
        bytes(32),
        None,
        "invalid offset",
    ),
    "no description": ({"a": 5}, b"", None, "expected struct TensorInfo"),
    "a pickle's type": ({"a": entry("object")}, bytes(16), None, "unknown variant `object`"),
    "negative size": ({"a": entry(shape=(-2, -2))}, bytes(16), None, "expected usize"),
    "a size that is a truth": ({"a": entry(shape=(True, 4))}, bytes(16), None, "expected usize"),
    "a size that is a fraction": ({"a": entry(shape=(2.0, 2))}, bytes(16), None, "expected usize"),
    "three offsets": ({"a": entry(offsets=(0, 8, 16))}, bytes(16), None, "invalid length 3"),
    "offsets backwards": ({"a": entry(offsets=(16, 0))}, bytes(16), None, "invalid offset"),
    "too few bytes for its shape": ({"a": entry(offsets=(0, 12))}, bytes(12), None, "invalid shape"),
    "too many elements": ({"a": entry("U8", (1 << 40, 1 << 40), (0, 16))}, bytes(16), None, "overflow"),
    "half a byte": ({"a": entry("F4", (3, 3), (0, 5))}, b"12345", None, "byte boundary"),
    "overlap": ({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24), None, "invalid offset"),
    "hole": ({"a": entry(), "b": entry(offsets=(20, 36))}, bytes(36), None, "invalid offset"),
    "data cut short": ({"a": entry()}, bytes(12), None, "file not fully covered"),
    "data too long": ({"a": entry()}, bytes(20), None, "file not fully covered"),
    "a type that a terminal would obey": ({"a": entry("F32\x1b[2J")}, bytes(16), None, r"unknown variant `F32\?\[2J`"),
    "a type of unknown size": ({"a": entry("C64", offsets=(0, 32))}, bytes(32), None, "type C64"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_header_is_refused_with_the_file_and_the_reason(tmp_path, kind):
    header, data, length, reason = BROKEN[kind]
    file = write(tmp_path / "model.safetensors", header, data, length)
    if kind == "empty":
        file.write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=reason) as raised:
        read_header(file)
    assert str(file) in str(raised.value)


def test_a_header_beyond_the_limit_is_not_read_even_where_the_file_is_as_long(tmp_path):
    file = write(tmp_path / "model.safetensors", b"{}", b"", MAX_HEADER_BYTES + 1)
    with file.open("r+b") as stream:
        stream.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match="header too large"):
        read_header(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*No such file"):
        read_header(tmp_path / "model.safetensors")


# Folders


def folder_with_index(tmp_path, weight_map):
    write(tmp_path / "one.safetensors", {"a": entry(), "x": entry(offsets=(16, 32))}, bytes(32))
    write(tmp_path / "two.safetensors", {"b": entry()}, bytes(16))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_an_index_says_which_tensors_count(tmp_path):
    folder = folder_with_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert [tensor.name for tensor in read_folder(folder)] == ["a", "b"]


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "../one.safetensors"}, "not a plain file name"),
        ({"a": "/etc/passwd"}, "not a plain file name"),
        ({"a": "three.safetensors"}, "download is not complete"),
        ({"a": "three\x1b[2J"}, r"names three\?\[2J, which is not in the folder"),
        ({"c": "one.safetensors"}, "'c', which its file does not hold"),
        ({"a": 5}, "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path, weight_map, reason):
    with pytest.raises(CheckpointError, match=reason):
        read_folder(folder_with_index(tmp_path, weight_map))


def test_a_folder_without_safetensors_says_what_it_has(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file \(it has \.bin files"):
        read_folder(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", {"a": entry()}, bytes(16))
    with pytest.raises(CheckpointError, match="in another file of the folder too"):
        read_folder(tmp_path)


# Names and configs


def tiny(**changes):
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 32, "num_experts": 2}
    config |= {"num_attention_heads": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 1, "max_position_embeddings": 64}
    return config | changes


def test_a_tower_beside_the_language_model_has_layers_of_its_own():
    config = tiny()
    tower = [TensorInfo(f"model.visual.layers.{i}.attn.q_proj.weight", "BF16", (8, 8)) for i in range(3)]
    with_tower = from_tensors("m", {"text_config": config}, [*tensors_of(config), *tower], from_headers=True)
    without = from_tensors("m", config, tensors_of(config), from_headers=True)
    assert with_tower.layers == without.layers
    assert with_tower.other == without.other + 3 * 128


def test_quantisation_named_beside_the_text_config_holds_for_it():
    quant = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    shape = from_config("m", {"text_config": tiny(), "quantization_config": quant})
    assert (shape.quantization, shape.scale_block) == ("fp8", 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ts: [t for t in ts if ".experts." not in t.name], "no tensor is named like a routed expert"),
        (lambda ts: [t for t in ts if ".experts.1." not in t.name], "of 1 experts, and the config describes experts 0 to 1"),
        (lambda ts: [t for t in ts if ".layers." not in t.name], "no tensor is named like a routed expert"),
    ],
)
def test_tensors_that_do_not_match_the_config_are_refused(change, reason):
    with pytest.raises(CheckpointError, match=reason):
        from_tensors("m", tiny(), change(tensors_of(tiny())), from_headers=True)


def test_a_missing_layer_is_refused():
    tensors = [t for t in tensors_of(tiny(num_hidden_layers=3)) if ".layers.1." not in t.name]
    with pytest.raises(CheckpointError, match="holds 2 decoder layers, and its config describes 3"):
        from_tensors("m", tiny(num_hidden_layers=3), tensors, from_headers=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts": None}, "no routed experts"),
        ({"num_experts": "many"}, "num_experts is 'many', not a number up to 65536"),
        ({"num_experts": 1 << 40}, "not a number up to 65536"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two', not a number"),
        ({"num_hidden_layers": 1 << 40}, "not a number up to 4096"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": -64}, "hidden_size is -64, not a size"),
        ({"hidden_size": True}, "hidden_size is True, not a size"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types does not name one type"),
        ({"moe_layer_freq": []}, "malformed"),
        ({"model_type": "unheard_of"}, "give the checkpoint's folder"),
        ({"quantization_config": {"quant_method": "awq"}}, "give the checkpoint's folder"),
        ({"quantization_config": {"quant_method": "quark"}}, "a 'quark' checkpoint are not known"),
        ({"quantization_config": {"quant_algo": "INT3"}}, "a 'modelopt INT3' checkpoint are not known"),
        ({"torch_dtype": "float4"}, "torch_dtype"),
        ({"quantization_config": ["fp8"]}, "quantization_config is malformed"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "quantization_config is malformed"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "quantization_config is malformed"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(changes, reason):
    with pytest.raises(CheckpointError, match=reason):
        from_config("m", tiny(**changes))


def test_a_file_that_is_no_config_is_refused(tmp_path):
    for text, reason in (("[]", "JSON list"), ('{"config": 3}', "its config is not an object"), ("{", "not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            load(tmp_path / "config.json")


# Impossible models


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_experts_per_tok", 1000, "routes a token to 1000 of 128 experts"),
        ("num_experts_per_tok", 0, "num_experts_per_tok is 0"),
        ("num_experts_per_tok", -8, "num_experts_per_tok is -8"),
        *(
            (name, 0, f"{name} is 0, not a size of 1 or more")
            for name in ("hidden_size", "vocab_size", "moe_intermediate_size")
        ),
        *((name, -1, f"{name} is -1, not a size of 1 or more") for name in ("num_attention_heads", "head_dim", "hidden_size")),
        ("num_key_value_heads", 0, "num_key_value_heads is 0"),
        ("max_position_embeddings", -4096, "max_position_embeddings is -4096"),
        ("num_hidden_layers", 0, "no routed experts"),
        ("num_hidden_layers", -3, "num_hidden_layers is -3"),
        ("n_routed_experts", -128, "n_routed_experts is -128"),
        ("n_routed_experts", 1 << 16, "47 layers of 65536 experts, more than 262144 in all"),
        ("n_routed_experts", (1 << 18) // 46, "47 layers of 5698 experts"),  # with those of the layer that drafts
    ],
)
def test_a_config_that_no_model_can_have_is_refused(name, value, reason):
    config = fixture("glm-4.5-air")["config"]
    assert name in config
    with pytest.raises(CheckpointError, match=reason):
        from_config("m", config | {name: value})


def test_headers_do_not_excuse_an_impossible_config(checkpoints):
    folder = checkpoints("qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    for change, reason in (({"num_experts_per_tok": 999}, "to 999 of "), ({"hidden_size": 0}, "hidden_size is 0")):
        with pytest.raises(CheckpointError, match=reason):
            from_tensors("m", config | change, read_folder(folder), from_headers=True)


@pytest.mark.parametrize("collects", [True, False])
def test_cycles_are_collected_afterwards_as_they_were_before(tmp_path, collects):
    """Not while a checkpoint is read, whether or not that succeeds."""
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(CheckpointError):
            load(tmp_path)
        from_config("model", fixture(NAMES[0])["config"])
        assert gc.isenabled() == collects
    finally:
        gc.enable()
