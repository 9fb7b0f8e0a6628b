"""The config.json of a model on the Hugging Face Hub.

``huggingface_hub``, a dependency of SGLang, downloads it and keeps it in its cache. It runs in ``hub_program``, which is
stopped if it takes too long."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path

from sglang_uvm_offload.files import child
from sglang_uvm_offload.plan.safetensors_header import CheckpointError

PROGRAM = "sglang_uvm_offload.plan.hub_program"
SECONDS = 60
"""The time limit for the Hub to send one or two small files."""


class Unseen(CheckpointError):
    """The Hub cannot be read: no network, offline mode, a gated model, or no such file."""


def is_id(name: str) -> bool:
    """Whether ``name`` could be an id: ``owner/model``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def snapshot(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder of a model's downloaded files, complete or not; None if there are none."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def offline() -> bool:
    """Whether the user has set ``huggingface_hub`` to offline mode."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@cache  # a launch asks several times, and a network that is gone takes long to say so
def _answer(name: str, revision: str | None) -> Path | Unseen:
    from huggingface_hub import constants

    try:
        folder = os.path.abspath(constants.HF_HUB_CACHE)
        ended = child.run_module(PROGRAM, name, revision or "", folder, seconds=SECONDS)
    except subprocess.TimeoutExpired:
        return unread(name, f"it was not sent within {SECONDS} seconds")
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return unread(name, (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1])
    return Unseen(answer["unseen"]) if "unseen" in answer else Path(answer["config"])


def config_file(name: str, revision: str | None = None) -> Path:
    """The model's config.json, with the other files that say how its weights are stored. Raises ``Unseen``."""
    answer = _answer(name, revision)
    if isinstance(answer, Unseen):
        raise answer
    return answer


def unread(name: str, reason: str) -> Unseen:
    """The error, with what to do instead."""
    return Unseen(
        f"{name}: there is no such path, and its config.json cannot be read from the Hugging Face Hub ({reason}); "
        f"run hf download {name} config.json --local-dir DIR where that works, and give DIR/config.json"
    )
