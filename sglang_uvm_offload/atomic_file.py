"""Replacing a file whole: whoever reads it finds the old contents or the new, never a part, whatever happens in between."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def replace(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Put what ``write`` writes at ``path``, with the mode of a file made anew. Raises ``OSError`` and leaves ``path`` as it
    was if that fails, or if what is there is no file (a device)."""
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "Not a regular file", str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:  # an interrupt too must not leave the half file; it goes on from here
            os.unlink(file.name)
            raise


def _umask() -> int:
    """This process's, read without changing it even for a moment."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
