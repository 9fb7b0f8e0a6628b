"""A model's shape according to its class in the installed SGLang, from its config.json alone.

``plugin.meta.program`` builds the model in a separate process; this one imports neither SGLang nor torch. That takes seconds,
so the user's cache keeps the shape, keyed by configuration, arguments and SGLang version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_uvm_offload.files import cache, child
from sglang_uvm_offload.files.reading import printable
from sglang_uvm_offload.plan.architectures import model_files
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, NoExperts, read_json

PROGRAM = "sglang_uvm_offload.plugin.meta.program"
BESIDE = "hf_quant_config.json"
"""Where ModelOpt states a quantisation that the config.json next to it may not state."""
FOLDER = "shapes"
"""The cache folder for shapes."""
MOST_SECONDS = 300
FORMAT = 3
"""The version of the program's output format. Raise it when the contents change."""
LONGEST_REASON = 300
PROGRESS = "asking SGLang's class for the model's shapes; kept for the next time"
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MOST_LAYERS, _MOST_EXPERTS, _MOST_IN_ALL = 4096, 1 << 16, 1 << 18
"""Far beyond any model. A config beyond these is broken, and looping over its counts would take minutes or never end."""
_failed: dict[str, str] = {}


def shape_of(path: Path, name: str | None = None, **given: str | None) -> ModelShape:
    """The shape of the model that ``path`` configures: a folder with a config.json, such a file, or a JSON object with it under
    ``config``. ``given``: arguments of SGLang's ``ModelConfig``, such as ``quantization``. Raises ``CheckpointError`` with the
    reason, SGLang's where it does not build the model."""
    (shape,) = shapes_of({name or launched_as(path): path}, **given)
    return shape


def shapes_of(paths: Mapping[str, Path], **given: str | None) -> list[ModelShape]:
    """The same for several models, keyed by the names to show. SGLang starts once for all that are not cached."""
    return _shapes({name: _files(path) for name, path in paths.items()}, given)


def shape_of_config(name: str, config: Mapping[str, Any], **given: str | None) -> ModelShape:
    """The same for the contents of a config.json."""
    _check(config)
    (shape,) = _shapes({name: {"config.json": json.dumps(config)}}, given)
    return shape


def _shapes(files: Mapping[str, Mapping[str, str]], given: Mapping[str, str | None]) -> list[ModelShape]:
    arguments = json.dumps({name: value for name, value in sorted(given.items()) if value})
    printed = _printed([{**each, "arguments.json": arguments} for each in files.values()])
    return [dataclasses.replace(shape, name=printable(name)) for name, shape in zip(files, map(_shape, printed), strict=True)]


def launched_as(path: Path) -> str:
    """The name by which a launch gives the model at ``path``: for a config.json, its folder."""
    if path.suffix == ".json" and path.name != "config.json" and isinstance(name := read_json(path).get("name"), str) and name:
        return name
    return str(path.parent if path.name == "config.json" else path)


def _files(path: Path) -> dict[str, str]:
    """The contents of the files that SGLang reads a configuration from."""
    file = path / "config.json" if os.path.isdir(path) else path
    value = read_json(file)
    config = value.get("config", value)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: its config is not an object")
    _check(config)
    files = {"config.json": json.dumps(config)}
    if file.name == "config.json" and os.path.lexists(beside := file.with_name(BESIDE)):
        files[BESIDE] = json.dumps(read_json(beside))
    return files


