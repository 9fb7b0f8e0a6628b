"""The contents of a checkpoint: bytes of routed experts by layer, of everything else, and how ranks divide them.

Bytes come from safetensors headers, so any quantisation on disk is supported. Without a checkpoint, ``config_tensors`` derives
them from the config.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_uvm_offload.files.reading import printable
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape, ExpertPart, LayerShape
from sglang_uvm_offload.sizing.collector import uncollected
from sglang_uvm_offload.sizing.config_tensors import check_counts, tensors_of
from sglang_uvm_offload.sizing.kv_cache import kv_shape
from sglang_uvm_offload.sizing.loaded import as_loaded
from sglang_uvm_offload.sizing.lookup_tables import kind_of, tables_of
from sglang_uvm_offload.sizing.moe_shape import MoeShape, expert_size, moe_shape
from sglang_uvm_offload.sizing.overrides import overridden
from sglang_uvm_offload.sizing.quantization import BESIDE, UNQUANTIZED, UNSTATED, quantization_of, read_config, stated_by
from sglang_uvm_offload.sizing.quantized_linear import UnknownTensors
from sglang_uvm_offload.sizing.safetensors_header import FLOATS, CheckpointError, NoExperts, TensorInfo, read_folder
from sglang_uvm_offload.sizing.tensor_names import (
    Experts,
    divisions,
    experts_of,
    named_for_experts,
    place,
    stacked_projections,
    unloaded,
)
from sglang_uvm_offload.sizing.text_config import text_config
from sglang_uvm_offload.units import size

_VOCABULARY = re.compile(r"(embed_tokens|word_embeddings|lm_head|shared_head\.head)\.")
_TOWER = re.compile(r"vis(ual|ion)|audio|mm_proj")
_SHARED = re.compile(r"shared_(expert|mlp)|share_expert")
_PACKED = {"I32": 8, "U8": 2}
"""Four-bit weights in one element of a packed tensor."""


@uncollected()
def load(path: Path, dtype: str | None = None, overrides: str = "") -> CheckpointShape:
    """The checkpoint in a folder (from its headers), or the one described by a JSON file: a config.json, or an object with it
    under ``config``. ``dtype``: what a server loads its weights as, None for the bytes that they have on disk. ``overrides``:
    ``--json-model-override-args``. Raises ``CheckpointError`` with the reason. What is read is kept while its files stay as
    they are: a launch asks several times, and the headers of a large model take seconds."""
    state = _state(path)
    return _load(path, dtype, overrides, state) if state else _load.__wrapped__(path, dtype, overrides, state)


@lru_cache(maxsize=8)
def _load(path: Path, dtype: str | None, overrides: str, state: tuple[tuple[str, int, int], ...]) -> CheckpointShape:
    if os.path.isdir(path):  # False, not an error, for a path that cannot be examined: reading it says why
        config = overridden(read_config(path / "config.json"), overrides)
        return from_tensors(str(path), config, as_loaded(read_folder(path), dtype), from_headers=True)
    value = read_config(path)
    config = value.get("config", value)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: its config is not an object")
    # Not its _name_or_path, which is where whoever wrote the file had the model.
    name = value.get("name")
    shown = name if isinstance(name, str) and name else launched_as(path)
    return from_config(shown, overridden(config, overrides), dtype)


def launched_as(path: Path) -> str:
    """What a launch calls the model at ``path``: of a config.json, its folder."""
    return str(path.parent if path.name == "config.json" else path)


def _state(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Differs from that before a file that is read was written; empty if that cannot be told."""
    try:
        files = list(path.iterdir()) if os.path.isdir(path) else [path, path.with_name(BESIDE)]
        found = [(file.name, file.stat()) for file in files if os.path.exists(file)]
    except (OSError, ValueError):  # whatever reads it says why
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


@uncollected()
def from_config(name: str, config: Mapping[str, Any], dtype: str | None = None) -> CheckpointShape:
    text = text_config(config)
    return from_tensors(name, config, as_loaded(_guard(tensors_of, text), dtype), from_headers=False)


