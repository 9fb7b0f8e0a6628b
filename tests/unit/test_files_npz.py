"""Reading npz files: a damaged one is read or refused, and nothing else ever comes out."""

import contextlib
import io
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from damage import flipped_bytes

from sglang_uvm_offload.files import npz
from sglang_uvm_offload.routing.profile import Profile, ProfileError, is_profile
from sglang_uvm_offload.routing.trace import Trace, TraceError, is_trace


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
    """Each time with another byte of the file changed, of which a good part is a name that is not ASCII, or cut short."""
    np.savez(path, a=np.arange(6), **{"é" * 16: np.arange(1)})
    whole = path.read_bytes()
    yield from flipped_bytes(path)
    for length in range(0, len(whole), 17):
        path.write_bytes(whole[:length])
        yield


@pytest.mark.parametrize("damaged", [damaged_headers, damaged_archives])
@pytest.mark.filterwarnings("ignore:Reading .* required additional header parsing")
def test_a_damaged_file_is_read_or_refused(path, damaged):
    for _ in damaged(path):
        with contextlib.suppress(npz.NpzError):
            npz.read(path, {"a": 1 << 20})


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
        npz.read(path, {"a": 1 << 20})


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_arrays_beyond_their_bound_twice_or_compressed_in_another_way_are_refused(path):
    np.savez(path, a=np.zeros(8, np.uint8), b=np.zeros(8, np.uint8))
    assert len(npz.read(path, {"a": 8, "b": 8})) == 2
    with pytest.raises(npz.NpzError, match=r"b \[8\] takes 8 bytes, more than 7"):
        npz.read(path, {"a": 8, "b": 7})
    with pytest.raises(npz.NpzError, match=r"a \[8\] has 8 numbers, more than 7"):
        npz.read(path, {"a": 8}, 7)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a.npy", npy())
    with pytest.raises(npz.NpzError, match="twice"):
        npz.read(path, {"a": 1 << 20})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", npy())
    with pytest.raises(npz.NpzError, match="a compression that NumPy does not write"):
        npz.read(path, {"a": 1 << 20})


MUCH = 1 << 26
"""Bytes that a small file holds or declares."""
LITTLE = 4 << 20
"""Bytes that may be taken to refuse it."""
PARTS = ("about", "num_experts", "ids")
"""Each is the first array that some reader of ours asks for."""


def header(version: bytes, length: bytes, text: bytes) -> bytes:
    return b"\x93NUMPY" + version + length + text


def long_headers(path: Path) -> None:
    spaces = header(b"\x02\x00", struct.pack("<I", MUCH), b" " * MUCH)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for part in PARTS:
            archive.writestr(f"{part}.npy", spaces)


def many_members(path: Path) -> None:
    """A directory alone: 1 MiB of it becomes some 13 MiB of objects."""
    count, name = 1 << 16, 8
    fixed = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, 0, 0, 0, 0, 0, 0, 0, name, 0, 0, 0, 0, 0, 0)
    directory = b"".join(fixed + b"%08d" % number for number in range(count))
    path.write_bytes(directory + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count - 1, count - 1, len(directory), 0, 0))


def more_than_declared(path: Path) -> None:
    """Small arrays, by their headers and by the directory, whose bytes inflate without end."""
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (8,), }"
    array = header(b"\x01\x00", struct.pack("<H", len(text)), text) + bytes(8)
    deflated = zlib.compressobj(1, wbits=-15)
    stream = deflated.compress(array) + deflated.compress(bytes(MUCH)) + deflated.flush()
    with zipfile.ZipFile(path, "w") as archive:
        for part in PARTS:
            info = zipfile.ZipInfo(f"{part}.npy")
            archive.writestr(info, stream)
            info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, len(array)


def numbers_without_bytes(path: Path) -> None:
    text = b"{'descr': '|V0', 'fortran_order': False, 'shape': (%d,), }" % MUCH
    with zipfile.ZipFile(path, "w") as archive:
        for part in PARTS:
            archive.writestr(f"{part}.npy", header(b"\x01\x00", struct.pack("<H", len(text)), text))


def too_large(path: Path) -> None:
    np.savez_compressed(path, **{part: np.zeros(MUCH, dtype=np.uint8) for part in ("about", "num_experts")}, ids=np.zeros(1))


@pytest.mark.parametrize("made", [long_headers, many_members, more_than_declared, numbers_without_bytes, too_large])
@pytest.mark.parametrize("reader", [is_profile, is_trace, Profile.load, Trace.load])
def test_what_is_no_file_of_ours_takes_little_memory(path, made, reader):
    made(path)
    tracemalloc.start()
    try:
        refused = not reader(path)
    except (ProfileError, TraceError):
        refused = True
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert refused
    assert most < LITTLE


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i2", "?"])
@pytest.mark.parametrize("shape", [(), (0, 3), (300, 301)])
def test_arrays_are_read_as_numpy_reads_them(path, order, dtype, shape):
    wanted = np.asarray(np.random.default_rng(0).integers(0, 100, shape), dtype=dtype, order=order)
    np.savez_compressed(path, a=wanted)
    (found,) = npz.read(path, {"a": 1 << 20})
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted, strict=True)
