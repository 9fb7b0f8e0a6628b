"""Locks on files and folders between the processes of a machine, always acquired with a timeout."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.1


@contextmanager
def held(path: Path, seconds: float) -> Iterator[bool]:
    """Hold the lock while the block runs. Yields whether this process has it: not if another process (perhaps a stopped one)
    holds it for ``seconds``, if the file system has no locks, or if ``path`` cannot be a lock file. The kernel releases the
    lock when the process ends. Creates the file if missing, never truncates it, and follows no link."""
    handle = _opened(path)
    try:
        yield handle is not None and taken(handle, seconds) is True
    finally:
        if handle is not None:
            os.close(handle)


def _opened(path: Path) -> int | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def taken(handle: int, seconds: float) -> bool | None:
    """Lock the open file or folder. True if this process now has the lock, False if another one held it for ``seconds``, None
    on a file system or in a sandbox without locks."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError:  # ENOSYS, ENOLCK
            return None
