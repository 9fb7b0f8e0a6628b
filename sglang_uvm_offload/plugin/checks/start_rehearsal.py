"""Runs, for ``doctor``, the steps that SGLang's launcher takes between resolving its arguments and the first spawn, or while
ranks load, with SGLang's own functions. A launch takes them anyway, so it does not run them twice."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.parser.template_detection import resolve_auto_parsers
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import draft_source
from sglang_uvm_offload.plugin.sglang_error import described

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json"),
    *("tiktoken.model", "qwen.tiktoken", "spiece.model", "sentencepiece.bpe.model"),
)
"""A model's folder with a tokenizer has at least one of these files."""


def problems(server_args: Any) -> list[str]:
    """Why the launcher would end, with SGLang's messages. Call this once, on resolved arguments."""
    cfg = resolving_view(server_args)
    out = _of(f"SGLang cannot serve {cfg.model_path}", server_args, server_args.check_server_args)
    out += _of("--reasoning-parser / --tool-call-parser", server_args, lambda: resolve_auto_parsers(server_args))
    draft = cfg.speculative_draft_model_path
    if cfg.speculative_algorithm not in (None, "NGRAM") and draft and not draft_source.from_the_checkpoint(cfg):
        out += _of(f"--speculative-draft-model-path {draft}", server_args, lambda: _draft(server_args, cfg))
    named = cfg.tokenizer_path != cfg.model_path and Path(cfg.tokenizer_path).is_dir()
    if not cfg.skip_tokenizer_init and (named or _has_tokenizer(cfg.tokenizer_path)):
        out += _of(f"--tokenizer-path {cfg.tokenizer_path}", server_args, lambda: _tokenizer(cfg))
    return out


def warnings(server_args: Any) -> list[str]:
    """Conditions that would end the start if they still hold then."""
    cfg, out = resolving_view(server_args), []
    if not cfg.skip_tokenizer_init and Path(cfg.tokenizer_path).is_dir() and not _has_tokenizer(cfg.tokenizer_path):
        out.append(
            f"{cfg.tokenizer_path} has no tokenizer: SGLang does not start without one (--tokenizer-path, or "
            "--skip-tokenizer-init)"
        )
    if cfg.node_rank == 0 and (why := _taken(cfg.host, cfg.port)):
        out.append(f"--port {cfg.port} on {cfg.host}: {why}; SGLang listens there once all weights are loaded")
    return out


def _of(what: str, server_args: Any, step: Callable[[], Any]) -> list[str]:
    try:
        step()
    except Exception as error:  # noqa: BLE001 -- of any type, from SGLang's code; it would end the launch
        return [f"{what}: {described(error, server_args)}"]
    return []


def _draft(server_args: Any, cfg: Any) -> None:
    """Build the draft model's config as each rank's draft worker does."""
    path, revision = cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision
    ModelConfig.from_server_args(server_args, model_path=path, model_revision=revision, is_draft_model=True)


def _tokenizer(cfg: Any) -> None:
    """Load the tokenizer as the launcher does while ranks load weights. A multimodal model's processor includes it."""
    get_tokenizer(
        cfg.tokenizer_path,
        tokenizer_mode=cfg.tokenizer_mode,
        trust_remote_code=cfg.trust_remote_code,
        revision=cfg.revision,
        tokenizer_backend=cfg.tokenizer_backend,
    )


def _has_tokenizer(path: str) -> bool:
    """Whether the folder has a tokenizer. False for a Hugging Face id, for which this downloads nothing."""
    folder = Path(path)
    return folder.is_file() or (folder.is_dir() and any((folder / name).exists() for name in TOKENIZERS))


def _taken(host: str, port: int) -> str | None:
    """Why no server can listen on this address now."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(address)
            except OSError as error:
                return error.strerror
    return None
