"""Where a model's files are: in a folder, in the Hugging Face cache, or on the Hub (only the config is downloaded)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sglang_uvm_offload.plan import hub
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, read_folder


@dataclass(frozen=True)
class ModelFiles:
    """A model by the name and revision that SGLang would load. Its members raise ``CheckpointError``."""

    name: str
    """A folder (or a config.json, for ``config`` alone), or an id on the Hub."""
    revision: str | None = None
    cache: str | None = None
    """``--download-dir``; None for the default of ``huggingface_hub``."""

    @cached_property
    def folder(self) -> Path | None:
        """The folder with all of the model's weights; None if SGLang would have to download some."""
        if os.path.isdir(self.name):
            return Path(self.name)
        found = hub.snapshot(self.name, self.revision, self.cache)
        return found if found is not None and _complete(found) else None

    @property
    def on_disk(self) -> Path | None:
        """The files that SGLang would load without the network."""
        if self.folder is None and hub.offline():
            return hub.snapshot(self.name, self.revision, self.cache)
        return self.folder

    @property
    def config(self) -> Path:
        """Its config.json, or the file that ``name`` is, with the other files that say how its weights are stored beside it."""
        if os.path.lexists(self.name):
            return Path(self.name)
        return hub.config_file(self.name, self.revision) if self.folder is None else self.folder / "config.json"


def _complete(folder: Path) -> bool:
    try:
        read_folder(folder)
    except CheckpointError:
        return False
    return True
