"""The contents of a checkpoint: bytes of routed experts by layer, of everything else, and how ranks divide them.

Bytes come from safetensors headers, so any quantisation on disk is supported. Without a checkpoint, ``config_tensors`` derives
them from the config. Tensors are classified by the names that released checkpoints use.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_uvm_offload.reading import printable
from sglang_uvm_offload.sizing.config_tensors import check_counts, quantization_of, tensors_of
from sglang_uvm_offload.sizing.kv_cache import KvShape, kv_shape
from sglang_uvm_offload.sizing.moe_shape import moe_shape
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, TensorInfo, read_folder, read_json

_LAYER = re.compile(r"\.layers\.(\d{1,5})\.")
_ONE_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.(\w+)\.?(\w*)$")
_STACKED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w13|w2)[._]?(\w*)$")
_PART = {**dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "w13"), "w13"), "down_proj": "w2", "w2": "w2"}
_REPLICATED = re.compile(r"norm|q_a_proj|kv_a_proj|\.indexer\.|\.gate\.|\.router\.|shared_expert_gate|eh_proj")
_KEYS_VALUES = re.compile(r"attn.*\.[kv]_proj[._]")
_ATTENTION = re.compile(
    r"attn.*\.(q_proj|q_b_proj|kv_b_proj|o_proj|qkv_proj|sinks)\b|\.attn\.sinks|linear_attn\.(in_proj_\w+|out_proj|conv1d)\b"
)
_DRAFT = re.compile(r"^mtp\.(?:layers\.(\d{1,5})\.)?")
"""Draft layers of Qwen3-Next, which have numbers of their own."""
_FEED_FORWARD = re.compile(r"\.(gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)[._]")
_VOCABULARY = re.compile(r"(embed_tokens|lm_head|shared_head\.head)\.")
_TOWER = re.compile(r"vis(ual|ion)|audio|mm_proj")
_SHARED = re.compile(r"shared_(expert|mlp)|share_expert")
_PACKED = {"I32": 8, "U8": 2}
"""Four-bit weights in one element of a packed tensor."""


@dataclass(frozen=True)
class ExpertPart:
    """One tensor ``[experts, ...]`` of a layer as a server holds it: gate and up projections together, or down."""

    name: str
    nbytes: int
    """Bytes of the largest expert, undivided."""
    split: bool
    """Whether tensor parallelism divides it. An output bias or a single scale is whole on every rank."""


@dataclass(frozen=True)
class LayerShape:
    """The bytes of one decoder layer, by how ranks divide them."""

    index: int
    experts: tuple[ExpertPart, ...] = ()
    expert_bytes: int = 0
    """All routed experts of the layer together."""
    attention: int = 0
    """Divided by the ranks that share the attention."""
    keys_values: int = 0
    """Divided likewise, but at most into single heads."""
    feed_forward: int = 0
    """Dense MLP and shared experts, divided by all tensor-parallel ranks."""
    replicated: int = 0
    unknown: int = 0
    """The part of ``replicated`` that is so only for want of a known name."""
    parameters: int = 0
    """Weights outside the routed experts."""


@dataclass(frozen=True)
class CheckpointShape:
    """The planner's view of a model. Bytes are those of the checkpoint."""

    name: str
    from_headers: bool
    num_layers: int
    num_experts: int
    top_k: int
    context_length: int
    layers: tuple[LayerShape, ...]
    draft_layers: tuple[LayerShape, ...]
    embedding: int
    head: int
    other: int
    draft_vocabulary: int
    """The draft layers' copies of embedding and head, which a server does not keep."""
    total_bytes: int
    total_parameters: int
    expert_parameters: int
    """Weights of one routed expert in one layer."""
    kv: KvShape
    heads: int
    quantization: str
    expert_size: int
    hidden_size: int
    scale_block: int
    """The block size of a block-quantised weight's scales, 1 without."""
    family: str = ""
    """The config's ``model_type``."""
    architectures: tuple[str, ...] = ()
    """The config's names of the model's class."""
    draft_parameters: int = 0
    """Of ``total_parameters``, those of draft layers."""
    active_parameters: int = 0
    """Weights that one token of text is computed with: all but draft layers, towers for images and sounds, and the routed
    experts that it is not sent to. Embedding and head count, as with most publishers (OpenAI leaves the embedding out)."""
    shared_parameters: int = 0
    """Of shared experts, which every token uses, beside routed ones."""
    tower_parameters: int = 0
    """Of towers for images and sounds."""
    embedding_parameters: int = 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.experts)

    @property
    def expert_bytes(self) -> int:
        """All routed experts, draft layers left out."""
        return sum(layer.expert_bytes for layer in self.layers)


def load(path: Path) -> CheckpointShape:
    """The checkpoint in a folder (from its headers), or the one described by a JSON file: a config.json, or an object with it
    under ``config``. Raises ``CheckpointError`` with the reason."""
    if os.path.isdir(path):  # False, not an error, for a path that cannot be examined: reading it says why
        return from_tensors(str(path), read_json(path / "config.json"), read_folder(path), from_headers=True)
    value = read_json(path)
    config = value.get("config", value)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: its config is not an object")
    name = value.get("name", value.get("_name_or_path"))
    shown = name if isinstance(name, str) and name else str(path)
    return from_config(shown, config)


