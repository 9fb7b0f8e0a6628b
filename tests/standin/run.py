"""Runs small Python programs on the stand-in CUDA, each in its own process, and reads what they did."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nursery import Nursery
from standin.build import build, environment

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = """
import gc
import numpy as np
import torch
from sglang_uvm_offload.cuda.structs import CudaFailure
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES, ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, ManagedMemoryError, Span
from sglang_uvm_offload.cuda.memory import CudaMemory
DEVICE, HOST, PAGE, BLOCK = Location.DEVICE, Location.HOST, PAGE_BYTES, BLOCK_BYTES
def on_device(array):
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()
"""


@dataclass(frozen=True)
class Ran:
    """A finished program: exit code, output, and its CUDA calls in order."""

    code: int
    out: str
    err: str
    calls: list[dict]

    @property
    def said(self) -> Any:
        """The JSON on the output's last line."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])

    def named(self, *names: str) -> list[dict]:
        return [call for call in self.calls if call["call"] in names]


class Standin:
    """The built stand-in. Programs share one cache of compiled libraries."""

    def __init__(self, folder: Path):
        self.library = build(folder / "cuda")
        self._folder = folder
        ours = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
        self._nursery = Nursery(folder, IMPORTS, os.environ | environment(self.library.parent) | ours)

    def close(self) -> None:
        self._nursery.close()

    def run(self, program: str, **settings: object) -> Ran:
        """Runs the program after ``IMPORTS``. Each setting becomes a variable: ``fail="cudaFree:2:1"`` sets STANDIN_FAIL."""
        log = self._folder / f"{self._nursery.runs}.jsonl"
        variables = {f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()}
        ended = self._nursery.run(program, STANDIN_LOG=str(log), **variables)
        lines = log.read_text().splitlines() if log.exists() else []
        return Ran(ended.code, ended.out, ended.err, [json.loads(line) for line in lines])
