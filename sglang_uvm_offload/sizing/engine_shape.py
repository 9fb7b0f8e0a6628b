"""The shape of a checkpoint by the model class of the SGLang that is installed, from its config.json alone.

``plugin.meta.program`` builds the model, in a process of its own: this one imports neither SGLang nor torch. It takes some 20
seconds, so what it prints is kept, for the same configuration and the same SGLang, in the user's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_uvm_offload.files import cache, child
from sglang_uvm_offload.files.reading import printable
from sglang_uvm_offload.sizing.architectures import model_files
from sglang_uvm_offload.sizing.checkpoint import is_split, launched_as, load
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape, ExpertPart, LayerShape
from sglang_uvm_offload.sizing.kv_cache import KvShape, kv_shape
from sglang_uvm_offload.sizing.lookup_tables import LookupTable
from sglang_uvm_offload.sizing.overrides import overridden
from sglang_uvm_offload.sizing.quantization import BESIDE, quantization_of, stated_by, with_beside
from sglang_uvm_offload.sizing.quantized_linear import UnknownTensors
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, TensorInfo, read_json
from sglang_uvm_offload.sizing.tensor_names import Experts
from sglang_uvm_offload.sizing.text_config import text_config

PROGRAM = "sglang_uvm_offload.plugin.meta.program"
FOLDER = "shapes"
"""Where shapes are kept."""
MOST_SECONDS = 300
FORMAT = 2
"""Of what the program prints: another number for other contents."""
LONGEST_REASON = 300
_failed: dict[str, str] = {}


def load_any(path: Path, dtype: str | None = None, overrides: str = "") -> CheckpointShape:
    """``checkpoint.load``, and the shape by SGLang's class where it does not know the names of a checkpoint's tensors, or the
    tensors of a family or quantisation without weights."""
    without_weights = os.path.isdir(path) and not any(path.glob("*.safetensors*")) and (path / "config.json").exists()
    file = path / "config.json" if without_weights else path
    try:
        return load(file, dtype, overrides)
    except UnknownTensors as unknown:
        return instead(unknown, file, launched_as(path), overrides)


def instead(refusal: CheckpointError, file: Path, name: str, overrides: str = "") -> CheckpointShape:
    """The shape by SGLang's class, which may know what ``refusal`` says is unknown; raises it without SGLang."""
    if not installed() or not _may_be_built(_configuration(file, overrides)[0]):
        raise refusal
    try:
        return shape_by_engine(file, name, overrides)
    except CheckpointError as error:
        raise CheckpointError(f"{refusal}; {error}") from error


def _may_be_built(config: Mapping[str, Any]) -> bool:
    """Whether SGLang or transformers has a file for the model: to hear from SGLang that neither does takes half a minute."""
    named, model_type = config.get("architectures"), config.get("model_type")
    if isinstance(named, list) and any(name in model_files() for name in named if isinstance(name, str)):
        return True
    spec = importlib.util.find_spec("transformers")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    known = isinstance(model_type, str) and re.fullmatch(r"[A-Za-z]\w{0,63}", model_type) is not None
    return known and any(Path(folder, "models", str(model_type)).is_dir() for folder in folders)


def installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


def shape_by_engine(path: Path, name: str | None = None, overrides: str = "") -> CheckpointShape:
    """The model that ``path`` configures: a folder with a config.json, or a JSON file as ``checkpoint.load`` reads it. Raises
    ``CheckpointError`` with SGLang's reason where it does not build the model."""
    (shape,) = shapes_by_engine({name or str(path): path}, overrides)
    return shape


def shapes_by_engine(paths: Mapping[str, Path], overrides: str = "") -> list[CheckpointShape]:
    """The same for several models, by the names to show: SGLang starts once for those that are not in the cache."""
    configurations = [_configuration(path, overrides) for path in paths.values()]
    printed = _printed([files for _, files in configurations])
    return [_shape(printable(name), config, one) for name, (config, _), one in zip(paths, configurations, printed, strict=True)]


def _configuration(path: Path, overrides: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """The config, and the contents of the files that SGLang reads it from."""
    file = path / "config.json" if os.path.isdir(path) else path
    value = read_json(file)
    config = value.get("config", value)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: its config is not an object")
    config = overridden(config, overrides)
    files = {"config.json": json.dumps(config)}
    beside = file.parent / BESIDE
    if file.name == "config.json" and beside.exists():
        files[BESIDE] = json.dumps(found := read_json(beside))
        config = with_beside(config, found)
    return config, files


def _printed(configurations: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """What the program prints for each, from the cache if it is there. An error is kept in this process alone: it may pass."""
    if failed := next((found for files in configurations if (found := _failed.get(_key(files)))), None):
        raise CheckpointError(failed)
    known = {number: kept for number, files in enumerate(configurations) if (kept := _kept(_key(files))) is not None}
    missing = [number for number in range(len(configurations)) if number not in known]
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent, str(number)) for number in missing]
        for number, folder in zip(missing, folders, strict=True):
            folder.mkdir()
            for name, contents in configurations[number].items():
                (folder / name).write_text(contents)
        lines = _run([str(folder) for folder in folders]) if missing else []
    for number, line in zip(missing, lines, strict=True):
        known[number], key = json.loads(line), _key(configurations[number])
        if error := known[number].get("error"):
            _failed[key] = f"SGLang does not build the model: {' '.join(str(error).split())[:LONGEST_REASON]}"
            raise CheckpointError(_failed[key])
        _keep(key, line)
    return [known[number] for number in range(len(configurations))]


