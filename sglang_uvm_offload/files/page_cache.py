"""The kernel's cache of files that have been read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

SAMPLES = 64
"""Places of a file that are looked at to say whether it is cached."""


def give_back(folder: Path) -> int:
    """Drop the cached pages of the folder's safetensors files, and return the bytes of these files. Pages that any process
    has mapped or that are not written yet stay (posix_fadvise(2), POSIX_FADV_DONTNEED). Files that cannot be opened, or whose
    file system takes no such advice, are left out: their pages stay, as without the call."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(file.fileno()).st_size
    return total


def is_cached(paths: Sequence[str]) -> bool:
    """Whether a sample of each file is cached. Reads nothing from a disk (preadv2(2), RWF_NOWAIT). False where a file cannot be
    opened, or its file system cannot tell."""
    try:
        return all(_is_cached(path) for path in paths)
    except OSError:
        return False


def _is_cached(path: str) -> bool:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for place in range(0, size, max(1, size // SAMPLES)):
            try:
                os.preadv(file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
            except BlockingIOError:
                return False
    return True
