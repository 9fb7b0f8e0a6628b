"""Measured routing: which experts each token of some requests used, layer by layer.

A trace file is an ``npz`` with ``ids[token, layer, k]`` (integers; -1: no expert), ``seq_len[request]`` (tokens a request,
the requests one after another in ``ids``) and the scalar ``num_experts``. It may come from anywhere, so it is data to be
checked: nothing is unpickled, and the sizes that it declares are bounded before memory is taken for them.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.lib import format as npy

MAX_ARRAY_BYTES = 4 << 30
MAX_EXPERTS = 1 << 15


class TraceError(ValueError):
    """The file is not a trace, or not one that can be used; the message says why."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Checked routing: ``ids`` int16 ``[tokens, layers, k]`` in ``-1..num_experts-1``, ``seq_len`` int64 ``[requests]``."""

    ids: np.ndarray
    seq_len: np.ndarray
    num_experts: int

    def __post_init__(self) -> None:
        ids, seq_len = self.ids, self.seq_len
        if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
            raise TraceError(f"ids must be integers [token, layer, k], not {ids.dtype} {list(ids.shape)}")
        if seq_len.ndim != 1 or not np.issubdtype(seq_len.dtype, np.integer):
            raise TraceError(f"seq_len must be integers [request], not {seq_len.dtype} {list(seq_len.shape)}")
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise TraceError(f"num_experts must be 1..{MAX_EXPERTS}, not {self.num_experts}")
        if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= self.num_experts):
            raise TraceError(f"ids must be -1..{self.num_experts - 1}, and are {ids.min()}..{ids.max()}")
        if seq_len.size and (int(seq_len.min()) < 0 or int(seq_len.max()) > len(ids)):
            raise TraceError(f"seq_len must be 0..{len(ids)}, and is {seq_len.min()}..{seq_len.max()}")
        if int(seq_len.sum(dtype=np.int64)) != len(ids):
            raise TraceError(f"seq_len adds up to {seq_len.sum(dtype=np.int64)} tokens, ids has {len(ids)}")
        object.__setattr__(self, "ids", ids.astype(np.int16))
        object.__setattr__(self, "seq_len", seq_len.astype(np.int64))

    @property
    def num_requests(self) -> int:
        return len(self.seq_len)

    @property
    def num_layers(self) -> int:
        return int(self.ids.shape[1])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read and check a file. Raises ``TraceError`` if it is not a trace, ``OSError`` if it cannot be opened."""
        with open(path, "rb") as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    ids, seq_len, num_experts = (_array(archive, name) for name in ("ids", "seq_len", "num_experts"))
            except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
                # zipfile seeks to where the file says (OSError), and refuses unknown methods and encryption.
                raise TraceError(f"not a readable npz file: {error}") from error
        if num_experts.size != 1 or not np.issubdtype(num_experts.dtype, np.integer):
            raise TraceError(f"num_experts must be one integer, not {num_experts.dtype} {list(num_experts.shape)}")
        return cls(ids, seq_len, int(num_experts.reshape(())))

    def save(self, path: str | os.PathLike[str]) -> None:
        np.savez_compressed(path, ids=self.ids, seq_len=self.seq_len, num_experts=np.int64(self.num_experts))

    def split(self, fraction: float) -> tuple[range, range]:
        """The first ``fraction`` (0..1) of the requests, and the others."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"the fraction must be 0..1, not {fraction}")
        first = int(self.num_requests * fraction)
        return range(first), range(first, self.num_requests)

    def steps(self, requests: range, batch: int) -> np.ndarray:
        """The tokens of each decode step when up to ``batch`` of ``requests`` run at once: int64 ``[steps, batch]``, rows of
        ``ids``, -1 where a slot is idle. A step takes one token of each running request; where one ends the next begins."""
        if batch < 1:
            raise ValueError(f"the batch must be at least 1, not {batch}")
        ends = np.cumsum(self.seq_len)
        slot_steps = np.zeros(batch, dtype=np.int64)
        placed = []
        for request in requests:
            slot, length = int(np.argmin(slot_steps)), int(self.seq_len[request])
            placed.append((slot, int(slot_steps[slot]), length, int(ends[request]) - length))
            slot_steps[slot] += length
        steps = np.full((int(slot_steps.max()), batch), -1, dtype=np.int64)
        for slot, start, length, token in placed:
            steps[start : start + length, slot] = np.arange(token, token + length)
        return steps

    def touched(self, steps: np.ndarray) -> np.ndarray:
        """``bool[steps, layers, experts]``: which experts each step (a row of tokens, as ``steps()`` gives) uses."""
        count, batch = steps.shape
        touched = np.zeros((count, self.num_layers, self.num_experts + 1), dtype=bool)
        layers = np.arange(self.num_layers)[None, :, None]
        for slot in range(batch):
            running = np.flatnonzero(steps[:, slot] >= 0)
            # The id -1 lands in the last column, which is not returned.
            touched[running[:, None, None], layers, self.ids[steps[running, slot]]] = True
        return touched[:, :, : self.num_experts]


_HEADERS: dict[tuple[int, int], Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Array ``name`` of an npz, read only if its declared size is what the archive holds and within bounds."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise TraceError(f"the file has no array {name}") from None
    try:
        with archive.open(info) as file:
            version = npy.read_magic(file)
            read_header = _HEADERS.get(version)
            if read_header is None:
                raise TraceError(f"{name} has npy format {version}")
            shape, _, dtype = read_header(file)
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > MAX_ARRAY_BYTES:
                raise TraceError(f"{name} {list(shape)} takes {nbytes} bytes, more than {MAX_ARRAY_BYTES}")
            if info.file_size != file.tell() + nbytes:
                raise TraceError(f"{name} declares {list(shape)} of {dtype}, and has {info.file_size} bytes")
        with archive.open(info) as file:
            return npy.read_array(file, allow_pickle=False)
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(f"{name} is not a plain array: {error}") from error
