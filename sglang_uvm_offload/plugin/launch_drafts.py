"""Where a launch's drafts come from: the model's own checkpoint, one of their own, or no checkpoint at all."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.plugin.local_checkpoint import local_folder

_SEPARATE = ("EAGLE", "EAGLE3", "STANDALONE", "DFLASH")
"""Algorithms with which SGLang 0.5.23 loads a draft model, and makes a KV cache for it (``pool_configurator``)."""


def uncounted(cfg: Any) -> list[str]:
    """Why a plan cannot count these drafts."""
    algorithm = cfg.speculative_algorithm
    if algorithm in (None, "NGRAM") or from_the_checkpoint(cfg):
        return []
    if algorithm not in _SEPARATE:
        return [f"does not count --speculative-algorithm {algorithm}, only NEXTN, NGRAM and {', '.join(_SEPARATE)}"]
    if cfg.speculative_draft_kv_cache_dtype not in (None, cfg.kv_cache_dtype):
        return [f"does not count --speculative-draft-kv-cache-dtype {cfg.speculative_draft_kv_cache_dtype}"]
    return []


def from_the_checkpoint(cfg: Any) -> bool:
    """Whether the model's own draft layers are loaded."""
    return cfg.speculative_algorithm in ("EAGLE", "NEXTN") and cfg.speculative_draft_model_path in (None, cfg.model_path)


def separate_folder(cfg: Any) -> str | None:
    """The folder of the draft model's own checkpoint, None without one. Raises ``Uncounted``."""
    path = cfg.speculative_draft_model_path
    if cfg.speculative_algorithm in (None, "NGRAM") or path is None or from_the_checkpoint(cfg):
        return None
    return local_folder("--speculative-draft-model-path", path, cfg.speculative_draft_model_revision, cfg)


def tokens_verified(cfg: Any) -> int:
    """Tokens that a step verifies for a request, 0 without drafts."""
    return (cfg.speculative_num_draft_tokens or 0) if cfg.speculative_algorithm is not None else 0
