"""Runs small Python programs on the stand-in CUDA, each in a process of its own, and reads what they did.

One process imports torch; each program runs in a fork of it, which starts CUDA anew. That saves seconds a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from standin.build import build, environment

TESTS = Path(__file__).resolve().parents[1]

NURSERY = """
import gc, json, os, sys
import numpy as np
import torch
from sglang_uvm_offload.cuda_ops import CudaFailure
from sglang_uvm_offload.layout import BLOCK_BYTES, PAGE_BYTES, ExpertLayout
from sglang_uvm_offload.uvm import Location, ManagedRange, MemoryFault, Span
from sglang_uvm_offload.uvm_cuda import CudaMemory
DEVICE, HOST, PAGE = Location.DEVICE, Location.HOST, PAGE_BYTES
def on_device(array):
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()

program = None
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.update(request["environment"])
        for number, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        program = request["program"]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
if program is not None:
    exec(compile(program, "program", "exec"))
"""
"""Forks for each request. The child leaves the loop and runs its program at the top level, so that it ends as any
interpreter does."""


@dataclass(frozen=True)
class Ran:
    """A program's end: exit code, output, and the CUDA calls it made, in order."""

    code: int
    out: str
    err: str
    calls: list[dict]

    @property
    def said(self) -> object:
        """The JSON on the last line of the output."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])

    def named(self, *names: str) -> list[dict]:
        return [call for call in self.calls if call["call"] in names]


class Standin:
    """The built stand-in. Programs share one cache of compiled libraries."""

    def __init__(self, folder: Path):
        self.library = build(folder / "cuda")
        self._folder = folder
        self._runs = 0
        ours = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            env=os.environ | environment(self.library.parent) | ours,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._nursery.communicate()

    def run(self, program: str, **settings: object) -> Ran:
        """Run the program with the names that ``NURSERY`` imports. ``fail="cudaFree:2:1"`` sets STANDIN_FAIL, and so
        on."""
        self._runs += 1
        out, err, log = (self._folder / f"{self._runs}.{kind}" for kind in ("out", "err", "jsonl"))
        variables = {f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()}
        request = {
            "program": textwrap.dedent(program),
            "environment": variables | {"STANDIN_LOG": str(log)},
            "out": str(out),
            "err": str(err),
        }
        assert self._nursery.stdin
        assert self._nursery.stdout
        self._nursery.stdin.write(json.dumps(request) + "\n")
        self._nursery.stdin.flush()
        code = int(self._nursery.stdout.readline())
        lines = log.read_text().splitlines() if log.exists() else []
        return Ran(code, out.read_text(), err.read_text(), [json.loads(line) for line in lines])