def _key(files: Mapping[str, str]) -> str:
    """Of what the program prints for ``files``."""
    text = json.dumps([FORMAT, importlib.metadata.version("sglang"), files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _kept(key: str) -> dict[str, Any] | None:
    """None also for what is damaged: it is made anew."""
    with contextlib.suppress(OSError):
        if (line := cache.sealed(cache.private_folder(FOLDER) / key)) is not None:
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def _keep(key: str, line: str) -> None:
    with contextlib.suppress(OSError):  # then the next plan takes as long
        cache.seal(cache.private_folder(FOLDER) / key, line.encode())


def _run(folders: list[str]) -> list[str]:
    """A line for each folder."""
    limit = MOST_SECONDS * len(folders)
    try:
        ended = child.run_module(PROGRAM, *folders, seconds=limit)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"SGLang did not build the model within {limit} seconds") from error
    lines = ended.stdout.splitlines()
    if ended.returncode or len(lines) != len(folders):
        raise CheckpointError(f"SGLang does not start for building the model: {_last_line(ended.stderr)}")
    return lines


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:LONGEST_REASON] if lines else "it ended without a word"


def _shape(name: str, config: Mapping[str, Any], printed: Mapping[str, Any]) -> CheckpointShape:
    plain, served = printed["plain"], printed["served"]
    layers = tuple(_layers(plain["layers"], served["layers"]))
    drafts = tuple(_layers(plain["drafts"], served["drafts"], first=len(layers)))
    routed = [layer for layer in plain["layers"] if layer["experts"]]
    weights = [layer["parameters"] + layer["routed_parameters"] for layer in plain["layers"]]
    drafted = sum(layer["parameters"] + layer["routed_parameters"] for layer in plain["drafts"])
    chosen = sum(layer["parameters"] + layer["top_k"] * layer["expert_parameters"] for layer in plain["layers"])
    text = text_config(config)
    named = config.get("architectures")
    tables = tuple(LookupTable(**table) for table in served["tables"])
    outside = sum(table.nbytes for table in tables) + served["embedding"] + served["head"] + served["other"]
    return CheckpointShape(
        name=name,
        from_headers=False,
        num_layers=len(layers),
        num_experts=max(layer["experts"] for layer in routed),
        top_k=max(layer["top_k"] for layer in routed),
        context_length=printed["context_length"],
        layers=layers,
        draft_layers=drafts,
        embedding=served["embedding"],
        head=served["head"],
        other=served["other"],
        draft_vocabulary=0,
        total_bytes=sum(map(_bytes, (*layers, *drafts))) + outside,
        total_parameters=sum(weights) + sum(plain[f"{part}_parameters"] for part in ("outside", "tower", "table")) + drafted,
        expert_parameters=max(layer["expert_parameters"] for layer in routed),
        kv=_kv(text, plain["layers"]),
        heads=printed["heads"],
        quantization=printable(str(printed["quantization"] or "none")),
        expert_size=_expert_size(routed[0], printed["hidden_size"]),
        hidden_size=printed["hidden_size"],
        scale_block=(quantization_of(text).get("weight_block_size") or [1])[0],
        family=printable(str(text.get("model_type") or "")),
        architectures=tuple(printable(str(each)) for each in named) if isinstance(named, list) else (),
        draft_parameters=drafted,
        active_parameters=chosen + plain["outside_parameters"],
        quantization_from=stated_by(config),
        shared_parameters=sum(layer["shared_parameters"] for layer in plain["layers"]),
        tower_parameters=plain["tower_parameters"],
        embedding_parameters=plain["embedding_parameters"],
        tables=tables,
    )


def _layers(plain: list[dict[str, Any]], served: list[dict[str, Any]], first: int = 0) -> Iterator[LayerShape]:
    """Bytes as served; weights are counted without quantisation."""
    for index, (counted, layer) in enumerate(zip(plain, served, strict=True), first):
        yield LayerShape(
            index,
            tuple(sorted((_part(part) for part in layer["parts"]), key=lambda part: part.name)),
            sum(part["bytes"] for part in layer["parts"]),
            **{kind: layer[kind] for kind in ("attention", "keys_values", "feed_forward", "replicated")},
            parameters=counted["parameters"],
        )


def _part(part: Mapping[str, Any]) -> ExpertPart:
    """SGLang's ``w13_weight_scale`` is the planner's ``w13.weight_scale``."""
    name = part["name"].replace("_", ".", 1)
    return ExpertPart(name, part["expert_bytes"], is_split(Experts(name, None), TensorInfo(name, "U8", tuple(part["shape"]))))


def _bytes(layer: LayerShape) -> int:
    return layer.expert_bytes + layer.attention + layer.keys_values + layer.feed_forward + layer.replicated


def _expert_size(layer: Mapping[str, Any], hidden: int) -> int:
    """Hidden units of an expert: its down projection has ``hidden`` weights for each."""
    down = next(part["shape"] for part in layer["parts"] if part["name"].startswith("w2_weight"))
    return max(1, math.prod(down[1:]) // hidden)


def _kv(config: Mapping[str, Any], layers: list[dict[str, Any]]) -> KvShape:
    """By the config where that says it, else by the layers' attention. Layers without attention keep no keys: a state, unless
    the config says that they keep nothing."""
    attending = {index: layer["attention_heads"] for index, layer in enumerate(layers) if layer["attention_heads"]}
    try:
        shape = kv_shape(config)
    except CheckpointError:
        if not attending:
            raise
        heads, size, value, _ = max(attending.values())
        windows = {index: window for index, (*_, window) in attending.items() if window > 0}
        shape = KvShape(heads, size, value, window_layers=frozenset(windows), window=max(windows.values(), default=0))
    if not attending:
        return shape
    without = frozenset(range(len(layers))) - attending.keys()
    empty = shape.empty_layers & without
    return dataclasses.replace(shape, state_layers=without - empty, empty_layers=empty)
