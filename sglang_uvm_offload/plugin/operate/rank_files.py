"""One file from each rank of a node: its status, in a folder that lives as long as the HTTP request that asks for it.

SGLang delivers a request to every rank between two steps, but only the first rank of each data-parallel replica can answer. So
the request carries a number, every rank writes its status into the folder of that number, and the process that serves HTTP
reads them. No rank waits for another: pipeline stages get the request at different times, and a collective would hang.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from sglang_uvm_offload.residency.status import RankId, RankStatus

KEY = "expert_offload_status"
"""The key in ``SetInternalStateReq.server_args``, whose values can only be numbers."""
_BITS = 62
"""Another user cannot guess a number of so many random bits, and SGLang's messages hold it."""
_STATUS = msgspec.json.Decoder(RankStatus | None)


class RankFiles:
    """The folder of one request; use it in ``with``."""

    def __init__(self) -> None:
        self._number = secrets.randbits(_BITS)
        self._folder = _folder(self._number)

    def __enter__(self) -> RankFiles:
        self._folder.mkdir(mode=0o700)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # a rank may be writing its file

    def message(self) -> dict[str, int]:
        """What SGLang carries to the ranks."""
        return {KEY: self._number}

    def __len__(self) -> int:
        """How many ranks have written their file."""
        return len(self._paths())

    def read(self) -> list[RankStatus | None]:
        """The statuses so far; None from a rank that could not make its own."""
        return [_STATUS.decode(path.read_bytes()) for path in self._paths()]

    def _paths(self) -> list[Path]:
        return list(self._folder.glob("rank *"))


def requested(message: Mapping[str, Any]) -> int | None:
    """The number in a message of ``RankFiles``, None for any other message."""
    number = message.get(KEY)
    return number if len(message) == 1 and type(number) is int and 0 <= number < 1 << _BITS else None


def write(number: int, rank: RankId, status: RankStatus | None) -> None:
    """Write the file of one rank. Does nothing if the folder is not there (the request has been answered, or came to another
    node) or is not this user's. Raises ``OSError``."""
    folder = _folder(number)
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        return
    unfinished = folder / f"writing {rank}"
    with contextlib.suppress(FileNotFoundError):  # the request has been answered meanwhile
        unfinished.write_bytes(msgspec.json.encode(status))
        unfinished.rename(folder / f"rank {rank}")


def _folder(number: int) -> Path:
    return Path(tempfile.gettempdir(), f"sglang-uvm-offload-status-{number:016x}")