def from_config(name: str, config: Mapping[str, Any]) -> CheckpointShape:
    text = text_config(config)
    return from_tensors(name, config, _guard(tensors_of, text), from_headers=False)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of config.json for the language model; a quantisation or dtype beside it applies to it."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return dict(config)
    outer = {name: config[name] for name in ("quantization_config", "torch_dtype", "dtype") if name in config}
    return outer | inner


def from_tensors(name: str, config: Mapping[str, Any], tensors: Iterable[TensorInfo], *, from_headers: bool) -> CheckpointShape:
    """The shape of a checkpoint with ``config`` and ``tensors``. What it takes of their words may be shown."""
    name, tensors, named = printable(name), list(tensors), config.get("architectures")
    config = text_config(config)
    check_counts(config)
    moe = _guard(lambda c: moe_shape(SimpleNamespace(**c)), config)
    num_layers = config.get("num_hidden_layers")
    if moe is None or not isinstance(num_layers, int):
        raise CheckpointError(f"{name}: the config describes no routed experts, so there is nothing to offload")
    top_k = _positive_int(config, moe.top_k, "num_experts_per_tok")
    if top_k > moe.num_experts:
        raise CheckpointError(f"{name}: the config routes a token to {top_k} of {moe.num_experts} experts")
    by_layer: dict[int, list[TensorInfo]] = defaultdict(list)
    embedding = head = other = draft_vocabulary = 0
    for tensor in tensors:
        layer = _layer_of(tensor.name, num_layers)
        vocabulary = _VOCABULARY.search(tensor.name)
        if layer is not None and not vocabulary:
            by_layer[layer].append(tensor)
        elif layer is not None:
            draft_vocabulary += tensor.nbytes
        elif vocabulary and "lm_head" in tensor.name:
            head += tensor.nbytes
        elif vocabulary:
            embedding += tensor.nbytes
        else:
            other += tensor.nbytes
    shapes = [_layer_shape(index, by_layer[index], moe.num_experts) for index in sorted(by_layer)]
    layers = tuple(shape for shape in shapes if shape.index < num_layers)
    if not any(layer.experts for layer in layers):
        raise CheckpointError(
            f"{name}: no tensor is named like a routed expert (…experts.0.gate_proj.weight, …experts.down_proj), though its "
            f"config describes {moe.num_experts} experts a layer"
        )
    if [layer.index for layer in layers] != list(range(num_layers)):
        raise CheckpointError(f"{name}: holds {len(layers)} decoder layers, and its config describes {num_layers}")
    quantization = quantization_of(config)
    return CheckpointShape(
        name=name,
        from_headers=from_headers,
        num_layers=num_layers,
        num_experts=moe.num_experts,
        top_k=top_k,
        context_length=_positive_int(config, config.get("max_position_embeddings"), "max_position_embeddings"),
        layers=layers,
        draft_layers=tuple(shape for shape in shapes if shape.index >= num_layers),
        embedding=embedding,
        head=head,
        other=other,
        draft_vocabulary=draft_vocabulary,
        total_bytes=sum(tensor.nbytes for tensor in tensors),
        total_parameters=sum(map(parameters, tensors)),
        expert_parameters=_expert_parameters(by_layer, layers, moe.num_experts),
        kv=kv_shape(config),
        heads=_positive_int(config, config.get("num_attention_heads"), "num_attention_heads"),
        quantization=printable(str(quantization.get("quant_method") or "none")),
        expert_size=_positive_int(
            config, config.get("moe_intermediate_size") or config.get("intermediate_size"), "intermediate_size"
        ),
        hidden_size=_positive_int(config, config.get("hidden_size"), "hidden_size"),
        scale_block=(quantization.get("weight_block_size") or [1])[0],
        family=printable(str(config.get("model_type") or "")),
        architectures=tuple(printable(str(each)) for each in named) if isinstance(named, list) else (),
        **_weight_counts(tensors, num_layers, moe.num_experts, top_k),
    )


def parameters(tensor: TensorInfo) -> int:
    """The number of weights in ``tensor``: 0 for scales, zero points and index tables."""
    suffix = tensor.name.rsplit(".", 1)[-1]
    if "scale" in suffix or suffix in ("qzeros", "g_idx", "weight_shape", "weight_zero_point"):
        return 0
    packed = suffix in ("qweight", "weight_packed") or suffix.endswith("_blocks") or tensor.dtype == "U8"
    return tensor.elements * (_PACKED.get(tensor.dtype, 1) if packed else 1)


