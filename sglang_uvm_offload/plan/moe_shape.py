"""Reading from a Hugging Face config how many routed experts and draft layers a model has."""

from __future__ import annotations

from typing import Any

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "max_n_routed_experts")
TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "experts_per_token"),
    *("top_k_experts", "moe_router_topk"),
)

DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers", "num_mtp_layers")
"""Qwen3-Next's checkpoints have one layer, and its config does not say so."""


def stated_experts(config: Any) -> int | None:
    """The routed experts of a layer that ``config`` states, the most where it states several numbers, None for a dense model.
    No rule chooses among them: a model has no more than this, and may have fewer."""
    return max((_most(getattr(config, name, None)) or 0 for name in EXPERTS), default=0) or None


def stated_top_k(config: Any) -> int | None:
    """The routed experts of a token that ``config`` states, the most of any layer."""
    return _most(_first(config, *TOP_K))


def stated_drafts(config: Any) -> int:
    """The draft layers that ``config`` says a checkpoint holds."""
    stated = _most(_first(config, *DRAFTS)) or 0
    return stated or int(getattr(config, "model_type", None) == "qwen3_next")


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _most(value: Any) -> int | None:
    """The largest of a number, or of one for each layer."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    return max((number for number in numbers if isinstance(number, int)), default=None)
