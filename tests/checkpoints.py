"""Tiny checkpoints for the tests, written once a session by ``scripts/make_checkpoint.py``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_checkpoint.py"


def load_script() -> ModuleType:
    """``scripts/`` is no package: load the file itself."""
    spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Checkpoints:
    """``checkpoints("glm4_moe", dtype="float32")`` is the folder of that checkpoint, written when first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: dict[str, Path] = {}

    def __call__(self, family: str, **options: Any) -> Path:
        key = json.dumps([family, options], sort_keys=True)
        if key not in self.made:
            self.made[key] = load_script().make_checkpoint(family, self.folder / str(len(self.made)), **options)
        return self.made[key]
