"""Locks of files and folders between the processes of a machine, which nobody waits for without end."""

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
    """Whether this process alone has the lock while the block runs: not if another one keeps it for ``seconds`` (such as a
    stopped one), on a file system without locks, or where ``path`` cannot be a lock. The kernel drops the lock with its
    process. The file is made if it is missing, never truncated, and no link is followed."""
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
    """Whether this process now has the lock of the open file or folder: False if another one kept it for ``seconds``, None on a
    file system, or in a sandbox, without locks."""
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
