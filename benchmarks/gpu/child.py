"""Child processes of the session. Each has a time limit, and nothing that it started outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts.harness.process import adopt_orphans, die_with_parent, kill_group

KILL_SECONDS = 10
"""Seconds in which killed processes must be gone."""


class ChildFailure(Exception):
    """The child failed or had to be killed. The message is one line."""


@dataclass(frozen=True)
class Ended:
    status: int | None
    """The exit status; None if it was killed at its time limit."""
    stuck: bool
    """Whether a killed process is still there: one inside a driver call may never end."""


def run(command: Sequence[str], seconds: float, stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> Ended:
    """Runs ``command``, kills it after ``seconds``, and kills whatever it leaves. Returns at most KILL_SECONDS later."""
    with adopted() as family:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True, preexec_fn=die_with_parent)
        try:
            status = process.wait(max(0, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            gone = family.end(process)
    return Ended(status, not gone)


def output(command: Sequence[str], seconds: float, stderr: IO[str] | None = None) -> str:
    """Returns what ``command`` printed. Raises ``ChildFailure``."""
    with tempfile.TemporaryFile("w+") as printed:  # a pipe would block for as long as any process holds it
        ended = run(command, seconds, printed, stderr)
        printed.seek(0)
        text = printed.read()
    if ended.status != 0:
        how = f"was killed after {seconds:.0f} s" if ended.status is None else f"ended with status {ended.status}"
        raise ChildFailure(how + (", and did not end: it is stuck in the driver" if ended.stuck else ""))
    return text


class Family:
    """The children that this process gained since the object was made."""

    def __init__(self) -> None:
        self.others = set(children())

    def end(self, process: subprocess.Popen[bytes]) -> bool:
        """Kills the process and everything it left. Returns whether all are gone. Killing a process makes its children ours,
        so this repeats until there are none."""
        until = time.monotonic() + KILL_SECONDS
        if process.poll() is None:
            kill_group(process.pid)
        while left := [pid for pid in children() if pid not in self.others]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                if pid == process.pid:
                    process.poll()
                else:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True


@contextlib.contextmanager
def adopted() -> Iterator[Family]:
    """Inside the block, orphaned descendants become children of this process.

    This is needed because a server runs in its own session, where no signal to our process group reaches it, and its processes
    ask to die with their parents only after their imports."""
    family = Family()
    adopt_orphans()
    try:
        yield family
    finally:
        adopt_orphans(False)


def children() -> list[int]:
    """Returns the children of this process, including zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    found.append(int(entry.name))
    return found
