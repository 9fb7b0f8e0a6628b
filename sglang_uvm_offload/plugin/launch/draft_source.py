"""The source of a launch's draft model: the target's checkpoint, a separate one, or none."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import flag_name


def from_the_checkpoint(cfg: Any) -> bool:
    """Whether the launch drafts with layers of the target's own checkpoint."""
    return cfg.speculative_algorithm in ("EAGLE", "NEXTN") and cfg.speculative_draft_model_path in (None, cfg.model_path)


def problems(config: RequestedConfig, cfg: Any) -> list[str]:
    """Why ``draft_num_resident`` applies to no draft model."""
    if config.draft_num_resident is None or cfg.speculative_algorithm not in (None, "NGRAM"):
        return []
    given = f"{flag_name('draft_num_resident')} {config.draft_num_resident}"
    return [f"{given}: no draft model is loaded (--speculative-algorithm {cfg.speculative_algorithm}); remove it"]


def tokens_verified(cfg: Any) -> int:
    """Draft tokens that a step verifies per request, 0 without drafts."""
    return (cfg.speculative_num_draft_tokens or 0) if cfg.speculative_algorithm is not None else 0