def from_tensors(name: str, config: Mapping[str, Any], tensors: Iterable[TensorInfo], *, from_headers: bool) -> CheckpointShape:
    """The shape of a checkpoint with ``config`` and ``tensors``. What it takes of their words may be shown."""
    name, tensors, named = printable(name), list(tensors), config.get("architectures")
    config = text_config(config)
    check_counts(config)
    moe = _guard(lambda c: moe_shape(SimpleNamespace(**c)), config)
    num_layers = config.get("num_hidden_layers")
    if moe is None or not isinstance(num_layers, int):
        reason = f"{name}: the config describes no routed experts, so there is nothing to offload"
        raise UnknownTensors(reason) if any(named_for_experts(tensor.name) for tensor in tensors) else NoExperts(reason)
    top_k = _positive_int(config, moe.top_k, "num_experts_per_tok")
    if top_k > moe.num_experts:
        raise CheckpointError(f"{name}: the config routes a token to {top_k} of {moe.num_experts} experts")
    held = _Tensors(tensors, num_layers, moe, config.get("vocab_size"))
    shapes = [_layer_shape(index, held.layers[index], moe.num_experts) for index in sorted(held.layers)]
    layers = tuple(shape for shape in shapes if shape.index < num_layers)
    if not any(layer.experts for layer in layers):
        raise UnknownTensors(
            f"{name}: no tensor is named like a routed expert (…experts.0.gate_proj.weight, …experts.down_proj), though its "
            f"config describes {moe.num_experts} experts a layer"
        )
    if [layer.index for layer in layers] != list(range(num_layers)):
        raise CheckpointError(f"{name}: holds {len(layers)} decoder layers, and its config describes {num_layers}")
    quantization, plain = quantization_of(config), all(tensor.dtype in FLOATS for tensor in tensors)
    scaled = any("scale" in part.name for layer in layers for part in layer.experts)
    return CheckpointShape(
        name=name,
        from_headers=from_headers,
        num_layers=num_layers,
        num_experts=moe.num_experts,
        top_k=top_k,
        context_length=_positive_int(config, config.get("max_position_embeddings"), "max_position_embeddings"),
        layers=layers,
        draft_layers=tuple(shape for shape in shapes if shape.index >= num_layers),
        embedding=held.embedding,
        head=held.head,
        other=held.other,
        draft_vocabulary=held.draft_vocabulary,
        total_bytes=sum(tensor.nbytes for tensor in tensors),
        total_parameters=sum(map(parameters, tensors)),
        expert_parameters=_expert_parameters(held, layers, moe.num_experts),
        kv=kv_shape(config),
        heads=_positive_int(config, config.get("num_attention_heads"), "num_attention_heads"),
        quantization=printable(str(quantization.get("quant_method") or (UNQUANTIZED if plain else UNSTATED))),
        expert_size=_positive_int(config, expert_size(config), "intermediate_size"),
        hidden_size=_positive_int(config, config.get("hidden_size"), "hidden_size"),
        scale_block=((quantization.get("weight_block_size") if scaled else None) or [1])[0],
        family=printable(str(config.get("model_type") or "")),
        architectures=tuple(printable(str(each)) for each in named) if isinstance(named, list) else (),
        **_weight_counts(held, num_layers, moe.num_experts, top_k),
        quantization_from=stated_by(config) if plain or quantization else "the headers of its tensors",
        notes=_notes(held.unread),
        tables=held.tables,
    )


