"""Runs ``doctor`` on many launches, over the stand-in for a machine with eight GPUs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from launches import BLACKWELL
from nursery import Nurseries

from sglang_uvm_offload.plan.gpus import GPUS

PUBLISHED: list[dict[str, str]] = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "published_launches.json").read_text(encoding="utf-8")
)
"""Published launch lines: ``model``, ``words``, ``source``, and optionally ``environment`` and the ``gpu`` a line is for."""

AT_ONCE = 24
"""Launches per process."""

_KINDS = {"": {}, "B200": BLACKWELL, "integrated": {"STANDIN_VRAM": str(119 << 30), "STANDIN_ATTRIBUTE_18": "1"}}
"""Stand-in settings by a line's GPU: the default, Blackwell, and a GPU without its own memory."""

_EXAMINE = """
import contextlib, io, json, os
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.plugin.launch import estimate, ranks
said = []
before = dict(os.environ)
for words, environment, host in {launches}:
    estimate.host_available = ranks.host_available = lambda: host << 30
    os.environ.clear()
    os.environ.update(before | environment)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(["doctor", "--", *words])
        except SystemExit as exit:
            code = exit.code
        except BaseException as error:
            code = f"{{type(error).__name__}}: {{error}}"
    said.append((code, out.getvalue()))
print("RESULT", json.dumps(said))
"""

UNKNOWN = re.compile(r"SGLang refuses|cannot be estimated|Traceback|give a number")
"""What ``doctor`` must not say of a launch from a local safetensors folder."""

NO_CHOICE = re.compile(r"error: (argument --\S+: invalid choice: '\w+'|unrecognized arguments: .+|ambiguous option: .+)")
"""A flag or value that this SGLang lacks."""


@dataclass(frozen=True)
class Launch:
    """A launch and the GPU that it is for."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    gpu: str = ""
    host_gib: int = 3 << 10


def of_line(line: dict[str, str], folder: Path, number: str, *more: str) -> Launch:
    """Makes a launch of a published line, with the model in ``folder``."""
    ours = ("--model-path", str(folder), "--skip-tokenizer-init", "--expert-offload-num-resident", number)
    # The publisher's own code is not here; SGLang has classes for these models.
    words = (word for word in shlex.split(line.get("words", "")) if word != "--trust-remote-code")
    environment = tuple(tuple(pair.split("=", 1)) for pair in line.get("environment", "").split())
    return Launch((*ours, *words, *more), environment, line.get("gpu", ""))  # type: ignore[arg-type]


def judged(launches: Sequence[Launch], python: Nurseries, **env: str) -> dict[Launch, tuple[int | str, str]]:
    """Returns each launch's exit code, or the error that ended it, and its output. ``env`` is for all of them."""
    said: dict[Launch, tuple[int | str, str]] = {}
    for gpu, same in groupby(sorted(set(launches), key=lambda launch: launch.gpu), key=lambda launch: launch.gpu):
        rest = list(same)
        while rest:
            batch, rest = rest[:AT_ONCE], rest[AT_ONCE:]
            asked = [(list(launch.words), dict(launch.environment), launch.host_gib) for launch in batch]
            vram = str(GPUS[gpu if gpu in GPUS else "H200"].memory_mib << 20)
            machine = {"STANDIN_GPUS": "8", "STANDIN_VRAM": vram, **_KINDS[gpu]}
            ran = python.run(_EXAMINE.format(launches=asked), **env, **machine)
            assert ran.code == 0, ran.err[-4000:]
            found = json.loads(ran.out.rpartition("RESULT ")[2])
            said.update(zip(batch, map(tuple, found), strict=True))
    return said


def verdict(said: str) -> str:
    """Returns ``doctor``'s output as one line: its problems, or the estimated residents."""
    if problems := NO_CHOICE.findall(said) or re.findall(r"PROBLEM +(.+)", said):
        return f"refused: {'; '.join(problems)}"
    if ends := re.findall(r"WARNING +(--moe-runner-backend .+ the launch fails .+)", said):
        return f"doubtful: {ends[0]}"
    short = re.findall(r"WARNING +(?:--expert-offload-num-resident \S+: )?estimated: (?!remedy: )(.+)", said)
    if found := re.search(r"estimated: (\d+ of \d+ experts a layer)(?: and (\d+) slots)? in VRAM", said):
        slots = f", {found[2]} slots" if found[2] else ""
        return "; ".join([f"served: {found[1]} resident{slots}", *short])
    return f"estimated not to fit: {'; '.join(short)}"
