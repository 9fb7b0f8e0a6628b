"""Tiny checkpoints for the tests, each written once a session."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "make_checkpoint.py"


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
    """``checkpoints("glm4_moe", dtype="float32")`` is the folder of that checkpoint of ``scripts/make_checkpoint.py``, written
    when first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: dict[str, Path] = {}

    def __call__(self, family: str, **options: Any) -> Path:
        key = json.dumps([family, options], sort_keys=True)
        if key not in self.made:
            self.made[key] = load_script().make_checkpoint(family, self.folder / str(len(self.made)), **options)
        return self.made[key]


class WalkedCheckpoints:
    """``walked("tiny-qwen3", "fp8")`` is the folder of that checkpoint of ``benchmarks/trace_checkpoint.py``, which walks
    ``trace``, written when first asked for."""

    def __init__(self, folder: Path, trace: Path):
        self.folder = folder
        self.trace = trace

    def __call__(self, shape: str, quant: str | None) -> Path:
        out = self.folder / f"{shape}-{quant or 'bf16'}"
        if not out.exists():
            command = [sys.executable, str(ROOT / "benchmarks" / "trace_checkpoint.py"), shape, str(self.trace), str(out)]
            subprocess.run([*command, *(["--quant", quant] if quant else [])], check=True)
        return out