def _check(config: Mapping[str, Any]) -> None:
    """Refuse layer counts that would keep SGLang busy forever."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in _LAYERS:
            if isinstance(value := part.get(name), (int, float)) and not 0 < value <= _MOST_LAYERS:
                raise CheckpointError(f"the config's {name} is {value!r:.80}, not a number from 1 to {_MOST_LAYERS}")


def _check_known(config: Mapping[str, Any]) -> None:
    """Refuse at once a model that the installed SGLang has no class for."""
    if not (version := _version()):
        raise CheckpointError("SGLang is not installed: a model's shapes are those of its class in SGLang")
    named, model_type = config.get("architectures"), config.get("model_type")
    if isinstance(named, list) and any(name in model_files() for name in named if isinstance(name, str)):
        return
    spec = importlib.util.find_spec("transformers")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    plain = isinstance(model_type, str) and re.fullmatch(r"[A-Za-z]\w{0,63}", model_type) is not None
    if not plain or not any(Path(folder, "models", str(model_type)).is_dir() for folder in folders):
        raise CheckpointError(f"SGLang {version} has no class for the model, whose config names {named or model_type!r:.200}")


def _version() -> str:
    """SGLang's version; "" if it is not installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _printed(asked: Sequence[Mapping[str, str]]) -> list[bytes]:
    """The program's output for each, from the cache if possible. Errors may be temporary, so only this process keeps them."""
    keys = [_key(files) for files in asked]
    known = {key: line for key in keys if (line := _kept(key)) is not None}
    missing = {key: files for key, files in zip(keys, asked, strict=True) if key not in known | _failed}
    for files in missing.values():
        overrides = json.loads(json.loads(files["arguments.json"]).get("model_override_args") or "{}")
        _check_known(json.loads(files["config.json"]) | overrides)
    for key, line in zip(missing, _run(list(missing.values())) if missing else (), strict=True):
        if line.startswith(b'{"name"'):
            known[key] = line
            _keep(key, line)
        else:
            _failed[key] = line.decode()
    if failed := next((_failed[key] for key in keys if key in _failed), None):
        raise _refusal(json.loads(failed))
    return [known[key] for key in keys]


def _refusal(printed: Mapping[str, str]) -> CheckpointError:
    if dense := printed.get("dense"):
        return NoExperts(dense)
    reason = " ".join(printed["error"].split())
    return CheckpointError(f"SGLang does not build the model: {reason[:LONGEST_REASON]}")


def _shape(line: bytes) -> ModelShape:
    """Raises ``CheckpointError`` for an impossible model that SGLang builds all the same."""
    shape = msgspec.json.decode(line, type=ModelShape)
    layers, experts = shape.num_layers + len(shape.draft_layers), shape.num_experts
    if experts > _MOST_EXPERTS or layers * experts > _MOST_IN_ALL:
        raise CheckpointError(f"the model has {layers} layers of {experts} experts, more than {_MOST_IN_ALL} in all")
    for name in ("top_k", "context_length", "heads", "expert_size", "hidden_size"):
        if (value := getattr(shape, name)) < 1:
            raise CheckpointError(f"the model's {name} is {value}, not 1 or more")
    if shape.top_k > experts:
        raise CheckpointError(f"the config routes a token to {shape.top_k} of {experts} experts")
    return shape


def _key(files: Mapping[str, str]) -> str:
    """The cache key of the program's output for ``files``."""
    text = json.dumps([FORMAT, _version(), files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _kept(key: str) -> bytes | None:
    """The cached output; None if it is missing or damaged, and must be made again."""
    with contextlib.suppress(OSError):
        return cache.sealed(cache.private_folder(FOLDER) / key)
    return None


def _keep(key: str, line: bytes) -> None:
    with contextlib.suppress(OSError):  # the next plan then takes as long
        cache.seal(cache.private_folder(FOLDER) / key, line)


def _run(asked: Sequence[Mapping[str, str]]) -> list[bytes]:
    """One output line per model."""
    print(PROGRESS, file=sys.stderr, flush=True)
    limit = MOST_SECONDS * len(asked)
    with tempfile.TemporaryDirectory() as parent:
        for number, files in enumerate(asked):
            (folder := Path(parent, str(number))).mkdir()
            for name, contents in files.items():
                (folder / name).write_text(contents)
        try:
            ended = child.run_module(PROGRAM, *(str(Path(parent, str(n))) for n in range(len(asked))), seconds=limit)
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(f"SGLang did not build the model within {limit} seconds") from error
    lines = ended.stdout.encode().splitlines()
    if ended.returncode or len(lines) != len(asked):
        raise CheckpointError(f"SGLang does not start for building the model: {_last_line(ended.stderr)}")
    return lines


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:LONGEST_REASON] if lines else "it ended without a word"
