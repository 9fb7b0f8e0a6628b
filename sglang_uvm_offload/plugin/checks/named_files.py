"""Checks the files in a launch's flags that SGLang opens only in a rank, or once all weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from sglang.srt.parser.code_completion_parser import completion_template_exists

from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.launch.local_checkpoint import unreadable

Reader = Callable[[str], Any]


def problems(cfg: Any) -> list[str]:
    """Why SGLang cannot use a file that its resolved arguments ``cfg`` name, one line per flag."""
    out = [*_templates(cfg), *_adapters(cfg), *_token_map(cfg)]
    for flag, path, read in _read(cfg):
        try:
            read(path)
        except (OSError, ValueError, yaml.YAMLError) as error:
            out.append(f"{flag} {path}: {reason(error)}")
    return out


def reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def json_of(path: str) -> Any:
    """Raises ``OSError`` or ``ValueError``."""
    return json.loads(Path(path).read_text())


def _yaml_of(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text())


def _read(cfg: Any) -> Iterator[tuple[str, str, Reader]]:
    """The flag, the file and how SGLang reads it, for each flag that has an effect in this launch."""
    if cfg.speculative_algorithm == "NGRAM" and cfg.speculative_ngram_external_corpus_path:
        yield "--speculative-ngram-external-corpus-path", cfg.speculative_ngram_external_corpus_path, _open
    if cfg.dllm_algorithm and cfg.dllm_algorithm_config:
        yield "--dllm-algorithm-config", cfg.dllm_algorithm_config, _yaml_of
    storage = cfg.hicache_storage_backend_extra_config
    if cfg.enable_hierarchical_cache and cfg.hicache_storage_backend and storage:
        if storage.startswith("@"):
            yield "--hicache-storage-backend-extra-config", storage[1:], _by_suffix
        else:
            yield "--hicache-storage-backend-extra-config", storage, json.loads


def _open(path: str) -> None:
    open(path, "rb").close()


def _by_suffix(path: str) -> Any:
    return {".json": json_of, ".yaml": _yaml_of, ".yml": _yaml_of}.get(Path(path).suffix.lower(), _open)(path)


def _templates(cfg: Any) -> Iterator[str]:
    """SGLang's own template names, or files, which it reads while ranks load weights."""
    if cfg.chat_template and not compat.has_chat_template(cfg.chat_template):
        yield from _template("--chat-template", cfg.chat_template, (".jinja", ".json"))
    if cfg.completion_template and not completion_template_exists(cfg.completion_template):
        yield from _template("--completion-template", cfg.completion_template, (".json",))


def _template(flag: str, named: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    if not Path(named).exists():
        yield f"{flag} {named}: is neither a template of SGLang's nor a file"
    elif not named.endswith(suffixes):
        yield f"{flag} {named}: must end in {' or '.join(suffixes)}"
    else:
        try:
            (json_of if named.endswith(".json") else _open)(named)
        except (OSError, ValueError) as error:
            yield f"{flag} {named}: {reason(error)}"


def _adapters(cfg: Any) -> Iterator[str]:
    """Each adapter is a folder or a model id, as ``NAME=PATH``, in JSON, or as SGLang has parsed it."""
    named = cfg.lora_paths or []
    for adapter in named.values() if isinstance(named, dict) else named:
        path = adapter.get("lora_path") if isinstance(adapter, dict) else getattr(adapter, "lora_path", adapter)
        path = path.rpartition("=")[2] if isinstance(path, str) else None
        if path and (why := unreadable(path)):
            yield f"--lora-paths {path}: {why}"
        elif path and Path(path).is_dir() and not (Path(path) / "adapter_config.json").is_file():
            yield f"--lora-paths {path}: has no adapter_config.json"


def _token_map(cfg: Any) -> Iterator[str]:
    """A file, or one in a Hugging Face repository: ``OWNER/NAME/FILE``. EAGLE3's draft models bring their own map."""
    named = cfg.speculative_token_map
    if cfg.speculative_algorithm != "EAGLE" or not named or Path(named).exists():
        return
    if named.startswith(("/", ".", "~")) or named.count("/") != 2:
        yield f"--speculative-token-map {named}: is neither a file nor OWNER/NAME/FILE on the Hugging Face Hub"
