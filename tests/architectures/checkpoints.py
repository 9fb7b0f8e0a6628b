"""Writes a checkpoint for each architecture, as a launch finds it: ``python -c "from architectures.checkpoints import main;
main(FOLDER, 'Glm4MoeForCausalLM')"``. In a process in which SGLang is imported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from architectures.build import completed, construct, start
from architectures.tiny import EXCEPTIONS, EXPERTS, tiny_config
from builders.released import Untold, tensors_of_folder, written
from builders.true_shape import CONFIGS, write
from transformers import PretrainedConfig

OWN_CODE = "from transformers import PretrainedConfig\n\n\nclass AsStated(PretrainedConfig):\n    model_type = {!r}\n"
"""The code of a checkpoint that defines its own configuration class."""


def main(out: str, *names: str) -> None:
    published = published_models()
    start()
    print("RESULT", json.dumps({name: one(name, Path(out), published.get(name)) for name in names}), flush=True)
    os._exit(0)  # nothing of SGLang is to be ended in order


def published_models() -> dict[str, str]:
    """By architecture, a model whose configuration is published; the first by name."""
    found: dict[str, str] = {}
    for folder in sorted(path for path in CONFIGS.iterdir() if path.is_dir()):
        for name in json.loads((folder / "config.json").read_text()).get("architectures") or []:
            found.setdefault(name, folder.name.replace("--", "/", 1))
    return found


def one(name: str, out: Path, model: str | None) -> dict[str, Any]:
    """The folder of a checkpoint of ``name``, the model that it is of, and the words of a launch that it needs."""
    if model is not None and (folder := written(model, out)) is not None:
        return {"folder": str(folder), "model": model, "words": []}
    folder = out / name
    folder.mkdir()
    config = tiny_config(name, EXPERTS)
    completed(lambda: construct(name, config))
    words = _configure(config, folder)
    try:
        write(folder, tensors_of_folder(folder))
    except Untold:
        words += ["--load-format", "dummy"]
    return {"folder": str(folder), "model": None, "words": words}


def _configure(config: PretrainedConfig, folder: Path) -> list[str]:
    exception = EXCEPTIONS.get(folder.name, {})
    values = config.to_dict() | {"torch_dtype": "bfloat16"}
    for read, stated in exception.get("stated_as", {}).items():
        values[stated] = values.pop(read)
    for path, value in exception.get("launch", {}).items():
        _state(values, path, value)
    words = []
    if not config.model_type:
        kind = f"as_stated_{folder.name.lower()}"
        values |= {"model_type": kind, "auto_map": {"AutoConfig": "configuration_as_stated.AsStated"}}
        (folder / "configuration_as_stated.py").write_text(OWN_CODE.format(kind))
        words = ["--trust-remote-code"]
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return words


def _state(values: dict[str, Any], path: str, value: Any) -> None:
    *parts, name = path.split(".")
    for part in parts:
        values = values[part]
    if value is None:
        del values[name]
    else:
        values[name] = value
