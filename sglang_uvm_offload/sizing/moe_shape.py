"""Reading from a Hugging Face config how many routed experts a model has, and in which layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MoeShape:
    """``num_experts`` routed experts, ``top_k`` of them a token, in each of the layers ``moe_layers``."""

    num_experts: int
    top_k: int | None
    moe_layers: tuple[int, ...]


EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "experts_per_token"),
    *("top_k_experts", "moe_router_topk"),
)

DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers", "num_mtp_layers")
"""Qwen3-Next's checkpoints have one layer, and its config does not say so."""


def stated_experts(config: Any) -> int | None:
    """The routed experts of a layer that ``config`` states, the most where it states several numbers, None for a dense model.
    No rule chooses among them: a model has no more than this, and may have fewer."""
    return max((most(getattr(config, name, None)) or 0 for name in EXPERTS), default=0) or None


def stated_top_k(config: Any) -> int | None:
    """The routed experts of a token that ``config`` states, the most of any layer."""
    return most(_first(config, *TOP_K))


def stated_drafts(config: Any) -> int:
    """The draft layers that ``config`` says a checkpoint holds."""
    stated = most(_first(config, *DRAFTS)) or 0
    return stated or int(getattr(config, "model_type", None) == "qwen3_next")


def most(value: Any) -> int | None:
    """The largest number of a value that may be a list, of one for each layer; None for what is neither."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    return max((number for number in numbers if isinstance(number, int) and not isinstance(number, bool)), default=None)


def moe_shape(config: Any) -> MoeShape | None:
    """The shape that ``config`` (a text config, attributes as in config.json) describes, None for a dense model."""
    experts = most(_first(config, *EXPERTS))
    layers = getattr(config, "num_hidden_layers", None)
    if not experts or not layers:
        return None
    return MoeShape(experts, stated_top_k(config), tuple(index for index in range(layers) if _is_moe(config, index)))


def _is_moe(config: Any, index: int) -> bool:
    """Whether decoder layer ``index`` routes, by the rules that model families write into their configs."""
    frequency = getattr(config, "moe_layer_freq", None)
    if isinstance(frequency, (list, tuple)):
        return bool(frequency[index])
    if index in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    moe_layers = getattr(config, "moe_layers", None)
    if isinstance(moe_layers, (list, tuple)):
        return index in moe_layers
    if index < (getattr(config, "first_k_dense_replace", None) or 0):
        return False
    step = getattr(config, "decoder_sparse_step", None)
    if step:
        return (index + 1) % step == 0
    step = frequency or getattr(config, "interleave_moe_layer_step", None) or 1
    return index % step == 0 if frequency else (index + 1) % step == 0


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
