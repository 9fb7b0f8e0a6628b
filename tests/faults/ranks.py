"""Runs ranks with faults, each in a fork of a process that has imported all it needs, and judges how each ended."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nursery import Nursery
from standin.build import build, environment

from scripts.harness.patience import patience

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_SECONDS = patience(120)
"""A rank that takes longer hangs. It takes about two on two cores, with slots four."""

IMPORTS = """
import faulthandler
import faults.rank
import torch._dynamo
from faults.model import LAYERS, TENSORS, EXPERTS, true_checksum
for layer in range(LAYERS):
    for expert in range(EXPERTS):
        true_checksum(layer, expert)
"""
PROGRAM = """
faulthandler.dump_traceback_later({seconds}, exit=True)
faults.rank.main({job!r})
"""


@dataclass(frozen=True)
class Fault:
    """``job``: see ``faults.arming``. A rank that stops says one of ``reasons``."""

    kind: str
    phase: str
    what: str
    job: dict[str, Any]
    reasons: tuple[str, ...] = ()
    ends: int | None = None
    """The exit code of a rank that this ends without a word, as a signal does."""
    must_say: bool = False
    """Whether a rank that serves on must give one of the reasons: nothing else tells of this fault."""
    restarts: bool = False
    """Whether the next start is tried, on the files that are left."""


@dataclass
class Outcome:
    where: str
    """"ranks", "ranks with slots", "engines" or "servers"."""
    kind: str
    phase: str
    what: str
    end: str
    """"served on", "stopped with a reason", "ended by the signal", "not reached", "wrong answer", "hang", "leak", "no reason"
    or "no restart"."""
    answers: int = 0
    detail: str = ""
    seconds: float = 0.0


PLANTED = ("path is a folder", "file of another kind", "damaged file")
"""What a user must move away before a profile can be read from, or written to, its path."""
BAD = ("wrong answer", "hang", "leak", "no reason", "no restart")


@dataclass
class Ranks:
    """One process to fork from. ``name`` tells it from others in the folder."""

    folder: Path
    name: str
    cuda: Path | None = None
    """The built stand-in, with ``cache`` beside it for what it compiles; None: built in the folder."""
    runs: int = 0
    left: dict[str, int] = field(default_factory=dict)
    """Managed bytes that a rank without faults leaves, by backend."""

    def __post_init__(self) -> None:
        cuda = self.cuda or self.folder / "cuda"
        if not (cuda / "libcuda.so.1").exists():
            build(cuda)
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        ours = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(cuda.parent / "cache"), "OMP_NUM_THREADS": "1"}
        out = self.folder / f"output {self.name}"
        out.mkdir()
        self.nursery = Nursery(out, IMPORTS, os.environ | environment(cuda) | ours)

    def close(self) -> None:
        self.nursery.close()

    def run(self, job: dict[str, Any], files: Path | None = None) -> tuple[int, dict[str, Any] | None, str, Path]:
        """The exit code, what the rank told, its log, and its folder."""
        self.runs += 1
        if files is None:
            files = self.folder / f"files {self.name}" / str(self.runs)
            files.mkdir(parents=True)
        inner = files / "saved"
        inner.mkdir(exist_ok=True)
        program = PROGRAM.format(seconds=WATCHDOG_SECONDS, job={"backend": "uvm", **job, "folder": str(inner)})
        ended = self.nursery.run(program)
        lines = ended.out.splitlines()
        return ended.code, json.loads(lines[-1]) if lines else None, ended.err, files

    def census(self) -> dict[str, dict[str, int]]:
        """How many calls of each kind each phase of a rank without faults makes."""
        code, told, log, _ = self.run({"action": "census"})
        assert code == 0, log
        assert told is not None
        phases = [*told["census"]]
        counts = told["census"]
        self.left["uvm"] = told["managed_bytes"]
        return {
            phase: {kind: counts[after][kind] - seen for kind, seen in counts[phase].items()}
            for phase, after in itertools.pairwise(phases)
        }

    def judge(self, fault: Fault) -> Outcome:
        code, told, log, files = self.run({**fault.job, "phase": fault.phase})
        where = "ranks with slots" if "slots" in fault.job else "ranks"
        outcome = Outcome(where, fault.kind, fault.phase, fault.what, "served on")
        outcome.end, outcome.detail = self._end(fault, code, told, log, files)
        if told is not None:
            outcome.answers = told["answers"]
        if fault.restarts and outcome.end not in BAD:
            self._restart(fault, files, outcome)
        if outcome.end not in BAD:
            shutil.rmtree(files, ignore_errors=True)
        return outcome

    def _end(self, fault: Fault, code: int, told: dict[str, Any] | None, log: str, files: Path) -> tuple[str, str]:
        if "Timeout (" in log:
            return "hang", log[-3000:]
        if told is not None and told["wrong"]:
            return "wrong answer", told["wrong"]
        if fault.ends is not None and code == fault.ends:
            return "ended by the signal", ""
        said = [line for line in log.splitlines() if any(reason in line for reason in fault.reasons)]
        if code == 0 and told is not None and not told.get("injected"):
            return "not reached", ""
        if code != 0 or told is None:  # told nothing: torch ends a process at once whose tensors cannot be freed
            return ("stopped with a reason", said[-1]) if said else ("no reason", f"exit code {code}: {log[-2000:]}")
        backend = fault.job.get("backend", "uvm")
        # A thread that hangs keeps what it works on until the process ends.
        if not told.get("hung") and told["managed_bytes"] > self.left.get(backend, 0):
            return "leak", f"{told['managed_bytes']} managed bytes"
        if left := sorted(path.name for path in (files / "saved").glob(".*")):
            return "leak", f"files {left}"
        if fault.must_say and not said:
            return "no reason", f"served on without a word: {log[-2000:]}"
        return "served on", "; ".join(told["faults"]) or next(iter(said[-1:]), "")

    def _restart(self, fault: Fault, files: Path, outcome: Outcome) -> None:
        """A start on the files that are left, where whoever broke the folder has mended it."""
        saved = files / "saved"
        if saved.is_file():
            saved.unlink()
        if fault.job.get("value") in PLANTED and (path := saved / "profile.npz").exists():
            path.rmdir() if path.is_dir() else path.unlink()
        again = self.run({"action": "none", "phase": "none", "backend": fault.job.get("backend", "uvm")}, files)
        code, told, log, _ = again
        if code != 0 or told is None or told["phase"] != "ended":
            outcome.end, outcome.detail = "no restart", f"exit code {code}: {log[-2000:]}"
        elif left := sorted(path.name for path in saved.glob(".*")):
            outcome.end, outcome.detail = "leak", f"after the next start: files {left}"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Without details where all is well: they name this machine's paths."""
    shown = asdict(outcome)
    if outcome.end not in BAD:
        del shown["detail"]
    return shown
