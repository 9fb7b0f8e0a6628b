"""A model on the Hugging Face Hub: its config.json, and the headers of its weights, which are read by range.

No weights are fetched. ``huggingface_hub``, which SGLang brings, downloads (in ``hub_program``, which is ended if it takes too
long), and keeps the small files in its cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from sglang_uvm_offload.files import child
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, TensorInfo

PROGRAM = "sglang_uvm_offload.sizing.hub_program"
CONFIG, HEADERS = "config", "headers"
SECONDS = 300
"""How long the Hub may take to answer a question: the headers of hundreds of files take half a minute."""


class Unseen(CheckpointError):
    """What cannot be read from the Hub: the network is gone, offline mode is on, the model is gated or has no such files."""


def is_id(name: str) -> bool:
    """Whether ``name`` could be an id: ``owner/model``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def snapshot(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder of what was downloaded of a model, complete or not; None without any."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def offline() -> bool:
    """Whether the user forbids ``huggingface_hub`` the network, so that what is downloaded is all there is."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def config_file(name: str, revision: str | None = None) -> Path:
    """The model's config.json, with the other files that say how its weights are stored. Raises ``Unseen``."""
    return Path(_asked(CONFIG, name, revision))


def headers(name: str, revision: str | None = None) -> tuple[TensorInfo, ...]:
    """The tensors of the model's safetensors files. Raises ``Unseen``."""
    return tuple(TensorInfo(key, dtype, tuple(shape)) for key, dtype, shape in _asked(HEADERS, name, revision))


def unread(what: str, name: str, reason: str) -> Unseen:
    """With what to do instead."""
    if what == CONFIG:
        return Unseen(
            f"{name}: there is no such path, and its config.json cannot be read from the Hugging Face Hub ({reason}); "
            f"run hf download {name} config.json --local-dir DIR where that works, and give DIR/config.json"
        )
    return Unseen(
        f"{name}: its weights are not on this machine, and their headers cannot be read from the Hugging Face Hub "
        f"({reason}); run hf download {name} --local-dir DIR where that works, and give DIR"
    )


def _asked(what: str, name: str, revision: str | None) -> Any:
    answer = _answer(what, name, revision)
    if isinstance(answer, CheckpointError):
        raise answer
    return answer


@cache  # a launch asks several times; a large model has hundreds of files, and a network that is gone takes long to say so
def _answer(what: str, name: str, revision: str | None) -> Any:
    from huggingface_hub import constants

    try:
        folder = os.path.abspath(constants.HF_HUB_CACHE)
        ended = child.run_module(PROGRAM, what, name, revision or "", folder, seconds=SECONDS)
    except subprocess.TimeoutExpired:
        return unread(what, name, f"it was not sent within {SECONDS} seconds")
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return unread(what, name, (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1])
    if "unseen" in answer:
        return Unseen(answer["unseen"])
    return CheckpointError(answer["error"]) if "error" in answer else answer[what]
