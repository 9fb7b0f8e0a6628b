"""What a model of SGLang's holds, by the classes of its modules: how ranks divide it, and which of it are routed experts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

_ATTENTION = (RadixAttention, RadixLinearAttention, MambaMixer2)
_SHARED = re.compile(r"shared_(expert|mlp)|\.shared\b")
"""Beside routed experts: what every token uses."""
_TOWER = re.compile(r"vis(ual|ion)|audio|tower|projector|mm_proj")


def shape_of(model: torch.nn.Module, top_k: int | None) -> dict[str, Any]:
    """The decoder layers of ``model``, and what is outside of them: bytes of a rank that shares nothing, and ``…_parameters``,
    weights. ``top_k`` is the config's, for layers that have none."""
    name, layers = _decoder_layers(model)
    out: dict[str, Any] = {
        "layers": [_layer(layer, top_k) for layer in layers],
        **dict.fromkeys(
            ("embedding", "head", "other", *(f"{part}_parameters" for part in ("outside", "tower", "embedding"))), 0
        ),
    }
    owner = f"{name.rpartition('.')[0]}.".lstrip(".")
    for path, module, _, parameter in _parameters(model):
        if path.startswith(f"{name}."):
            continue
        kind = _vocabulary(module) or "other"
        out[kind] += parameter.nbytes
        tower = kind == "other" and (not path.startswith(owner) or _TOWER.search(path))
        out["tower_parameters" if tower else "outside_parameters"] += parameter.numel()
        out["embedding_parameters"] += parameter.numel() if kind == "embedding" else 0
    return out


def draft_of(model: torch.nn.Module, top_k: int | None) -> dict[str, Any]:
    """A draft model as one layer, without the embedding and the head that it shares with the model."""
    return _layer(model, top_k)


def _decoder_layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """The list of modules with most of the routed experts, the outermost of several that have as many, and its path."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)]
    held = [sum(isinstance(part, FusedMoE) for part in parts.modules()) for _, parts in lists]
    if not any(held):
        raise ValueError(f"{type(model).__name__} has no layer of SGLang's FusedMoE")
    return lists[held.index(max(held))]


def _layer(layer: torch.nn.Module, top_k: int | None) -> dict[str, Any]:
    """One decoder layer. Of several sets of routed experts, such as one for images, a token of text uses the first."""
    routed = [part for part in layer.modules() if isinstance(part, FusedMoE)]
    sums: dict[str, int] = defaultdict(int)
    parts: dict[str, dict[str, Any]] = {}
    for path, module, name, parameter in _parameters(layer):
        if isinstance(module, FusedMoE) and parameter.ndim and parameter.shape[0] == module.num_local_experts:
            if _loaded(module, parameter):
                _add_experts(sums, parts, name, parameter, module)
                sums["expert_parameters"] += parameter.numel() // parameter.shape[0] if module is routed[0] else 0
        elif not _vocabulary(module):
            for kind, share in _divisions(layer, path, module).items():
                sums[kind] += round(parameter.nbytes * share)
            sums["parameters"] += parameter.numel()
            sums["shared_parameters"] += parameter.numel() if routed and _SHARED.search(path) else 0
    kinds = ("attention", "keys_values", "feed_forward", "replicated")
    weights = ("parameters", "routed_parameters", "expert_parameters", "shared_parameters")
    return {
        **{name: sums[name] for name in (*kinds, *weights)},
        "parts": list(parts.values()),
        "experts": max((part.num_local_experts - part.num_fused_shared_experts for part in routed), default=0),
        "top_k": _top_k(routed[0], top_k) if routed else 0,
        "attention_heads": _heads(layer),
    }


def _loaded(module: FusedMoE, parameter: torch.nn.Parameter) -> bool:
    """Whether a checkpoint has it. Beside those that it loads SGLang has others, which it makes of these; all of a model of the
    transformers library are loaded, without a loader of their own."""
    return hasattr(parameter, "weight_loader") or not any(hasattr(one, "weight_loader") for one in module.parameters())


def _add_experts(
    sums: dict[str, int], parts: dict[str, dict[str, Any]], name: str, parameter: torch.nn.Parameter, module: FusedMoE
) -> None:
    """A parameter with a row for each expert, shared ones last, as SGLang names it: ``w13_weight_scale``. Of several sets of
    experts in a layer, the largest expert counts."""
    rows, fused = parameter.shape[0], int(module.num_fused_shared_experts)
    one, weights = parameter.nbytes // rows, parameter.numel() // rows
    part = parts.setdefault(name, {"name": name, "shape": list(parameter.shape), "expert_bytes": 0, "bytes": 0})
    part["expert_bytes"] = max(part["expert_bytes"], one)
    part["bytes"] += one * (rows - fused)
    sums["routed_parameters"] += weights * (rows - fused)
    sums["feed_forward"] += one * fused
    for count in ("parameters", "shared_parameters"):
        sums[count] += weights * fused


def _top_k(module: FusedMoE, stated: int | None) -> int:
    """Of the routed experts alone."""
    chosen = stated if module.top_k is None else module.top_k - module.num_fused_shared_experts
    return min(chosen or 0, module.num_local_experts)


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Parameter]]:
    """Each parameter once, with its full name, its module and its name there: those that are tied have one module."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}".lstrip("."), module, name, parameter


def _vocabulary(module: torch.nn.Module) -> str:
    if isinstance(module, ParallelLMHead):
        return "head"
    return "embedding" if isinstance(module, VocabParallelEmbedding) else ""


def _divisions(layer: torch.nn.Module, path: str, module: torch.nn.Module) -> dict[str, float]:
    """The shares of a parameter of ``module`` that count as a field of ``LayerShape``, by how ranks divide it."""
    if isinstance(module, QKVParallelLinear):
        queries = module.total_num_heads * module.head_size
        keys_values = module.total_num_kv_heads * (module.head_size + module.v_head_size)
        return {"attention": queries / (queries + keys_values), "keys_values": keys_values / (queries + keys_values)}
    if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
        return {"replicated": 1}
    return {"attention" if _attends(layer, path) else "feed_forward": 1}


def _attends(layer: torch.nn.Module, path: str) -> bool:
    """Whether the module that holds the linear layer at ``path`` also holds the attention; a decoder layer, directly."""
    owner = path.rpartition(".")[0].rpartition(".")[0]
    holder = layer.get_submodule(owner)
    parts = holder.modules() if owner else [holder, *holder.children()]
    return any(isinstance(part, _ATTENTION) for part in parts)


def _heads(layer: torch.nn.Module) -> list[int]:
    """Heads of keys, their size and that of values, and the window (-1 without) of the layer's KV cache; empty without one."""
    for part in layer.modules():
        if isinstance(part, RadixAttention):
            return [part.tp_k_head_num, part.head_dim, part.v_head_dim, part.sliding_window_size]
    return []
