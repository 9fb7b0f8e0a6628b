"""Checks ``--init-expert-location``, which each rank reads before it builds the model."""

from __future__ import annotations

import json
import pickle
from typing import Any

import torch
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation

from sglang_uvm_offload.plugin.checks.named_files import json_of, reason

FLAG = "--init-expert-location"
MAP, COUNT = "physical_to_logical_map", "logical_count"

IN_ORDER = {"GptOssForCausalLM"}
"""Architectures whose weights SGLang loads in the checkpoint's order, all experts of a tensor at once, though it maps the
router's ids: any other order serves wrong tokens, without an error (seen with 0.5.23, without this plugin)."""


def problems(cfg: Any, model: Any) -> list[str]:
    """Why SGLang cannot start from this map. ``cfg``: its resolved arguments; ``model``: its config of the model."""
    value = cfg.init_expert_location
    if value == "trivial":
        return []
    named = value if len(value) < 200 else f"{value[:60]}..."
    return [f"{FLAG} {named}: {why}" for why in _of_model(model) or _why(value, cfg, model)]


def _of_model(model: Any) -> list[str]:
    """Why SGLang serves this model with no map at all."""
    names = model.hf_config.architectures or []
    if wrong := sorted(IN_ORDER & set(names)):
        return [f"SGLang would load the experts of {wrong[0]} in the checkpoint's order, and answer wrongly; remove it"]
    if ModelConfigForExpertLocation.from_model_config(model) is None:
        return [f"SGLang places no experts of {', '.join(names)} by a map, and would end at the first token; remove it"]
    return []


def _why(value: str, cfg: Any, model: Any) -> list[str]:
    try:
        found = _load(value)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        return [reason(error) if value.endswith((".pt", ".json")) else f"is neither a .pt, a .json nor JSON: {reason(error)}"]
    if not isinstance(found, dict) or not {MAP, COUNT} & set(found):
        return [f"must hold {MAP} or {COUNT}"]
    if MAP not in found:
        return _counts(found[COUNT], cfg, model)
    if more := sorted(set(found) - {MAP}):
        return [f"must hold nothing but {MAP}, and also holds {', '.join(more)}"]
    return _map(found[MAP], cfg, model)


def _load(value: str) -> Any:
    if value.endswith(".pt"):
        return torch.load(value, weights_only=True, map_location="cpu")
    return json_of(value) if value.endswith(".json") else json.loads(value)


def _tensor(values: Any) -> torch.Tensor | None:
    try:
        return values if isinstance(values, torch.Tensor) else torch.tensor(values)
    except (ValueError, TypeError, RuntimeError):
        return None


def _map(values: Any, cfg: Any, model: Any) -> list[str]:
    """One row per decoder layer, including dense ones, with the logical expert of each physical expert."""
    places, shape = _tensor(values), ModelConfigForExpertLocation.from_model_config(model)
    if places is None:
        return [f"{MAP} must be a table of whole numbers, a row a layer"]
    assert shape is not None, "_of_model has refused it"
    want = shape.num_logical_experts + cfg.ep_num_redundant_experts
    if places.dim() != 2 or places.is_floating_point():
        return [f"{MAP} must be a table of whole numbers, a row a layer"]
    out = []
    if places.shape[0] < shape.num_layers:
        out.append(f"{MAP} has {places.shape[0]} rows, but the model has {shape.num_layers} layers")
    if places.shape[1] != want:
        redundant = f" and --ep-num-redundant-experts {cfg.ep_num_redundant_experts}" if cfg.ep_num_redundant_experts else ""
        experts = f"the model has {shape.num_logical_experts} experts a layer{redundant}"
        out.append(f"{MAP} has {places.shape[1]} physical experts a layer, but {experts}")
    if places.numel() and (places.min() < 0 or places.max() >= shape.num_logical_experts):
        out.append(
            f"{MAP} names experts {places.min()} to {places.max()}, but the model's are 0 to {shape.num_logical_experts - 1}"
        )
    return out


def _counts(values: Any, cfg: Any, model: Any) -> list[str]:
    """Tokens by layer and expert, or several such tables."""
    counts, shape = _tensor(values), ModelConfigForExpertLocation.from_model_config(model)
    if counts is None or counts.dim() not in (2, 3):
        return [f"{COUNT} must be a table of numbers by layer and expert"]
    assert shape is not None, "_of_model has refused it"
    if counts.shape[-1] != shape.num_logical_experts:
        return [f"{COUNT} has {counts.shape[-1]} experts a layer, but the model has {shape.num_logical_experts}"]
    return []
