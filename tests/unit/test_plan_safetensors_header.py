"""The headers of safetensors files: what is read of them, and which are refused. And writers' tensors against their files."""

import json
import struct

import pytest

from scripts.config_tensors import tensors_of
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, TensorInfo, read_folder, read_header

MAX_HEADER_BYTES = 100_000_000
"""The library's limit."""

MADE = [
    *((family, {}) for family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")),
    *(("qwen3_moe", {"quant": quant}) for quant in ("fp8",)),
    ("qwen3_moe", {"dtype": "float32"}),
]


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(("family", "options"), MADE, ids=lambda value: str(value))
def test_a_writer_of_checkpoints_knows_the_very_tensors_of_its_files(checkpoints, family, options):
    folder = checkpoints(family, **options)
    config = json.loads((folder / "config.json").read_text())
    assert sorted(tensors_of(config), key=lambda each: each.name) == sorted(read_folder(folder), key=lambda each: each.name)


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
    "no JSON": (b"{oops}", b"", None, "invalid JSON"),
    "no UTF-8": (b'{"\xff": 1}', b"", None, "invalid UTF-8"),
    "nested without end": (b"[" * 200_000, b"", None, "invalid JSON"),
    "negative size": ({"a": entry(shape=(-2, -2))}, bytes(16), None, "expected usize"),
    "too many elements": ({"a": entry("U8", (1 << 40, 1 << 40), (0, 16))}, bytes(16), None, "overflow"),
    "overlap": ({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24), None, "invalid offset"),
    "data cut short": ({"a": entry()}, bytes(12), None, "file not fully covered"),
    "a type that a terminal would obey": ({"a": entry("F32\x1b[2J")}, bytes(16), None, r"unknown variant `F32\?\[2J`"),
    "a type of unknown size": ({"a": entry("C64", offsets=(0, 32))}, bytes(32), None, "type C64"),
}
"""The library checks the rest."""


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_header_is_refused_with_the_file_and_the_reason(tmp_path, kind):
    header, data, length, reason = BROKEN[kind]
    file = write(tmp_path / "model.safetensors", header, data, length)
    if kind == "empty":
        file.write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=reason) as raised:
        read_header(file)
    assert str(file) in str(raised.value)


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
