"""Where the checkpoint that a flag names lies on this machine."""

from __future__ import annotations

import os
import re
import stat
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sglang_uvm_offload import reading
from sglang_uvm_offload.sizing.launch import Uncounted


def unreadable(model: str) -> str | None:
    """Why the local model ``model`` cannot be read; None if it can, or if it is the id of a model on a hub."""
    if os.path.isdir(model):
        return _special_file(model)
    if os.path.lexists(model) or not re.match(r"[./~]|[^/:]*/[^/]*/", model):
        return None
    return "there is no such folder"


def _special_file(folder: str) -> str | None:
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        return error.strerror
    for name in entries:
        try:
            mode = os.stat(os.path.join(folder, name)).st_mode
        except OSError:  # such as a link to a file that was not downloaded; what reads it gives the reason
            continue
        if not stat.S_ISDIR(mode) and (kind := reading.special_kind(mode)):
            return f"holds {name}, which is {kind} and not a regular file"
    return None


def local_folder(flag: str, path: str, revision: str | None, cfg: Any) -> str:
    """The folder that ``flag`` names as ``path``, or that of a downloaded model in the Hugging Face cache. Raises
    ``Uncounted``."""
    if os.path.isdir(path):
        return path
    try:
        return huggingface_hub.snapshot_download(path, revision=revision, cache_dir=cfg.download_dir, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise Uncounted(
            [f"{flag} {path} is no local folder, and not in the Hugging Face cache: nothing can be counted"]
        ) from error
