"""The tensors of a local checkpoint, by name, type and shape, from the headers of its safetensors files alone.

``safetensors`` reads and checks a header as it will when the server loads the file; errors here add the file's name.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_uvm_offload.files import reading

MAX_JSON_BYTES = 64 << 20

DTYPE_BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}


class CheckpointError(ValueError):
    """A checkpoint or config that cannot be read or planned for. The message has the reason."""

    def __init__(self, reason: str):
        super().__init__(reading.printable(reason))  # it quotes file names, tensor names and the config


class NoExperts(CheckpointError):
    """A dense model."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint. ``dtype`` is a key of ``DTYPE_BITS``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return -(-self.elements * DTYPE_BITS[self.dtype] // 8)


def read_folder(folder: Path) -> list[TensorInfo]:
    """The tensors of the checkpoint in ``folder``, from its index or from all safetensors files."""
    index = folder / "model.safetensors.index.json"
    if os.path.lexists(index):
        return _indexed(folder, index)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if not files:
        others = sorted({Path(name).suffix for name in names} & {".bin", ".gguf", ".pt", ".pth"})
        found = f" (it has {', '.join(others)} files; only safetensors are read)" if others else ""
        raise CheckpointError(f"{folder} holds no *.safetensors file{found}")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise CheckpointError(f"{file}: tensor {tensor.name!r} is in another file of the folder too")
            tensors[tensor.name] = tensor
    return list(tensors.values())


def _indexed(folder: Path, index: Path) -> list[TensorInfo]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    tensors: list[TensorInfo] = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}, which is not a plain file name")
        if not os.path.exists(folder / name):
            raise CheckpointError(f"{index} names {name}, which is not in the folder: the download is not complete")
        tensors += [tensor for tensor in read_header(folder / name) if weight_map.get(tensor.name) == name]
    missing = weight_map.keys() - {tensor.name for tensor in tensors}
    if missing:
        raise CheckpointError(f"{index} names the tensor {min(missing)!r}, which its file does not hold")
    return tensors


def read_header(file: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file. Reads its header only."""
    try:
        # By its handle: the path may have become another file's, such as a pipe's, for which ``safe_open`` waits.
        with reading.open_regular(file) as found, safe_open(f"/proc/self/fd/{found.fileno()}", framework="numpy") as opened:
            described = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            tensors = [TensorInfo(name, one.get_dtype(), tuple(one.get_shape())) for name, one in described]
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a safetensors file, or cut short or damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    if unknown := {tensor.dtype for tensor in tensors} - DTYPE_BITS.keys():
        raise CheckpointError(f"{file}: has tensors of type {min(unknown)}, whose size is unknown")
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``."""
    try:
        text = reading.read(file, MAX_JSON_BYTES)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    return _parse(text, file)


def _parse(text: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON where JSON is expected: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(value).__name__}, not an object")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return out
