"""True-shape checkpoints: real safetensors headers over sparse files, so that hundreds of gigabytes take kilobytes of disk. All
tensor bytes are zero."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from scripts.config_tensors import read_config, tensors_of
from sglang_uvm_offload.plan.safetensors_header import TensorInfo

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
SHARD_BYTES = 5 << 30


def config_folder(model: str) -> Path:
    """Returns the folder with the published configuration of ``owner/name``."""
    return CONFIGS / model.replace("/", "--")


def checkpoint(model: str, out: Path, tensors: Iterable[TensorInfo] | None = None) -> Path:
    """Writes the published configuration of ``model`` and a checkpoint of ``tensors`` to ``out``, and returns that. By default
    the tensors follow from the configuration."""
    shutil.copytree(config_folder(model), out)
    written = list(tensors_of(read_config(out)) if tensors is None else tensors)
    write(out, written)
    return out


def write(folder: Path, tensors: Iterable[TensorInfo]) -> None:
    """Writes shards of some gigabytes, and their index."""
    taken, numbered = 0, []
    for tensor in tensors:
        numbered.append((taken // SHARD_BYTES, tensor))
        taken += tensor.nbytes
    shards = {number: [tensor for _, tensor in group] for number, group in groupby(numbered, key=lambda pair: pair[0])}
    files = {number: f"model-{place:05}-of-{len(shards):05}.safetensors" for place, number in enumerate(shards, 1)}
    for number, held in shards.items():
        _write_shard(folder / files[number], held)
    index = {tensor.name: files[number] for number, held in shards.items() for tensor in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_shard(file: Path, tensors: list[TensorInfo]) -> None:
    header, end = {}, 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        os.ftruncate(out.fileno(), 8 + len(text) + end)
