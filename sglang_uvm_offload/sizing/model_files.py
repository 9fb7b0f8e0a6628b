"""Where the files of a model are: in a folder, in the Hugging Face cache, or on the Hub, of which only the config and the
headers of the weights are read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from sglang_uvm_offload.sizing import hub
from sglang_uvm_offload.sizing.checkpoint import CheckpointShape, from_tensors, load
from sglang_uvm_offload.sizing.loaded import as_loaded
from sglang_uvm_offload.sizing.quantization import read_config
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, TensorInfo, read_folder


@dataclass(frozen=True)
class ModelFiles:
    """A model by the name and revision that SGLang would load. Methods raise ``CheckpointError``."""

    name: str
    """A folder (or a config.json, for ``shape`` alone), or an id on the Hub."""
    revision: str | None = None
    cache: str | None = None
    """``--download-dir``, None for that of ``huggingface_hub``."""

    @cached_property
    def folder(self) -> Path | None:
        """The folder with all of the model's weights; None where SGLang would first download some."""
        if os.path.isdir(self.name):
            return Path(self.name)
        found = hub.snapshot(self.name, self.revision, self.cache)
        return found if found is not None and _complete(found) else None

    @property
    def on_disk(self) -> Path | None:
        """What SGLang would load without the network."""
        if self.folder is None and hub.offline():
            return hub.snapshot(self.name, self.revision, self.cache)
        return self.folder

    def config(self) -> dict[str, Any]:
        folder = self.folder
        return read_config(hub.config_file(self.name, self.revision) if folder is None else folder / "config.json")

    def tensors(self) -> list[TensorInfo]:
        return list(hub.headers(self.name, self.revision)) if self.folder is None else read_folder(self.folder)

    def shape(self, dtype: str | None = None) -> CheckpointShape:
        """``dtype``: what a server loads the weights as, None for the bytes that they have on disk."""
        if os.path.lexists(self.name):
            return _loaded(Path(self.name), dtype)
        if self.folder is not None:
            return replace(_loaded(self.folder, dtype), name=self.name)
        return from_tensors(self.name, self.config(), as_loaded(self.tensors(), dtype), from_headers=True)


def _loaded(path: Path, dtype: str | None) -> CheckpointShape:
    """A launch asks several times, and reading all headers of a large model takes seconds."""
    return _loaded_once(path, dtype, _state(path)) if os.path.isdir(path) else load(path, dtype)


@lru_cache(maxsize=4)
def _loaded_once(path: Path, dtype: str | None, state: tuple[tuple[str, int, int], ...]) -> CheckpointShape:
    return load(path, dtype)


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Differs from that of the same folder before a file in it was written."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if os.path.exists(entry.path)]
    except OSError:  # whatever reads it says why
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


def _complete(folder: Path) -> bool:
    try:
        read_folder(folder)
    except CheckpointError:
        return False
    return True