class _Tensors:
    """A checkpoint's tensors, sorted into the layers of the language model, its vocabulary, and the rest: vision and
    audio towers number layers of their own, but have no experts in them."""

    def __init__(self, tensors: list[TensorInfo], num_layers: int, moe: MoeShape, vocabulary: Any):
        placed = [(place(tensor.name), tensor) for tensor in tensors if not unloaded(tensor.name)]
        self.tables = tables_of((0 if at is None else at.layer, tensor) for at, tensor in placed)
        placed = [(at, tensor) for at, tensor in placed if kind_of(tensor.name) is None]
        by_stack: dict[tuple[str, int, bool], list[tuple[str, TensorInfo]]] = defaultdict(list)
        for at, tensor in placed:
            if at is not None:
                by_stack[at.stack, at.layer, at.draft].append((at.path, tensor))
        self.layers: dict[int, list[tuple[Experts | None, str, TensorInfo]]] = defaultdict(list)
        self.unread: list[TensorInfo] = []
        """Tensors that are named for routed experts, in a form that is not known."""
        self.embedding = self.head = self.other = self.draft_vocabulary = 0
        self.beside: list[TensorInfo] = []
        """Outside of the language model's layers."""
        self.drafted: list[TensorInfo] = []
        """The drafts' copies of the vocabulary."""
        sorted_layers = {key: _sorted(held, moe.num_experts) for key, held in by_stack.items()}
        decoder = _most_experts(sorted_layers)
        for (stack, layer, draft), held in sorted_layers.items():
            if draft or stack == decoder:
                self._layer(layer + num_layers * draft, draft or layer >= num_layers, held)
            else:
                self.other += sum(tensor.nbytes for _, _, tensor in held)
                self.beside += [tensor for _, _, tensor in held]
        for at, tensor in placed:
            if at is None:
                self._beside_layers(tensor, vocabulary)

    def _layer(self, index: int, draft: bool, held: list[tuple[Experts | None, str, TensorInfo]]) -> None:
        for experts, path, tensor in held:
            if draft and _VOCABULARY.search(tensor.name):
                self.draft_vocabulary += tensor.nbytes
                self.drafted.append(tensor)
                continue
            self.layers[index].append((experts, path, tensor))
            if experts is None and len(tensor.shape) > 1 and named_for_experts(path):
                self.unread.append(tensor)

    def _beside_layers(self, tensor: TensorInfo, vocabulary: Any) -> None:
        self.beside.append(tensor)
        named = _VOCABULARY.search(tensor.name)
        if not named and (len(tensor.shape) != 2 or tensor.shape[0] != vocabulary):
            self.other += tensor.nbytes
        elif "head" in tensor.name or "output" in tensor.name:
            self.head += tensor.nbytes
        else:
            self.embedding += tensor.nbytes


def _sorted(held: list[tuple[str, TensorInfo]], num_experts: int) -> list[tuple[Experts | None, str, TensorInfo]]:
    stacked = stacked_projections(held, num_experts)
    return [(experts_of(path, tensor, num_experts, stacked), path, tensor) for path, tensor in held]


def _most_experts(layers: Mapping[tuple[str, int, bool], list[tuple[Experts | None, str, TensorInfo]]]) -> str | None:
    """The list of layers that holds most bytes of experts, drafts left out."""
    sums: dict[str, int] = defaultdict(int)
    for (stack, _, draft), held in layers.items():
        if not draft:
            sums[stack] += sum(tensor.nbytes for experts, _, tensor in held if experts is not None)
    return max(sums, key=lambda stack: sums[stack], default=None)


def _notes(unread: list[TensorInfo]) -> tuple[str, ...]:
    if not unread:
        return ()
    more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
    nbytes = sum(tensor.nbytes for tensor in unread)
    return (
        f"{printable(unread[0].name)}{more}: named for routed experts, but with no row for each of them; their "
        f"{size(nbytes)} count as other weights, whole on every rank",
    )


def parameters(tensor: TensorInfo) -> int:
    """The number of weights in ``tensor``: 0 for scales, zero points and index tables."""
    suffix = tensor.name.rsplit(".", 1)[-1]
    if "scale" in suffix or suffix in ("qzeros", "g_idx", "weight_shape", "weight_zero_point"):
        return 0
    packed = suffix in ("qweight", "weight_packed") or suffix.endswith("_blocks") or tensor.dtype == "U8"
    return tensor.elements * (_PACKED.get(tensor.dtype, 1) if packed else 1)


