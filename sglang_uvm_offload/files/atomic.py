"""Writes files that a user named: atomically, and only over files of the same kind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sglang_uvm_offload.files import lock, reading


@dataclass(frozen=True)
class Kind:
    """A kind of file that this program writes. Messages use ``name``, such as "routing profile".

    ``recognises`` returns whether the regular file at a path is of this kind. It reads little, unpickles nothing and may raise
    ``OSError``. A file that is too damaged to show its kind, such as a truncated npz, is not recognised, even if this program
    wrote it: writes are atomic, so something else changed the file, and the user must decide what to do with it.
    """

    name: str
    recognises: Callable[[Path], bool]


class WriteRefused(OSError):
    """The file at the path must not be replaced, or cannot be written. ``strerror`` gives the reason."""

    def __init__(self, path: Path, reason: str):
        super().__init__(errno.EPERM, reason, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


_RANDOM_BYTES = 4
"""Random bytes in the name of a temporary file."""

Protected = Mapping[Path, str]
"""Files and folders that must not be written to, with a description of each, such as "the model's folder"."""
NOTHING: Protected = {}


def refusal(path: Path, kind: Kind, protected: Protected = NOTHING) -> str | None:
    """Why a file of ``kind`` cannot be written to ``path``, as far as that shows without writing; None if it can.

    Follows symbolic links. An empty file, such as ``mktemp`` creates, may be replaced.
    """
    return _refusal(_followed(path), kind, protected)


def replace(path: Path, write: Callable[[IO[bytes]], object], kind: Kind, protected: Protected = NOTHING) -> None:
    """Replace the contents of ``path`` with what ``write`` writes. Readers see either the old or the new contents, never a mix.
    The file keeps its mode, and also its owner and group if this process may set them.

    Raises ``WriteRefused`` if ``refusal`` gives a reason (checked before ``write`` and again just before the rename), and
    ``OSError`` if writing fails; either way the old file stays. If ``path`` is a symbolic link, its target is replaced. Other
    hard links to the target keep the old contents. Temporary files of killed writers are removed.
    """
    target = _followed(path)
    _check(path, target, kind, protected)
    _remove_abandoned(target)
    temporary, opened = _open_temporary(target)
    with opened as file:
        try:
            _make_alike(file.fileno(), target)  # before it holds anything that others may not read
            write(file)
            file.flush()
            os.fsync(file.fileno())
            _check(path, target, kind, protected)
            os.replace(temporary, target)
        except BaseException:  # also on an interrupt, which must not leave a partial file
            os.unlink(temporary)
            raise


def _open_temporary(target: Path) -> tuple[Path, IO[bytes]]:
    """Create a file next to ``target``. It is locked until closed, so that no other writer takes it for abandoned."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(_RANDOM_BYTES)}")
        file = open(temporary, "xb")  # noqa: SIM115 -- the caller closes it
        lock.taken(file.fileno(), 0)
        if os.path.exists(temporary):  # no other writer removed it before it was locked
            return temporary, file
        file.close()


def _make_alike(handle: int, target: Path) -> None:
    """Give the open file the owner, group and mode of ``target``, if that exists. If the group cannot be kept, the new group
    gets no permissions."""
    try:
        there = os.stat(target)
    except FileNotFoundError:
        return
    for owner in (-1, there.st_uid):  # first the group alone: fewer users may change the owner
        with contextlib.suppress(OSError):
            os.fchown(handle, owner, there.st_gid)
    lost = 0 if os.fstat(handle).st_gid == there.st_gid else stat.S_IRWXG
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(handle, there.st_mode & 0o777 & ~lost)


def _remove_abandoned(target: Path) -> None:
    """Remove the temporary files of writers that have ended. On a file system without locks, they stay."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}")
    with contextlib.suppress(OSError):  # the folder may be unreadable
        for path in [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]:
            with contextlib.suppress(OSError), reading.open_regular(path) as file:  # another writer may remove it first
                if lock.taken(file.fileno(), 0):
                    os.unlink(path)


def _followed(path: Path) -> Path:
    """The absolute target of ``path``, without links, ``.`` and ``..``. A link that points to itself, or to something without
    a path (as ``/dev/stdout`` may), is not followed."""
    target = os.path.realpath(path)
    return Path(os.path.abspath(path) if os.path.exists(path) and not os.path.exists(target) else target)


def _check(path: Path, target: Path, kind: Kind, protected: Protected) -> None:
    if reason := _refusal(target, kind, protected):
        raise WriteRefused(path, reason)


def _refusal(target: Path, kind: Kind, protected: Protected) -> str | None:
    for other, what in protected.items():
        if _same(target, other):
            return f"is {what}; choose another path"
        if any(_same(folder, other) for folder in target.parents):
            return f"lies in {what} ({other}); choose a path outside it"
    folder = target.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} cannot be written to"
    try:
        return _irreplaceable(target, kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be examined: {error.strerror}"


def _irreplaceable(target: Path, kind: Kind) -> str | None:
    """Why the file at ``target`` must not be replaced; None if it may. Raises ``FileNotFoundError`` if there is no file."""
    there = os.lstat(target)
    if stat.S_ISDIR(there.st_mode):
        return "is a folder; give the path of a file"
    if not stat.S_ISREG(there.st_mode):
        return "is not a regular file; choose another path"
    if there.st_size and not kind.recognises(target):
        return f"exists and is not a {kind.name} of sglang-uvm-offload; choose another path or move the file away"
    return None


def _same(target: Path, other: Path) -> bool:
    """Whether both paths name the same file or folder (also through hard links or bind mounts), which need not exist yet."""
    try:
        return os.path.samefile(target, other)
    except OSError:
        return target == _followed(other)
