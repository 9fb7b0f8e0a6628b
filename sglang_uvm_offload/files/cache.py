"""What this program can make again, kept where nobody else can write: libraries from there are loaded."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import pwd
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_uvm_offload.files import reading

logger = logging.getLogger(__name__)

NAME = "sglang-uvm-offload"
LARGEST = 256 << 20
"""Bytes of a kept file, at most."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DIGEST = 32


def cache_root() -> Path:
    """Where the folders of ``private_folder`` are, unless others can write there."""
    return next(root for root, _ in _roots())


def private_folder(name: str) -> Path:
    """The folder ``name``, made if it is missing: below ``XDG_CACHE_HOME`` or ``~/.cache``, or, where others could write or
    this user cannot, in the folder of temporary files. A folder that only root can write to is used if it holds something.
    Raises ``OSError`` with all reasons if no place will do."""
    refused = []
    for root, forbidden in _roots():
        try:
            for folder in (root, root / name):
                _make(folder)
                _check(folder, forbidden)
            if not os.access(root / name, os.W_OK | os.X_OK) and not any(os.scandir(root / name)):
                raise PermissionError(errno.EACCES, "cannot be written to", str(root / name))
        except OSError as error:
            refused.append(f"{error.filename or root} {error.strerror}")
            continue
        if refused:
            _warn("; ".join(refused), root)
        return root / name
    remedy = "set XDG_CACHE_HOME to a folder that this user alone can write to"
    raise OSError(errno.EACCES, f"no place to keep what is built: {'; '.join(refused)}; {remedy}")


def replace(path: Path, data: bytes) -> None:
    """Write a file of a ``private_folder``. Readers find the old contents or the new, after a crash of the machine too."""
    temporary = path.with_name(f".{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # whatever it is goes on, once the file is gone
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # some file systems sync no folder
        _sync(path.parent)


def seal(path: Path, data: bytes) -> None:
    """``replace``, with a digest after the data, which ``sealed`` checks. Loaders of libraries read over it."""
    replace(path, data + hashlib.sha256(data).digest())


def sealed(path: Path) -> bytes | None:
    """The data; None if there is no such file, if it is damaged, or if another user may have written it."""
    try:
        if _problem(os.lstat(path), stat.S_IFREG, _OTHERS_WRITE):
            return None
        found = reading.read(path, LARGEST)
    except OSError:
        return None
    data = found[:-_DIGEST]
    return data if hashlib.sha256(data).digest() == found[-_DIGEST:] else None


def _roots() -> Iterator[tuple[Path, int]]:
    """Each with the bits that its mode must not have. A relative ``XDG_CACHE_HOME`` is ignored, as its specification says: the
    current folder may be a downloaded model."""
    base, home = os.environ.get("XDG_CACHE_HOME", ""), _home()
    if os.path.isabs(base):
        yield Path(base, NAME), _OTHERS_WRITE
    elif home is not None:
        yield Path(home, ".cache", NAME), _OTHERS_WRITE
    # Without another place that is the current folder. What is downloaded has no mode of 0700.
    yield Path(tempfile.gettempdir(), f"{NAME}-{os.geteuid()}"), stat.S_IRWXG | stat.S_IRWXO


def _home() -> str | None:
    """None for a user whom the machine does not know, as in containers with any uid, without ``HOME``."""
    if os.path.isabs(home := os.environ.get("HOME", "")):
        return home
    try:
        known = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return None
    return known if os.path.isabs(known) else None


def _make(folder: Path) -> None:
    if not folder.parent.is_dir():
        _make(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)


def _check(folder: Path, forbidden: int) -> None:
    """Raises ``PermissionError`` if another user could change what is in the folder, or put another one in its place."""
    if reason := _problem(os.lstat(folder), stat.S_IFDIR, forbidden):
        raise PermissionError(errno.EPERM, reason, str(folder))
    for above in {*folder.parents, *Path(os.path.realpath(folder)).parents}:
        found = os.stat(above)
        group = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
        if (group or found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(errno.EPERM, f"lies in {above}, to which other users can write", str(folder))


def _problem(found: os.stat_result, kind: int, forbidden: int) -> str | None:
    if stat.S_IFMT(found.st_mode) != kind:
        return "is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is of another kind"
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & forbidden:
        return f"is open to other users (mode {stat.S_IMODE(found.st_mode):o}); remove it, it is made again"
    return None


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@functools.cache  # once
def _warn(reasons: str, instead: Path) -> None:
    logger.warning("%s; compiled libraries and measurements are kept in %s", reasons, instead)