def _weight_counts(held: _Tensors, num_layers: int, num_experts: int, top_k: int) -> dict[str, int]:
    """Weights of draft layers, of shared experts, of towers, and those that a token is computed with."""
    names = ("active_parameters", "shared_parameters", "tower_parameters", "embedding_parameters")
    counts = dict.fromkeys(names, 0) | {"draft_parameters": sum(map(parameters, held.drafted))}
    for index, layer in held.layers.items():
        for experts, _, tensor in layer:
            weights = parameters(tensor)
            if index >= num_layers:
                counts["draft_parameters"] += weights
            elif experts is not None:
                counts["active_parameters"] += weights * top_k // num_experts
            else:
                counts["active_parameters"] += weights
                counts["shared_parameters"] += weights if _SHARED.search(tensor.name) else 0
    for tensor in held.beside:
        weights = parameters(tensor)
        counts["tower_parameters" if _TOWER.search(tensor.name) else "active_parameters"] += weights
        counts["embedding_parameters"] += weights if "embed_tokens" in tensor.name else 0
    return counts


def _layer_shape(index: int, held: list[tuple[Experts | None, str, TensorInfo]], num_experts: int) -> LayerShape:
    sums: dict[str, int] = defaultdict(int)
    experts: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    split: dict[tuple[int, str], bool] = {}
    for routed, _, tensor in held:
        if routed is None:
            for kind in divisions(tensor.name):
                sums[kind] += tensor.nbytes
            sums["parameters"] += parameters(tensor)
            continue
        stacked = routed.expert is None
        for expert in range(num_experts) if routed.expert is None else (routed.expert,):
            # ERNIE 4.5 VL numbers the experts for images after those for text; SGLang keeps them in a layer of their own.
            part = (expert // num_experts, routed.part)
            experts[part][expert % num_experts] += tensor.nbytes // (num_experts if stacked else 1)
            split[part] = split.get(part, False) or is_split(routed, tensor)
    _check_complete(index, experts, num_experts)
    parts = tuple(ExpertPart(name, max(sizes.values()), split[group, name]) for (group, name), sizes in sorted(experts.items()))
    return LayerShape(index, parts, sum(sum(sizes.values()) for sizes in experts.values()), **sums)


def _check_complete(index: int, experts: Mapping[tuple[int, str], Mapping[int, int]], num_experts: int) -> None:
    """Refuse a layer that lacks a projection of some expert. A parameter of it, such as a scale, may be some experts' only."""
    found: dict[str, set[int]] = defaultdict(set)
    for (group, part), sizes in experts.items():
        found[f"{part.partition('.')[0]}{group or ''}"].update(sizes)
    for projection, ids in found.items():
        if ids != set(range(num_experts)):
            raise CheckpointError(
                f"layer {index} holds {projection} of {len(ids)} experts, and the config describes experts 0 to "
                f"{num_experts - 1}"
            )


def is_split(routed: Experts, tensor: TensorInfo) -> bool:
    """Whether ranks divide it. An expert's hidden units are divided, so tensors of the down projection's outputs, and single
    values, are whole on each rank."""
    shape = tensor.shape[1:] if routed.expert is None else tensor.shape
    if not shape or tensor.elements <= 1 or routed.part.endswith(".g_idx"):
        return False
    return not routed.down or not (routed.part.endswith("bias") or shape[-1] == 1 or len(shape) == 1)


def _expert_parameters(held: _Tensors, layers: tuple[LayerShape, ...], num_experts: int) -> int:
    first = next(layer.index for layer in layers if layer.experts)
    return sum(parameters(tensor) for experts, _, tensor in held.layers[first] if experts is not None) // num_experts


def _positive_int(config: Mapping[str, Any], value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise CheckpointError(f"the config's {name} is {value!r}, not a size")
    return value


def _guard(read: Any, config: Mapping[str, Any]) -> Any:
    """``read(config)``; raises ``CheckpointError`` for a malformed config (a string for a number, a truncated list)."""
    try:
        return read(config)
    except (TypeError, IndexError, AttributeError, KeyError, ZeroDivisionError, re.error) as error:
        raise CheckpointError(f"the config is malformed: {error}") from error
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"the config is malformed: {error}") from error
