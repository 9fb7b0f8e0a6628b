"""Where a launch's draft model comes from: the target's checkpoint, a separate one, or none."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.sizing.draft_model import draft_experts
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError

_SEPARATE = ("EAGLE", "EAGLE3", "STANDALONE", "DFLASH")
"""Algorithms for which SGLang 0.5.23 loads a draft model and allocates a KV cache for it (``pool_configurator``)."""


def uncounted(cfg: Any) -> list[str]:
    """Why the planner cannot count these drafts."""
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


def separate(cfg: Any) -> ModelFiles | None:
    """The draft model with a separate checkpoint, None without one."""
    path = cfg.speculative_draft_model_path
    if cfg.speculative_algorithm in (None, "NGRAM") or path is None or from_the_checkpoint(cfg):
        return None
    return ModelFiles(path, cfg.speculative_draft_model_revision, cfg.download_dir, cfg.json_model_override_args or "")


def problems(config: RequestedConfig, cfg: Any, num_experts: int | None) -> list[str]:
    """Why ``--expert-offload-draft-num-resident`` does not fit the draft model. ``num_experts``: the target's. Skips a separate
    draft model whose config cannot be read."""
    number = config.draft_num_resident
    if number is None:
        return []
    given = f"{flag_name('draft_num_resident')} {number}"
    if cfg.speculative_algorithm in (None, "NGRAM"):
        return [f"{given}: no draft model is loaded (--speculative-algorithm {cfg.speculative_algorithm}); leave it out"]
    if not from_the_checkpoint(cfg):
        files = separate(cfg)
        try:
            if files is None:
                return []
            num_experts = draft_experts(files)
        except CheckpointError:
            return []
    if num_experts is None:
        return [f"{given}: the draft model ({cfg.speculative_draft_model_path}) has no routed experts; leave it out"]
    if number > num_experts:
        return [f"{given}: the draft model has {num_experts} routed experts a layer; give at most as many"]
    return []


def policy_problems(config: RequestedConfig, cfg: Any) -> list[str]:
    """Why ``--expert-offload-draft-policy`` has nothing to choose."""
    if config.draft_policy != "misses":
        return []
    given = f"{flag_name('draft_policy')} {config.draft_policy}"
    if not cfg.speculative_adaptive:
        return [
            f"{given}: needs --speculative-adaptive, which is not given or not supported with these flags (SGLang then logs "
            "the reason)"
        ]
    from sglang.srt.speculative.adaptive_spec_params import _load_adaptive_config

    _, by_batch_size = _load_adaptive_config(cfg.speculative_adaptive_config)
    if any(len(set(entry["candidate_steps"])) > 1 for entry in by_batch_size.values()):
        return []
    return [
        f"{given}: --speculative-adaptive-config {cfg.speculative_adaptive_config} lists one number of draft tokens for each "
        "batch size; list two or more in some candidate_steps"
    ]


def tokens_verified(cfg: Any) -> int:
    """Tokens that a step verifies per request, 0 without drafts."""
    return (cfg.speculative_num_draft_tokens or 0) if cfg.speculative_algorithm is not None else 0
