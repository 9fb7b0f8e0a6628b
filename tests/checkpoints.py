"""Tiny checkpoints for the tests, each written once per session."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.make_checkpoint import make_checkpoint
from sglang_uvm_offload.routing.trace import Trace

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "gpu" / "routing_trace.npz"
# Shapes and formats of checkpoints that walk the trace.
WALKED = [("tiny-qwen3", None), ("tiny-qwen3", "fp8"), ("tiny-glm", None), ("tiny-deepseek", None)]
# The experts that a skewed checkpoint uses most: different ones in each layer, and none that first_n starts with.
HOT = [[4, 5, 9, 12, 13, 15], [2, 3, 6, 7, 10, 11], [4, 6, 8, 9, 11, 14]]

# Prefixes of the architectures that have checkpoints.
ARCHITECTURES = ("Glm4Moe", "Qwen3Moe", "DeepseekV", "Mixtral", "Olmoe", "Dots1", "GptOss", "LlamaForCausalLMEagle", "Longcat")


def unserved_models() -> list[str]:
    """Returns SGLang's modules of models without a test checkpoint. SGLang would import all of them in each process that builds
    a model, which takes half of an engine's start."""
    sglang = find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        return []
    served = re.compile(rf"^class ({'|'.join(ARCHITECTURES)}|Transformers)", re.MULTILINE)
    modules = (Path(sglang.submodule_search_locations[0]) / "srt" / "models").glob("*.py")
    return sorted(module.stem for module in modules if not served.search(module.read_text()))


class Checkpoints:
    """``checkpoints("glm4_moe", dtype="float32")`` returns the folder of that checkpoint of ``scripts/make_checkpoint.py``,
    written on first use."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: dict[str, Path] = {}

    def __call__(self, family: str, **options: Any) -> Path:
        key = json.dumps([family, options], sort_keys=True)
        if key not in self.made:
            made = self.made[key] = make_checkpoint(family, self.folder / str(len(self.made)), **options)
            [architecture] = json.loads((made / "config.json").read_text())["architectures"]
            assert architecture.startswith(ARCHITECTURES), "the tests keep SGLang from importing such a model"
        return self.made[key]


class WalkedCheckpoints:
    """``walked("tiny-qwen3", "fp8")`` returns the folder of that ``benchmarks/trace_checkpoint.py`` checkpoint, which walks
    ``trace``, written on first use."""

    def __init__(self, folder: Path, trace: Path):
        self.folder = folder
        self.trace = trace

    def __call__(self, shape: str, quant: str | None) -> Path:
        out = self.folder / f"{shape}-{quant or 'bf16'}"
        if out.exists():
            return out
        if quant:  # tests the command too, which is slower because it imports torch again
            command = [sys.executable, "-m", "benchmarks.trace_checkpoint", shape, str(self.trace), str(out)]
            subprocess.run([*command, "--quant", quant], check=True)
        else:
            from benchmarks import trace_checkpoint

            trace_checkpoint.write(trace_checkpoint.MODELS[shape], Trace.load(self.trace), out)
        return out
