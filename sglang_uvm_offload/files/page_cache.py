"""The kernel's cache of files that have been read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

SAMPLES = 64
"""How many places of a file are sampled to decide whether it is cached."""


def give_back(folder: Path) -> int:
    """Drop the cached pages of the folder's safetensors files, and return the total size of these files in bytes. Pages that a
    process has mapped, or that are not written back yet, stay cached (posix_fadvise(2), POSIX_FADV_DONTNEED). Skips files that
    cannot be opened or whose file system rejects the advice."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(file.fileno()).st_size
    return total


def is_cached(paths: Sequence[str]) -> bool:
    """Whether a sample of every file is cached. Reads nothing from disk (preadv2(2), RWF_NOWAIT). False if a file cannot be
    opened or its file system does not support the check."""
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