def _weight_counts(tensors: Iterable[TensorInfo], num_layers: int, num_experts: int, top_k: int) -> dict[str, int]:
    """Weights of draft layers, of shared experts, of towers, and those that a token is computed with."""
    names = ("draft_parameters", "active_parameters", "shared_parameters", "tower_parameters", "embedding_parameters")
    counts = dict.fromkeys(names, 0)
    for tensor in tensors:
        layer, weights = _layer_of(tensor.name, num_layers), parameters(tensor)
        if layer is not None and layer >= num_layers:
            counts["draft_parameters"] += weights
        elif layer is None and _TOWER.search(tensor.name):
            counts["tower_parameters"] += weights
        elif layer is None:
            counts["active_parameters"] += weights
            counts["embedding_parameters"] += weights if "embed_tokens" in tensor.name else 0
        elif _expert_of(tensor, num_experts):
            counts["active_parameters"] += weights * top_k // num_experts
        else:
            counts["active_parameters"] += weights
            counts["shared_parameters"] += weights if _SHARED.search(tensor.name) else 0
    return counts


def _layer_of(name: str, num_layers: int) -> int | None:
    """The decoder layer of a tensor; draft layers come after the others. Vision and audio towers number their own layers, so
    their tensors have none."""
    if draft := _DRAFT.match(name):
        return num_layers + int(draft.group(1) or 0)
    match = _LAYER.search(name)
    if match is None or _TOWER.search(name[: match.start()]):
        return None
    return int(match.group(1))


def _layer_shape(index: int, tensors: list[TensorInfo], num_experts: int) -> LayerShape:
    sums: dict[str, int] = defaultdict(int)
    experts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    split: dict[str, bool] = {}
    for tensor in tensors:
        routed = _expert_of(tensor, num_experts)
        if routed is None:
            for kind in divisions(tensor.name):
                sums[kind] += tensor.nbytes
            sums["parameters"] += parameters(tensor)
            continue
        part, ids, nbytes = routed
        split[part] = split.get(part, False) or is_split(part, tensor, stacked=len(ids) > 1)
        for expert in ids:
            experts[part][expert] += nbytes
    for part, sizes in experts.items():
        if sorted(sizes) != list(range(num_experts)):
            raise CheckpointError(
                f"layer {index} holds {part} of {len(sizes)} experts, and the config describes experts 0 to {num_experts - 1}"
            )
    parts = tuple(ExpertPart(part, max(sizes.values()), split[part]) for part, sizes in sorted(experts.items()))
    return LayerShape(index, parts, sum(sum(sizes.values()) for sizes in experts.values()), **sums)


def _expert_of(tensor: TensorInfo, num_experts: int) -> tuple[str, range, int] | None:
    """(server-side tensor that will hold it, experts, bytes for each), None if it is not of routed experts."""
    one = _ONE_EXPERT.search(tensor.name)
    if one:
        expert, projection, suffix = one.groups()
        part = _PART.get(projection, projection)
        return f"{part}.{suffix or 'weight'}", range(int(expert), int(expert) + 1), tensor.nbytes
    stacked = _STACKED_EXPERTS.search(tensor.name)
    if stacked is None:
        if ".experts." in tensor.name:
            raise CheckpointError(f"{tensor.name}: a tensor of routed experts with an unknown name")
        return None
    if not tensor.shape or tensor.shape[0] != num_experts:
        raise CheckpointError(f"{tensor.name}: has shape {list(tensor.shape)}, not one row for each of {num_experts} experts")
    projection, suffix = stacked.groups()
    return f"{_PART[projection]}.{suffix or 'weight'}", range(num_experts), tensor.nbytes // num_experts


def is_split(part: str, tensor: TensorInfo, stacked: bool) -> bool:
    """Whether ranks divide it. An expert's hidden units are divided, so tensors of the down projection's outputs, and single
    values, are whole on each rank."""
    shape = tensor.shape[1:] if stacked else tensor.shape
    if not shape or tensor.elements <= 1 or part.endswith(".g_idx"):
        return False
    return part.startswith("w13.") or not (part.endswith("bias") or shape[-1] == 1 or len(shape) == 1)


def divisions(name: str) -> tuple[str, ...]:
    """The fields of ``LayerShape`` that count a tensor, by how ranks divide it. Unknown tensors are whole on each rank."""
    if _REPLICATED.search(name):
        return ("replicated",)
    if _KEYS_VALUES.search(name):
        return ("keys_values",)
    if _ATTENTION.search(name):
        return ("attention",)
    return ("feed_forward",) if _FEED_FORWARD.search(name) else ("replicated", "unknown")


def _expert_parameters(by_layer: Mapping[int, list[TensorInfo]], layers: tuple[LayerShape, ...], num_experts: int) -> int:
    first = next(layer.index for layer in layers if layer.experts)
    return sum(parameters(tensor) for tensor in by_layer[first] if ".experts." in tensor.name) // num_experts


def _positive_int(config: Mapping[str, Any], value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise CheckpointError(f"the config's {name} is {value!r}, not a size")
    return value


def _guard(read: Any, config: Mapping[str, Any]) -> Any:
    """``read(config)``; raises ``CheckpointError`` for a malformed config (a string for a number, a truncated list)."""
    try:
        return read(config)
    except (TypeError, IndexError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise CheckpointError(f"the config is malformed: {error}") from error
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"the config is malformed: {error}") from error
