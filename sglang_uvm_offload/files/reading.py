"""Reads untrusted files: regular files only, up to a given size.

Opening a pipe waits for a writer, reading a device may never end, and opening one may have side effects, so neither is opened.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import BinaryIO

Path = str | os.PathLike[str]

_FOLDER = "a folder"
_KINDS = {
    stat.S_IFDIR: _FOLDER,
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def printable(text: str) -> str:
    """Untrusted ``text``, made safe for a terminal, a log or a page: every unprintable character becomes ``?``."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines. Surrogates (undecodable bytes of file names) stay, because streams escape them."""
    kept = re.compile("[\n\ud800-\udfff]")
    return "".join(letter if kept.match(letter) else printable(letter) for letter in text.expandtabs())


def special_kind(mode: int) -> str | None:
    """The kind of a special file with this ``mode``, such as "a pipe"; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Never blocks. Raises ``OSError`` for anything else, with the reason
    in ``strerror``."""
    try:
        _check(os.stat(path), path)
        # Another file may have replaced it since, hence O_NONBLOCK and the second check.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # NUL, or a character that no file name can have
        raise OSError(errno.EINVAL, f"not a path: {error}", repr(path)) from error
    try:
        _check(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read(path: Path, max_bytes: int) -> bytes:
    """The contents of a regular file. Raises ``OSError``, also if it is larger than ``max_bytes``."""
    with open_regular(path) as file:
        # Kernel files that have no data yet, such as /proc/kmsg, return None.
        data: bytes | None = file.read(max_bytes + 1)
    if data is not None and len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes >> 20} MiB", os.fspath(path))
    return data or b""


def _check(found: os.stat_result, path: Path) -> None:
    kind = special_kind(found.st_mode)
    if kind == _FOLDER:
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", os.fspath(path))
    if kind is not None:
        reason = f"not a regular file but {kind}; save its contents to a file and give that"
        raise OSError(errno.EINVAL, reason, os.fspath(path))
