"""Runs small Python programs, each in a fork of a process that has done the imports. That saves the seconds that torch takes to
import, or the half minute that SGLang takes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.harness.patience import patience

LOOP = """
import atexit, faulthandler, gc, json, os, sys, threading, traceback
{imports}
def _run(program):
    code, before = 0, set(globals())
    try:
        exec(compile(program, "program", "exec"), globals())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for name in set(globals()) - before:
        del globals()[name]
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.update(request["environment"])
        for number, path in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        faulthandler.dump_traceback_later({seconds}, exit=True)
        _run(request["program"])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""
"""Forks for each request. The child runs its program at the top level and ends as an interpreter does, but leaves imported
modules to the kernel: tearing them down takes seconds. ``gc.freeze`` keeps the collector from them too."""


@dataclass(frozen=True)
class Ended:
    """A finished program: exit code and output."""

    code: int
    out: str
    err: str


class Nursery:
    """A process that has run ``imports`` in the environment ``env``. Programs' output goes to ``folder``."""

    def __init__(self, folder: Path, imports: str, env: Mapping[str, str]):
        self.folder = folder
        self.runs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP.format(imports=textwrap.dedent(imports), seconds=patience(600))],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._process.communicate()

    def run(self, program: str, **env: str) -> Ended:
        self.runs += 1
        out, err = (self.folder / f"{self.runs}.{kind}" for kind in ("out", "err"))
        request = {"program": textwrap.dedent(program), "environment": env, "out": str(out), "err": str(err)}
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Ended(code, out.read_text(), err.read_text())


class Nurseries:
    """A ``Nursery`` per environment that programs request: SGLang reads its variables at import."""

    ALIVE = 2
    """The most nurseries at a time, because each has SGLang in memory; the least recently used one is closed."""

    def __init__(self, folder: Path, imports: str, env: Mapping[str, str]):
        self.folder, self.imports, self.env = folder, imports, env
        self._alive: dict[frozenset[tuple[str, str]], Nursery] = {}
        self._made = 0

    def close(self) -> None:
        for nursery in self._alive.values():
            nursery.close()

    def run(self, program: str, **env: str) -> Ended:
        key = frozenset(env.items())
        nursery = self._alive.pop(key, None) or self._make(env)
        self._alive[key] = nursery
        return nursery.run(program)

    def _make(self, env: Mapping[str, str]) -> Nursery:
        if len(self._alive) == self.ALIVE:
            self._alive.pop(next(iter(self._alive))).close()
        self._made += 1
        folder = self.folder / str(self._made)
        folder.mkdir()
        return Nursery(folder, self.imports, {**self.env, **env})
