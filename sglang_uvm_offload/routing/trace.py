"""A routing trace: the experts that each token of some requests used, layer by layer.

A trace file is an ``npz`` with ``ids[token, layer, k]`` (integers), ``seq_len[request]`` (tokens per request; ``ids`` holds
the requests one after another) and the scalar ``num_experts``. The id -1 means no expert; so does 255 or 65535, its unsigned
form, beyond the model's experts. The file may also have guesses (``routing/guesses``). It may come from anywhere, so it is
untrusted input: nothing is unpickled, and declared sizes are bounded before memory is taken for them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files import npz
from sglang_uvm_offload.routing.guesses import ARRAYS, MAX_DISTANCES, Guesses, GuessesError

MAX_BYTES = 1 << 30
"""The limit for the ids and for the guesses: what a server records, in the largest integers."""
MAX_IDS = 1 << 28
"""Twice what a server records; half a GiB as int16."""
UNSIGNED_MINUS_ONE = frozenset((1 << bits) - 1 for bits in (8, 16, 32, 64))
_WIDER = {"u1": np.int16, "u2": np.int32, "u4": np.int64, "u8": np.int64}
MAX_LAYERS = 1 << 10
MAX_EXPERTS = 1 << 15


class TraceError(ValueError):
    """The file is not a usable trace. The message gives the reason."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Checked routing: ``ids`` int16 ``[tokens, layers, k]`` in ``-1..num_experts-1``, ``seq_len`` int64 ``[requests]``."""

    ids: np.ndarray
    seq_len: np.ndarray
    num_experts: int
    guesses: Guesses | None = None

    def __post_init__(self) -> None:
        ids, seq_len = self.ids, self.seq_len
        if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
            raise TraceError(f"ids must be integers [token, layer, k], not {ids.dtype} {list(ids.shape)}")
        if 0 in ids.shape[1:]:
            raise TraceError(f"ids must hold at least one layer and one expert a token, not {list(ids.shape)}")
        if ids.shape[1] > MAX_LAYERS:
            raise TraceError(f"ids must be of at most {MAX_LAYERS} layers, not {ids.shape[1]}")
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
        if self.guesses is not None:
            try:
                checked = self.guesses.checked(len(ids), ids.shape[1], self.num_experts)
            except GuessesError as error:
                raise TraceError(str(error)) from error
            object.__setattr__(self, "guesses", checked)
        object.__setattr__(self, "ids", ids.astype(np.int16, copy=False))
        object.__setattr__(self, "seq_len", seq_len.astype(np.int64, copy=False))

    @property
    def num_requests(self) -> int:
        return len(self.seq_len)

    @property
    def num_layers(self) -> int:
        return int(self.ids.shape[1])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read and check a file. Raises ``TraceError`` if it is not a trace, ``OSError`` if it cannot be opened."""
        try:
            ids, seq_len, num_experts, *guesses = npz.read(
                path,
                {"ids": MAX_BYTES, "seq_len": MAX_BYTES >> 3, "num_experts": 64},
                MAX_IDS,
                optional=dict(zip(ARRAYS, (MAX_BYTES, MAX_LAYERS * MAX_DISTANCES), strict=True)),
            )
        except npz.NpzError as error:
            raise TraceError(str(error)) from error
        if num_experts.size != 1 or not np.issubdtype(num_experts.dtype, np.integer):
            raise TraceError(f"num_experts must be one integer, not {num_experts.dtype} {list(num_experts.shape)}")
        ids = _signed(ids, int(num_experts.reshape(())))
        if seq_len.size == max(seq_len.shape, default=1):
            seq_len = seq_len.reshape(-1)  # drop axes of size 1
        if len(guesses) == 1:
            raise TraceError(f"of {' and '.join(ARRAYS)} the file must have both or neither")
        return cls(ids, seq_len, int(num_experts.reshape(())), Guesses(*guesses) if guesses else None)

    def save(self, file: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write the file, with one byte per id if ids fit. It is not compressed: compressing a full recording takes longer than
        the seconds that an ending server has."""
        guesses = self.guesses
        arrays: dict[str, Any] = {"ids": _small(self.ids), "seq_len": self.seq_len, "num_experts": np.int64(self.num_experts)}
        if guesses is not None:
            arrays |= dict(zip(ARRAYS, (_small(guesses.experts), guesses.folded), strict=True))
        np.savez(file, **arrays)

    def split(self, fraction: float) -> tuple[range, range]:
        """The first ``fraction`` (0..1) of the requests, and the rest."""
        # Rounded before truncation: 0.29 * 100 is 28.999999999999996.
        first = int(round(self.num_requests * fraction, 6))
        return range(first), range(first, self.num_requests)

    def steps(self, requests: range, batch: int) -> np.ndarray:
        """The tokens of each decode step with up to ``batch`` of ``requests`` running: int64 ``[steps, batch]``, indices into
        ``ids``; -1 for an idle place. A step has one token per running request. When a request ends, the next one begins."""
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

    def activated(self, steps: np.ndarray) -> np.ndarray:
        """``bool[steps, layers, experts]``: the experts that each step of ``steps`` (as ``steps()`` returns them) uses."""
        count, batch = steps.shape
        activated = np.zeros((count, self.num_layers, self.num_experts + 1), dtype=bool)
        layers = np.arange(self.num_layers)[None, :, None]
        for slot in range(batch):
            running = np.flatnonzero(steps[:, slot] >= 0)
            # Id -1 sets the last column, which is dropped.
            activated[running[:, None, None], layers, self.ids[steps[running, slot]]] = True
        return activated[:, :, : self.num_experts]


def _signed(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """``ids`` with -1 restored where another tool stored it as an unsigned integer."""
    most = int(ids.max()) if ids.size and ids.dtype.kind in "iu" else 0
    if most not in UNSIGNED_MINUS_ONE or most < num_experts:
        return ids
    padding = ids == most
    ids = ids.astype(_WIDER.get(ids.dtype.str[1:], ids.dtype), copy=False)
    ids[padding] = -1
    return ids


def _small(ids: np.ndarray) -> np.ndarray:
    """The ids with one byte each, if they fit."""
    if ids.size:
        for small in (np.uint8, np.int8):
            if np.iinfo(small).min <= ids.min() and ids.max() <= np.iinfo(small).max:
                return ids.astype(small)
    return ids


def is_trace(path: Path) -> bool:
    """Whether the file has exactly the arrays of a trace. The ids, which may be large, are not read."""
    try:
        (num_experts,) = npz.read(path, {"num_experts": 64})
        known = {"ids", "seq_len", "num_experts"}
        return npz.names(path) in (known, known | set(ARRAYS)) and np.issubdtype(num_experts.dtype, np.integer)
    except npz.NpzError:
        return False


TRACE_FILE = atomic_file.Kind("routing trace", is_trace)
