"""Checks that a server's output files do not replace files that must be kept."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.files import reading
from sglang_uvm_offload.files.atomic import Kind, Protected, refusal
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.routing.merged_profile import node_file
from sglang_uvm_offload.routing.profile import PROFILE_FILE
from sglang_uvm_offload.routing.trace import TRACE_FILE

logger = logging.getLogger(__name__)

STATS_FORMAT = "sglang-uvm-offload statistics"


def _is_stats(path: Path) -> bool:
    begins = f'{{"format": "{STATS_FORMAT}"'.encode()
    with reading.open_regular(path) as file:
        return file.read(len(begins)) == begins


STATS_FILE = Kind("statistics file", _is_stats)


def unless_read_only(config: RequestedConfig, server_args: Any) -> RequestedConfig:
    """``config``, without saving the profile if the file exists and must not be replaced."""
    path = config.save_profile
    if path is None or path not in config.profiles:
        return config
    own = node_file(path, resolving_view(server_args).node_rank)
    if not (os.path.exists(path) or os.path.exists(own)):
        return config
    closed = next((each for each in (path, own, path.parent) if _is_read_only(each)), None)
    why = f"{closed} is read-only" if closed else refusal(own, PROFILE_FILE, model_folders(server_args))
    if why is None:
        return config
    logger.info("Expert offload: profile %s: only read, not saved: %s", path, why)
    return dataclasses.replace(config, save_profile=None)


def _is_read_only(path: Path) -> bool:
    """Whether the path is read-only: by its mode, even if a superuser could write to it, or for another reason."""
    return os.path.exists(path) and not (os.stat(path).st_mode & 0o222 and os.access(path, os.W_OK))


def problems(config: RequestedConfig, server_args: Any) -> list[str]:
    """Why files that ``config`` names cannot be written."""
    folders, others = model_folders(server_args), {}
    # Reading a profile from the path that it is saved to is allowed: the saved profile includes it.
    for path in config.profiles:
        others[path] = f"a file of {flag_name('profile')}"
    wanted = []
    if config.save_profile is not None:
        own = node_file(config.save_profile, resolving_view(server_args).node_rank)
        wanted.append((config.saving_flag, own, PROFILE_FILE, folders))
        others[own] = f"the file of {config.saving_flag}"
    if config.trace is not None:
        wanted.append((flag_name("trace"), config.trace, TRACE_FILE, {**folders, **others}))
        others[config.trace] = f"the file of {flag_name('trace')}"
    if config.stats is not None:
        wanted.append((flag_name("stats"), config.stats, STATS_FILE, {**folders, **others}))
    return [
        f"{flag} {str(path)!r}: {reason}"
        for flag, path, kind, protected in wanted
        if (reason := refusal(path, kind, protected))
    ]


def model_folders(server_args: Any) -> Protected:
    """The folders of the model, its draft model and its tokenizer, which must not be written to."""
    cfg = resolving_view(server_args)
    models = {
        "the tokenizer's folder": cfg.tokenizer_path,
        "the draft model's folder": cfg.speculative_draft_model_path,
        "the model's folder": cfg.model_path,
    }
    return {folder: what for what, model in models.items() if model for folder in _folders(str(model), cfg.download_dir)}


def _folders(model: str, download_dir: str | None) -> Iterator[Path]:
    """The folder of a local model, or the cache entry of a Hugging Face id, which may not exist yet. A snapshot in the cache
    links to files outside its folder, so the whole entry counts."""
    folder = Path(model)
    if not folder.exists():
        yield Path(download_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")
        return
    if folder.is_file():
        folder = folder.parent
    yield folder
    for parent in folder.resolve().parents:
        if parent.name.startswith("models--"):
            yield parent
