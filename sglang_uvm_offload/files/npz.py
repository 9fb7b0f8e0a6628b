"""Reads arrays from untrusted npz files: unpickles nothing, and bounds the memory of each array, whatever the file declares or
inflates to.

``np.load`` allocates whatever size a header declares, NumPy inflates a header before checking its length, and ``zipfile`` reads
the whole directory at once. This module checks each of these first.
"""

from __future__ import annotations

import io
import math
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from sglang_uvm_offload.files import reading

NPY_MAGIC = npy.MAGIC_PREFIX
"""How an npy file begins."""
MAX_AT_ONCE = 1 << 17
"""The maximum size of one read, in bytes: more than the longest comment at the end of a zip. A directory of this size lists
some two thousand arrays, and our files have a handful."""
MAX_HEADER_BYTES = 10_000
"""The maximum size of an array's header: NumPy parses no longer one."""
_CHUNK = 1 << 16


class NpzError(ValueError):
    """The file does not hold the requested arrays. The message gives the reason."""


_NOTHING: Mapping[str, int] = {}


def read(
    path: str | os.PathLike[str],
    max_bytes: Mapping[str, int],
    max_items: int = sys.maxsize,
    optional: Mapping[str, int] = _NOTHING,
) -> list[np.ndarray]:
    """Read the arrays named in ``max_bytes``, followed by those named in ``optional`` that the file has. The values are each
    array's maximum size in bytes; no array may have more than ``max_items`` numbers. Raises ``NpzError`` if an array is missing
    or invalid, and ``OSError`` if the file cannot be opened."""
    with _opened(path) as archive:
        listed = set(archive.namelist())
        there = {name: most for name, most in optional.items() if f"{name}.npy" in listed}
        return [_array(archive, name, most, max_items) for name, most in {**max_bytes, **there}.items()]


def names(path: str | os.PathLike[str]) -> set[str]:
    """The names of the file's arrays. Raises ``NpzError`` if it is not an npz file, ``OSError`` if it cannot be opened."""
    with _opened(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def beginning(path: str | os.PathLike[str], end: str, nbytes: int) -> bytes:
    """The first ``nbytes`` bytes of the first member of a zip file whose name ends with ``end``. Raises ``NpzError`` and
    ``OSError`` as ``names`` does."""
    with _opened(path) as archive, archive.open(next(name for name in archive.namelist() if name.endswith(end))) as member:
        return member.read(nbytes)


class ArrayShape(NamedTuple):
    """What an array's header declares."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def is_ids(self) -> bool:
        """Whether it may be ids[token, layer, k]."""
        return len(self.shape) == 3 and self.dtype.kind in "iu"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def shapes(path: str | os.PathLike[str]) -> dict[str, ArrayShape]:
    """The shapes of the arrays in an npz file, by name. Does not read their contents. Raises ``NpzError`` and ``OSError``
    like ``names``."""
    found = {}
    with _opened(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                found[name.removesuffix(".npy")] = shape_of(file)
    return found


def shape_of(file: IO[bytes]) -> ArrayShape:
    """The shape of the array in an npy file. Raises ``NpzError``."""
    try:
        shape, _, dtype = _header(file, "the array")
    except NpzError:
        raise
    except Exception as error:  # as in ``_opened``
        raise NpzError(f"not a readable npy file: {str(error) or type(error).__name__}") from error
    return ArrayShape(dtype, shape)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[zipfile.ZipFile]:
    """Open the file as a zip. Anything wrong with it, also inside the block, raises ``NpzError``."""
    with reading.open_regular(path) as file:
        try:
            with zipfile.ZipFile(_SmallReads(file)) as archive:
                listed = archive.namelist()
                if len(set(listed)) < len(listed):
                    raise NpzError("the file has an array twice")
                yield archive
        except NpzError:
            raise
        except Exception as error:
            # zipfile, the decompressors and NumPy (which evaluates a header) raise many types for damaged files.
            raise NpzError(f"not a readable npz file: {str(error) or type(error).__name__}") from error


class _SmallReads:
    """A file that refuses to read more than ``MAX_AT_ONCE`` bytes at once."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(MAX_AT_ONCE + 1 if size < 0 else min(size, MAX_AT_ONCE + 1))
        if len(data) > MAX_AT_ONCE:
            raise NpzError(f"its directory has more than {MAX_AT_ONCE} bytes")
        return data


_Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
_HEADERS: dict[tuple[int, int], tuple[int, Callable[[IO[bytes]], _Header]]] = {
    (1, 0): (2, npy.read_array_header_1_0),
    (2, 0): (4, npy.read_array_header_2_0),
}
"""By npy version: the size of the header's length field, and the parser of that field and the header."""


_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""What ``np.savez`` and ``np.savez_compressed`` use. Other decompressors may allocate as much memory as a header asks for."""


def _array(archive: zipfile.ZipFile, name: str, max_bytes: int, max_items: int) -> np.ndarray:
    """Read one array, if its declared size is within bounds and matches what the archive holds."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise NpzError(f"the file has no array {name}") from None
    if info.compress_type not in _COMPRESSIONS:
        raise NpzError(f"{name} has a compression that NumPy does not write")
    try:
        with archive.open(info) as file:
            shape, fortran, dtype = _header(file, name)
            if dtype.kind not in "biufc":
                raise NpzError(f"{name} is not a plain array: its type is {dtype}"[:200])
            items = math.prod(shape)
            nbytes = items * dtype.itemsize
            if nbytes > max_bytes:
                raise NpzError(f"{name} {list(shape)} takes {nbytes} bytes, more than {max_bytes}")
            if items > max_items:
                raise NpzError(f"{name} {list(shape)} has {items} numbers, more than {max_items}")
            if info.file_size != file.tell() + nbytes:
                raise NpzError(f"{name} declares {list(shape)} of {dtype}, but has {info.file_size} bytes")
            return np.ndarray(shape, dtype, _content(file, nbytes), order="F" if fortran else "C")
    except NpzError:
        raise
    except ValueError as error:
        raise NpzError(f"{name} is not a plain array: {error}") from error


def _header(file: IO[bytes], name: str) -> _Header:
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise NpzError(f"{name} has npy format {version}")
    digits, parse = _HEADERS[version]
    length = file.read(digits)
    if (nbytes := int.from_bytes(length, "little")) > MAX_HEADER_BYTES:
        raise NpzError(f"{name} has a header of {nbytes} bytes, more than {MAX_HEADER_BYTES}")
    return parse(io.BytesIO(length + file.read(nbytes)))


def _content(file: IO[bytes], nbytes: int) -> np.ndarray:
    """The remaining bytes. Reading to the end has ``zipfile`` verify the checksum."""
    content = np.empty(nbytes, dtype=np.uint8)
    for at in range(0, nbytes, _CHUNK):
        wanted = content[at : at + _CHUNK]
        found = np.frombuffer(file.read(len(wanted)), dtype=np.uint8)
        if len(found) < len(wanted):
            raise NpzError("an array ends before its declared size")
        wanted[:] = found
    return content
