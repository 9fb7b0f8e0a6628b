"""A cache for what this program can rebuild. Libraries are loaded from it, so no other user may write to it."""

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
"""The maximum size of a cached file, in bytes."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DIGEST = 32


def cache_root() -> Path:
    """The parent of the ``private_folder`` folders, unless other users can write there."""
    return next(root for root, _ in _roots())


def private_folder(name: str) -> Path:
    """The folder ``name``, created if missing: below ``XDG_CACHE_HOME`` or ``~/.cache``, or below the folder for temporary
    files if other users can write to those or this user cannot. A folder that only root can write to is used if it is not
    empty. Raises ``OSError`` with all reasons if no folder is usable."""
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
    remedy = "set XDG_CACHE_HOME to a folder that only this user can write to"
    raise OSError(errno.EACCES, f"no folder for compiled libraries: {'; '.join(refused)}; {remedy}")


def replace(path: Path, data: bytes) -> None:
    """Write a file in a ``private_folder``. Readers see either the old or the new contents, even after the machine crashes."""
    temporary = path.with_name(f".{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # also on an interrupt, which must not leave a partial file
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        _sync(path.parent)


def seal(path: Path, data: bytes) -> None:
    """``replace``, with a digest after the data that ``sealed`` checks. Library loaders ignore it."""
    replace(path, data + hashlib.sha256(data).digest())


def sealed(path: Path) -> bytes | None:
    """The data of a sealed file. None if there is no such file, it is damaged, or another user may have written it."""
    try:
        if _problem(os.lstat(path), stat.S_IFREG, _OTHERS_WRITE):
            return None
        found = reading.read(path, LARGEST)
    except OSError:
        return None
    data = found[:-_DIGEST]
    return data if hashlib.sha256(data).digest() == found[-_DIGEST:] else None


def _roots() -> Iterator[tuple[Path, int]]:
    """Candidate folders, each with the mode bits that it must not have. A relative ``XDG_CACHE_HOME`` is ignored, as its
    specification requires: the current folder may be a downloaded model."""
    base, home = os.environ.get("XDG_CACHE_HOME", ""), _home()
    if os.path.isabs(base):
        yield Path(base, NAME), _OTHERS_WRITE
    elif home is not None:
        yield Path(home, ".cache", NAME), _OTHERS_WRITE
    # As a last resort ``gettempdir`` is the current folder. Downloaded folders do not have the mode 0700.
    yield Path(tempfile.gettempdir(), f"{NAME}-{os.geteuid()}"), stat.S_IRWXG | stat.S_IRWXO


def _home() -> str | None:
    """The home folder. None without ``HOME`` if the machine does not know the user, as in containers with an arbitrary uid."""
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
    """Raise ``PermissionError`` if another user could change the folder's contents or replace the folder."""
    if reason := _problem(os.lstat(folder), stat.S_IFDIR, forbidden):
        raise PermissionError(errno.EPERM, reason, str(folder))
    for above in {*folder.parents, *Path(os.path.realpath(folder)).parents}:
        found = os.stat(above)
        group = found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()
        if (group or found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(errno.EPERM, f"lies in {above}, which other users can write to", str(folder))


def _problem(found: os.stat_result, kind: int, forbidden: int) -> str | None:
    if stat.S_IFMT(found.st_mode) != kind:
        return "is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is not of the expected kind"
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & forbidden:
        return f"is open to other users (mode {stat.S_IMODE(found.st_mode):o}); remove it, and it is created again"
    return None


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@functools.cache  # warns once
def _warn(reasons: str, instead: Path) -> None:
    logger.warning("%s; using %s for compiled libraries and measurements", reasons, instead)
