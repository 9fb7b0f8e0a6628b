"""Reading arrays from an npz file of unknown origin: nothing is unpickled, and false sizes in headers take no memory.

``np.load`` allocates whatever size a header declares, so headers are read and checked here first.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Sequence
from typing import IO

import numpy as np
from numpy.lib import format as npy

from sglang_uvm_offload.files import reading


class NpzError(ValueError):
    """The file does not hold these arrays; the message has the reason."""


def read(path: str | os.PathLike[str], names: Sequence[str], max_bytes: int) -> list[np.ndarray]:
    """The arrays ``names`` of a file, together of at most ``max_bytes``. Raises ``NpzError`` if it does not hold them,
    ``OSError`` if it cannot be opened."""
    arrays: list[np.ndarray] = []
    with reading.open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                for name in names:
                    arrays.append(_array(archive, name, sum(array.nbytes for array in arrays), max_bytes))
                return arrays
        except NpzError:
            raise
        except Exception as error:
            # On damaged files, zipfile, the decompressors and numpy (which has Python parse a header) raise many types.
            raise NpzError(f"not a readable npz file: {str(error) or type(error).__name__}") from error


def names(path: str | os.PathLike[str]) -> set[str]:
    """The arrays that a file lists. Raises ``NpzError`` if it is no npz file, ``OSError`` if it cannot be opened."""
    with reading.open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return {name.removesuffix(".npy") for name in archive.namelist()}
        except Exception as error:  # as in ``read``: on damaged files many types are raised, and all mean this
            raise NpzError(f"not a readable npz file: {str(error) or type(error).__name__}") from error


_HEADERS: dict[tuple[int, int], Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Those of ``np.savez`` and ``np.savez_compressed``. Other decompressors may take as much memory as a header asks for."""


def _array(archive: zipfile.ZipFile, name: str, taken: int, max_bytes: int) -> np.ndarray:
    """Array ``name`` of an npz, read only if its declared size is what the archive holds, and within bounds with the bytes
    ``taken``."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise NpzError(f"the file has no array {name}") from None
    if info.compress_type not in _COMPRESSIONS:
        raise NpzError(f"{name} is compressed in another way than numpy does it")
    try:
        with archive.open(info) as file:
            version = npy.read_magic(file)
            read_header = _HEADERS.get(version)
            if read_header is None:
                raise NpzError(f"{name} has npy format {version}")
            shape, _, dtype = read_header(file)
            nbytes = math.prod(shape) * dtype.itemsize
            if taken + nbytes > max_bytes:
                raise NpzError(f"with {name} {list(shape)} the arrays take {taken + nbytes} bytes, more than {max_bytes}")
            if info.file_size != file.tell() + nbytes:
                raise NpzError(f"{name} declares {list(shape)} of {dtype}, and has {info.file_size} bytes")
        with archive.open(info) as file:
            return npy.read_array(file, allow_pickle=False)
    except NpzError:
        raise
    except ValueError as error:
        raise NpzError(f"{name} is not a plain array: {error}") from error
