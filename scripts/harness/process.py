"""Ends processes with their parent or by group, and reads the end of their logs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of processes that this process's children leave behind, or stop being it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def tail(path: Path, lines: int = 60) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])
