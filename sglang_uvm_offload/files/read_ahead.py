"""Asks the kernel for parts of files before a reader comes to them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

WINDOW = 1 << 30
"""Bytes that are asked for and not read yet, at most: what a fast drive delivers in some tenths of a second. Where memory is
short, pages that nobody has used yet are the first that the kernel takes back."""
TURN = 8 << 20
"""Bytes in a row that one of several readers asks for."""
AT_ONCE = 4
"""So many times the bytes just read, or turns, are asked for: the reader need not wait until a whole window is."""
REQUEST = 128 << 10
"""Bytes of one request where the device does not say how far it reads ahead: the kernel's default."""


class Part(NamedTuple):
    path: str
    offset: int
    nbytes: int


class Share(NamedTuple):
    """Reader ``number`` of ``readers`` of the same parts at about the same pace: each asks for its turns."""

    number: int
    readers: int


ALONE = Share(0, 1)


class ReadAhead:
    """``parts``: in the order in which they will be read. What cannot be asked for, or a file system that takes no advice, is
    read when the reader comes to it, as without this."""

    def __init__(self, parts: Iterable[Part], share: Share = ALONE, window: int = WINDOW):
        self._requests = _requests(parts)
        self._share = share
        self._window = window
        self._read = self._asked = 0
        self._path, self._file = "", -1

    def read(self, nbytes: int) -> None:
        """The reader has gone on by ``nbytes``."""
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
    """What one request may ask for: the device's own read-ahead, beyond which the kernel drops the rest (mm/readahead.c,
    ``force_page_cache_ra``)."""
    with contextlib.suppress(OSError):
        number = os.stat(path).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        for folder in (f"/sys/class/bdi/{device}", f"/sys/dev/block/{device}/../queue"):  # a partition has its disk's
            with contextlib.suppress(OSError, ValueError):
                return min(max(int(Path(folder, "read_ahead_kb").read_text()) << 10, REQUEST), TURN)
    return REQUEST
