"""Reading npz files: a damaged one is read or refused, and nothing else ever comes out."""

import contextlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from damage import flipped_bytes

from sglang_uvm_offload.files import npz


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.npz"


def npy() -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(6).reshape(2, 3))
    return file.getvalue()


def write(path: Path, member: bytes) -> None:
    """An intact archive with ``member`` as the array ``a``: its checksum is right."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", member)


def damaged_headers(path: Path) -> Iterator[None]:
    """Each time with another byte of the array's header changed, to one that means something there or to one that does not."""
    rng, whole = np.random.default_rng(0), npy()
    for _ in range(400):
        broken = bytearray(whole)
        broken[rng.integers(whole.index(b"}"))] = rng.choice(list(b"()[]{}'\",:<=b0-\x00\xff"))
        write(path, bytes(broken))
        yield


def damaged_archives(path: Path) -> Iterator[None]:
    """Each time with another byte of the file changed, of which a good part is a name that is not ASCII."""
    np.savez(path, a=np.arange(6), **{"é" * 16: np.arange(1)})
    yield from flipped_bytes(path)


@pytest.mark.parametrize("damaged", [damaged_headers, damaged_archives])
@pytest.mark.filterwarnings("ignore:Reading .* required additional header parsing")
def test_a_damaged_file_is_read_or_refused(path, damaged):
    for _ in damaged(path):
        with contextlib.suppress(npz.NpzError):
            npz.read(path, ("a",), 1 << 20)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"(2, 3), }", b"(2, 3 , }"),  # tokenize.TokenError: the bracket is never closed
        (b"'<i8'", b"'<,8'"),  # SyntaxError, of a structured type
        (b"'descr'", b"b'desc'"),  # TypeError: keys that cannot be sorted
        (b"(2, 3), }", b"-" * 9000),  # MemoryError, of Python's parser
    ],
)
def test_a_header_that_numpy_chokes_on_is_refused(path, before, after):
    header, newline, data = npy().replace(before, after).partition(b"\n")
    header = header[:8] + (len(header) - 9).to_bytes(2, "little") + header[10:]
    write(path, header + newline + data)
    with pytest.raises(npz.NpzError, match=r"not a readable npz file: ."):
        npz.read(path, ("a",), 1 << 20)


def test_the_bound_is_of_all_arrays_together(path):
    np.savez(path, a=np.zeros(8, np.uint8), b=np.zeros(8, np.uint8))
    assert len(npz.read(path, ("a", "b"), 16)) == 2
    with pytest.raises(npz.NpzError, match=r"with b .* 16 bytes, more than 15"):
        npz.read(path, ("a", "b"), 15)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_that_numpy_does_not_write_is_refused(path, method):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.npy", npy())
    with pytest.raises(npz.NpzError, match="compressed in another way"):
        npz.read(path, ("a",), 1 << 20)
