"""Asks the kernel to read parts of files ahead of their reader."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

WINDOW = 1 << 30
"""The maximum number of bytes requested but not read yet: what a fast drive delivers in some tenths of a second. When memory is
short, the kernel reclaims unused pages first."""
TURN = 8 << 20
"""Contiguous bytes that one of several readers requests at a time."""
AT_ONCE = 4
"""Each read requests at most this many times its own size (or this many turns), so that the first reads need not wait for a
whole window of requests."""
REQUEST = 128 << 10
"""The size of one request if the device does not report its read-ahead: the kernel's default."""


class Part(NamedTuple):
    path: str
    offset: int
    nbytes: int


class Share(NamedTuple):
    """Reader ``number`` of ``readers`` that read the same parts at about the same pace. Each requests its own turns."""

    number: int
    readers: int


ALONE = Share(0, 1)


class ReadAhead:
    """Requests ``parts``, which are in reading order, up to ``window`` bytes ahead of the reader. Parts that cannot be
    requested, such as those on a file system that ignores the advice, are read when the reader gets to them."""

    def __init__(self, parts: Iterable[Part], share: Share = ALONE, window: int = WINDOW):
        self._requests = _requests(parts)
        self._share = share
        self._window = window
        self._read = self._asked = 0
        self._path, self._file = "", -1

    def read(self, nbytes: int) -> None:
        """Note that the reader has advanced by ``nbytes``, and request what comes next."""
        self._read += nbytes
        until = min(self._read + self._window, max(self._read, self._asked) + AT_ONCE * max(nbytes, TURN))
        while self._asked < until and (part := next(self._requests, None)) is not None:
            if self._asked // TURN % self._share.readers == self._share.number and self._asked + part.nbytes > self._read:
                self._ask(part)
            self._asked += part.nbytes

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._path, self._file = "", -1

    def _ask(self, part: Part) -> None:
        with contextlib.suppress(OSError):
            if part.path != self._path:
                self.close()
                self._file = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
                self._path = part.path
            os.posix_fadvise(self._file, part.offset, part.nbytes, os.POSIX_FADV_WILLNEED)


def _requests(parts: Iterable[Part]) -> Iterator[Part]:
    path, most = "", REQUEST
    for part in parts:
        if part.path != path:
            path, most = part.path, request_bytes(part.path)
        for done in range(0, part.nbytes, most):
            yield Part(path, part.offset + done, min(most, part.nbytes - done))


def request_bytes(path: str) -> int:
    """The size of one request for this file: the device's read-ahead, because the kernel drops the rest of a longer request
    (mm/readahead.c, ``force_page_cache_ra``)."""
    with contextlib.suppress(OSError):
        number = os.stat(path).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        for folder in (f"/sys/class/bdi/{device}", f"/sys/dev/block/{device}/../queue"):  # a partition uses its disk's queue
            with contextlib.suppress(OSError, ValueError):
                return min(max(int(Path(folder, "read_ahead_kb").read_text()) << 10, REQUEST), TURN)
    return REQUEST
