"""Checks that SGLang finds what ``--load-format`` needs, which it looks for in a rank, once the model is built and its experts
have their memory."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = {
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "private": "sglang.private.private_model_loader",
    "runai_streamer": "runai_model_streamer",
}
"""What SGLang imports for a format, where no dependency of it brings that."""

_OR_PT = "*.pt"
"""Models may say that they have such files instead."""
FILES = {
    **dict.fromkeys(("fastsafetensors", "instanttensor"), ("*.safetensors", _OR_PT)),
    "mistral": ("consolidated*.safetensors", _OR_PT),
    "npcache": ("*.bin", _OR_PT),
    "pt": (_OR_PT,),
    "sharded_state": ("model-rank-*-part-*.safetensors",),
}
"""The files of which a folder must have one (``DefaultModelLoader._prepare_weights``, ``ShardedStateLoader``).
``local_checkpoint`` checks those of other formats."""


def problems(cfg: Any) -> list[str]:
    """Why SGLang cannot load as its arguments ``cfg`` say, one line per flag."""
    out = [f"--load-format {cfg.load_format}: {why}" for why in _lacking(cfg.load_format, cfg.model_path, cfg)]
    draft, model = cfg.speculative_draft_load_format, cfg.speculative_draft_model_path
    return out + [f"--speculative-draft-load-format {draft}: {why}" for why in _lacking(draft, model or cfg.model_path, cfg)]


def _lacking(load_format: str | None, model: str, cfg: Any) -> Iterator[str]:
    if load_format is None:
        return
    package, patterns = PACKAGES.get(load_format), FILES.get(load_format)
    if package is not None and not _is_installed(package):
        yield f"SGLang needs the Python package {package} for it, which is not installed"
    if load_format == "remote" and "://" not in model:
        yield f"it loads from an address such as redis:// or s3://, and the model is {model}"
    if patterns is None or not Path(model).is_dir() or "pattern" in str(cfg.model_loader_extra_config):
        return
    # A model may name subfolders of its own.
    if not any(path for pattern in patterns for path in Path(model).rglob(pattern)):
        yield f"{model} holds no {' or '.join(patterns)} file"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # a package that should hold it is not there
        return False
