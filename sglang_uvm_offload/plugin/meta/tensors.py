"""Classifies the parameters of an SGLang model by module class: how ranks shard them, and which are routed experts."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from sglang_uvm_offload.plan.lookup_tables import LookupTable, kind_of
from sglang_uvm_offload.plan.model_shape import ExpertPart, LayerShape
from sglang_uvm_offload.plan.safetensors_header import NoExperts

_ATTENTION = (RadixAttention, RadixLinearAttention, MambaMixer2)
_SHARED = re.compile(r"shared_(expert|mlp)|\.shared\b")
"""Shared experts, which every token uses."""
_TOWER = re.compile(r"vis(ual|ion)|audio|tower|projector|mm_proj")


@dataclass
class Counted:
    """The tensors of a model: bytes on a single rank, and the number of weights in ``…_parameters``."""

    layers: list[CountedLayer]
    tables: list[LookupTable]
    embedding: int = 0
    head: int = 0
    other: int = 0
    outside_parameters: int = 0
    tower_parameters: int = 0
    embedding_parameters: int = 0
    table_parameters: int = 0


@dataclass
class CountedLayer:
    """One decoder layer, or a draft model."""

    sums: dict[str, int]
    parts: list[ExpertPart]
    experts: int
    top_k: int
    expert_size: int
    """Hidden units of an expert, counted from unpacked weights."""

    def shape(self, index: int, parameters: int) -> LayerShape:
        kinds = {kind: self.sums[kind] for kind in ("expert_bytes", "attention", "keys_values", "feed_forward", "replicated")}
        return LayerShape(index, tuple(sorted(self.parts, key=lambda part: part.name)), **kinds, parameters=parameters)


def counted(model: torch.nn.Module, top_k: int | None, hidden: int) -> Counted:
    """Count the decoder layers of ``model`` and everything outside them. ``top_k`` is the config's, for layers without one."""
    name, layers = _decoder_layers(model)
    out = Counted([counted_layer(layer, top_k, hidden) for layer in layers], _tables(model, name))
    owner = f"{name.rpartition('.')[0]}.".lstrip(".")
    for path, module, _, parameter in _parameters(model):
        if kind_of(path) is not None:
            out.table_parameters += parameter.numel()
            continue
        if path.startswith(f"{name}."):
            continue
        kind = _vocabulary(module) or "other"
        setattr(out, kind, getattr(out, kind) + parameter.nbytes)
        if kind == "other" and (not path.startswith(owner) or _TOWER.search(path)):
            out.tower_parameters += parameter.numel()
        else:
            out.outside_parameters += parameter.numel()
        out.embedding_parameters += parameter.numel() if kind == "embedding" else 0
    return out


def _tables(model: torch.nn.Module, layers: str) -> list[LookupTable]:
    """The lookup tables, from which a token reads only a few rows."""
    sums: Counter[tuple[int, str]] = Counter()
    for path, _, _, parameter in _parameters(model):
        if kind := kind_of(path):
            inside = path.startswith(f"{layers}.")
            sums[int(path.removeprefix(f"{layers}.").partition(".")[0]) if inside else 0, kind] += parameter.nbytes
    return [LookupTable(kind, layer, nbytes) for (layer, kind), nbytes in sorted(sums.items())]


