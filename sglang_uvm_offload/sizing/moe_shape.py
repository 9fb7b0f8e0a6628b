"""Reading from a Hugging Face config how many routed experts a model has, and in which layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MoeShape:
    """``num_experts`` routed experts, ``top_k`` of them a token, in each of the layers ``moe_layers``."""

    num_experts: int
    top_k: int | None
    moe_layers: tuple[int, ...]


EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "max_n_routed_experts")
TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "experts_per_token"),
    *("top_k_experts", "moe_router_topk"),
)
EXPERT_SIZES = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "intermediate_size")

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


def expert_size(config: Mapping[str, Any]) -> Any:
    """The hidden units of a routed expert that ``config`` states, the most of any layer."""
    return most(next((value for name in EXPERT_SIZES if (value := config.get(name))), None))


def moe_shape(config: Any) -> MoeShape | None:
    """The shape that ``config`` (a text config, attributes as in config.json) describes, None for a dense model. Raises
    ``ValueError`` for values that are no numbers, or fewer of them than layers."""
    experts = most(_first(config, *EXPERTS))
    layers = getattr(config, "num_hidden_layers", None)
    if not experts or not layers:
        return None
    return MoeShape(experts, stated_top_k(config), tuple(index for index in range(layers) if _is_moe(config, index)))


def _is_moe(config: Any, index: int) -> bool:
    """Whether decoder layer ``index`` routes: as the config names each layer, else by the rules that families write into it."""
    named = _named_layer(config, index)
    if named is not None:
        return named
    rules = [
        index >= (_least(getattr(config, name, None)) or 0)
        for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    ]
    end = most(getattr(config, "moe_layer_end_index", None))
    if end is not None and end >= 0:
        rules.append(index <= end)
    return all(rules) and index not in (getattr(config, "mlp_only_layers", None) or ()) and _in_step(config, index)


def _named_layer(config: Any, index: int) -> bool | None:
    """What a list of layers says of one; None without such a list."""
    frequency = getattr(config, "moe_layer_freq", None)
    if isinstance(frequency, (list, tuple)):
        return bool(frequency[index])
    if isinstance(kinds := getattr(config, "mlp_layer_types", None), (list, tuple)):
        return bool(kinds[index] != "dense")
    for name in ("moe_layers", "moe_layers_enum"):
        layers = getattr(config, name, None)
        if isinstance(layers, str):
            layers = [int(number) for number in layers.split(",") if number.strip()]
        if isinstance(layers, (list, tuple)):
            return index in layers
    return _in_pattern(config, index)


def _in_pattern(config: Any, index: int) -> bool | None:
    """Reads Nemotron-H's list of layer kinds (a letter or a word each), one of which is MoE."""
    for name, kind in (("hybrid_override_pattern", "E"), ("layers_block_type", "moe")):
        pattern = getattr(config, name, None)
        if isinstance(pattern, (str, list, tuple)) and kind in pattern:
            return bool(pattern[index] == kind)
    return None


def _in_step(config: Any, index: int) -> bool:
    """Whether the layer falls on the config's period of MoE layers."""
    period = getattr(config, "expert_layer_period", None)
    if period:
        return bool(index % period == (getattr(config, "expert_layer_offset", None) or 0))
    frequency = getattr(config, "moe_layer_freq", None)
    if frequency:
        return bool(index % frequency == 0)
    step = _first(config, "decoder_sparse_step", "interleave_moe_layer_step")
    if step:
        return bool((index + 1) % step == 0)
    every = getattr(config, "moe_layer_interval", None) or 1
    start = _least(getattr(config, "moe_layer_start_index", None)) or 0
    return bool((index - start) % every == 0)


def most(value: Any) -> int | None:
    """The largest of a number, or of one for each layer."""
    return max(_numbers(value), default=None)


def _least(value: Any) -> int | None:
    return min(_numbers(value), default=None)


def _numbers(value: Any) -> list[int]:
    return [number for number in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(number, int)]


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
