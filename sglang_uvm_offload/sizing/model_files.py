"""Where the files of a model are: in a folder, in the Hugging Face cache, or on the Hub, of which only the config and the
headers of the weights are read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_uvm_offload.files.reading import printable
from sglang_uvm_offload.sizing import hub
from sglang_uvm_offload.sizing.checkpoint import from_tensors
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape
from sglang_uvm_offload.sizing.engine_shape import instead, load_any
from sglang_uvm_offload.sizing.loaded import as_loaded
from sglang_uvm_offload.sizing.overrides import overridden
from sglang_uvm_offload.sizing.quantization import read_config
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, NoExperts, TensorInfo, read_folder


@dataclass(frozen=True)
class ModelFiles:
    """A model by the name and revision that SGLang would load. Methods raise ``CheckpointError``."""

    name: str
    """A folder (or a config.json, for ``shape`` alone), or an id on the Hub."""
    revision: str | None = None
    cache: str | None = None
    """``--download-dir``, None for that of ``huggingface_hub``."""
    overrides: str = ""
    """``--json-model-override-args``."""

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
        file = hub.config_file(self.name, self.revision) if folder is None else folder / "config.json"
        return overridden(read_config(file), self.overrides)

    def tensors(self) -> list[TensorInfo]:
        return list(hub.headers(self.name, self.revision)) if self.folder is None else read_folder(self.folder)

    def shape(self, dtype: str | None = None) -> CheckpointShape:
        """By the headers of its weights, or by SGLang's class where their names are not known. ``dtype``: what a server loads
        the weights as, None for the bytes that they have on disk."""
        if os.path.lexists(self.name):
            return self._of(Path(self.name), dtype)
        if self.folder is not None:
            return self._of(self.folder, dtype)
        return from_tensors(self.name, self.config(), as_loaded(self.tensors(), dtype), from_headers=True)

    def described(self, dtype: str | None = None) -> CheckpointShape:
        """The same by its config alone, for weights that are in no safetensors, or in a server's own form."""
        file = self.folder / "config.json" if self.folder is not None else hub.config_file(self.name, self.revision)
        return self._of(file, dtype)

    def _of(self, path: Path, dtype: str | None) -> CheckpointShape:
        try:
            return replace(load_any(path, dtype, self.overrides), name=printable(self.name))
        except NoExperts as dense:
            if any(path.glob("*.safetensors")):
                raise
            return instead(dense, path, self.name, self.overrides)  # a class of configs may have a number by default


def _complete(folder: Path) -> bool:
    try:
        read_folder(folder)
    except CheckpointError:
        return False
    return True