def _decoder_layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """The module list with the most routed experts (the outermost of equals), and its path."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)]
    held = [sum(isinstance(part, FusedMoE) for part in parts.modules()) for _, parts in lists]
    if not any(held):
        raise NoExperts(f"{type(model).__name__} has no routed experts, so there is nothing to offload")
    return lists[held.index(max(held))]


def counted_layer(layer: torch.nn.Module, top_k: int | None, hidden: int) -> CountedLayer:
    """Count one decoder layer, or a draft model without the embedding and head that it shares with the target. If a layer has
    several sets of routed experts, such as one for images, text tokens use the first."""
    routed = [part for part in layer.modules() if isinstance(part, FusedMoE)]
    sums: dict[str, int] = defaultdict(int)
    parts: dict[str, ExpertPart] = {}
    expert_size = 0
    for path, module, name, parameter in _parameters(layer):
        if kind_of(path) is not None:
            continue
        if isinstance(module, FusedMoE) and parameter.ndim and parameter.shape[0] == module.num_local_experts:
            if _loaded(module, parameter):
                _add_experts(sums, parts, name, parameter, module)
                sums["expert_parameters"] += parameter.numel() // parameter.shape[0] if module is routed[0] else 0
                if module is routed[0] and name.startswith("w2_weight") and not expert_size:
                    expert_size = max(1, parameter.numel() // parameter.shape[0] // hidden)
        elif not _vocabulary(module):
            for kind, share in _divisions(layer, path, module).items():
                sums[kind] += round(parameter.nbytes * share)
            sums["parameters"] += parameter.numel()
            sums["shared_parameters"] += parameter.numel() if routed and _SHARED.search(path) else 0
    return CountedLayer(
        sums=sums,
        parts=list(parts.values()),
        experts=max((part.num_local_experts - part.num_fused_shared_experts for part in routed), default=0),
        top_k=_top_k(routed[0], top_k) if routed else 0,
        expert_size=expert_size,
    )


def _loaded(module: FusedMoE, parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter is in the checkpoint, not derived by SGLang from loaded ones. Models of the transformers library
    load all parameters, without per-parameter loaders."""
    return hasattr(parameter, "weight_loader") or not any(hasattr(one, "weight_loader") for one in module.parameters())


def _add_experts(
    sums: dict[str, int], parts: dict[str, ExpertPart], name: str, parameter: torch.nn.Parameter, module: FusedMoE
) -> None:
    """Add a parameter with one row per expert, shared ones last. Of several sets of experts, the largest expert counts.
    SGLang's ``w13_weight_scale`` is the planner's ``w13.weight_scale``."""
    rows, fused = parameter.shape[0], int(module.num_fused_shared_experts)
    one, weights = parameter.nbytes // rows, parameter.numel() // rows
    name = name.replace("_", ".", 1)
    held = parts[name].nbytes if name in parts else 0
    parts[name] = ExpertPart(name, max(held, one), _is_split(name, tuple(parameter.shape[1:])))
    sums["expert_bytes"] += one * (rows - fused)
    sums["routed_parameters"] += weights * (rows - fused)
    sums["feed_forward"] += one * fused
    for count in ("parameters", "shared_parameters"):
        sums[count] += weights * fused


def _is_split(name: str, shape: tuple[int, ...]) -> bool:
    """Whether ranks shard an expert's part of this shape. They shard its hidden units, so each rank holds whole tensors for the
    inputs of the gate and up projections, for the outputs of the down projection, and for single values."""
    if math.prod(shape) <= 1:
        return False
    if "g_idx" in name:
        return name.startswith("w2")
    return not name.startswith("w2") or not (name.endswith("bias") or shape[-1] == 1 or len(shape) == 1)


def _top_k(module: FusedMoE, stated: int | None) -> int:
    """Top-k without shared experts."""
    return (stated or 0) if module.top_k is None else module.top_k - module.num_fused_shared_experts


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Parameter]]:
    """Each parameter once: its full name, its module, its name there, and itself. Tied parameters appear with one module."""
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
    """The shares of a parameter of ``module`` that count towards each field of ``LayerShape``, by how ranks shard it."""
    if isinstance(module, QKVParallelLinear):
        queries = module.total_num_heads * module.head_size
        keys_values = module.total_num_kv_heads * (module.head_size + module.v_head_size)
        return {"attention": queries / (queries + keys_values), "keys_values": keys_values / (queries + keys_values)}
    if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
        return {"replicated": 1}
    return {"attention" if _attends(layer, path) else "feed_forward": 1}


def _attends(layer: torch.nn.Module, path: str) -> bool:
    """Whether the module that owns the linear layer at ``path`` also contains the attention. For a decoder layer, only direct
    children count."""
    owner = path.rpartition(".")[0].rpartition(".")[0]
    holder = layer.get_submodule(owner)
    parts = holder.modules() if owner else [holder, *holder.children()]
    return any(isinstance(part, _ATTENTION) for part in parts)
