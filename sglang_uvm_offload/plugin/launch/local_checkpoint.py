"""Checks that the local checkpoint behind a flag can be read."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from sglang_uvm_offload.files import reading
from sglang_uvm_offload.plan.model_files import ModelFiles
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, read_folder


def unreadable(model: str) -> str | None:
    """Why the local model ``model`` cannot be read. None if it can, or if ``model`` is a Hugging Face id."""
    if os.path.isdir(model):
        return _special_file(model)
    if os.path.lexists(model) or not re.match(r"[./~]|[^/:]*/[^/]*/", model):
        return None
    return "no such folder"


def _special_file(folder: str) -> str | None:
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        return error.strerror
    for name in entries:
        try:
            mode = os.stat(os.path.join(folder, name)).st_mode
        except OSError:  # for example a link to a file that was not downloaded; its reader reports that
            continue
        if not stat.S_ISDIR(mode) and (kind := reading.special_kind(mode)):
            return f"contains {name}, which is {kind}, not a regular file"
    return None


def read_models(cfg: Any) -> list[Path]:
    """The models whose safetensors files a launch reads: the target and a separate draft model. ``--load-format dummy`` reads
    none. SGLang checks the other formats."""
    if cfg.load_format not in ("auto", "safetensors"):
        return []
    named = {cfg.model_path: cfg.revision, cfg.speculative_draft_model_path: cfg.speculative_draft_model_revision}
    files = [ModelFiles(model, revision, cfg.download_dir) for model, revision in named.items() if model]
    return [each.on_disk or Path(each.name) for each in files]


def damage(cfg: Any) -> list[str]:
    """Damage in local safetensors checkpoints that a launch would find only while loading, or never."""
    others = {".bin", ".pt"} if cfg.load_format == "auto" else {".pt"}
    return [problem for model in read_models(cfg) for problem in _damage(model, others)]


def _damage(model: Path, others: set[str]) -> list[str]:
    """``others``: suffixes of weight files that may replace safetensors."""
    try:
        if model.is_file():
            return [f"{model} is a file; give the checkpoint's folder"]
        kinds = {path.suffix for path in model.iterdir()} if model.is_dir() else set()
        if model.is_dir() and (".safetensors" in kinds or not kinds & others):
            read_folder(model)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return []
