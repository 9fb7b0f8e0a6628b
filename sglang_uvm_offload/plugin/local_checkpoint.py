"""Where the checkpoint that a flag names lies on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sglang_uvm_offload.sizing.launch import Uncounted


def local_folder(flag: str, path: str, revision: str | None, cfg: Any) -> str:
    """The folder that ``flag`` names as ``path``, or that of a downloaded model in the Hugging Face cache. Raises
    ``Uncounted``."""
    if Path(path).is_dir():
        return path
    try:
        return huggingface_hub.snapshot_download(path, revision=revision, cache_dir=cfg.download_dir, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise Uncounted(
            [f"{flag} {path} is no local folder, and not in the Hugging Face cache: nothing can be counted"]
        ) from error
