"""The headers of the GPU probe: each names those it uses, and none is used by one that it uses itself. And the patterns that it
writes: bytes that were left behind show in a checksum."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

PROBE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "probe"
SOURCES = {path.name: path.read_text() for path in [*PROBE.glob("*.h"), PROBE.with_suffix(".cu")]}
DEFINED = re.compile(
    r"^(?:struct|class|enum class) (\w+)"  # a type
    r"|^(?:inline |constexpr |__global__ |__device__ |__host__ )[^\n;{}()=]*?\b(\w+) ?[(={]"  # a function or a constant
    r"|^(?:\w+ )(\w+)\([^;]*\) \{"  # a function template
    r"|^#define (\w+)\(",
    flags=re.M,
)


def includes(text: str) -> set[str]:
    return {name.rpartition("/")[2] for name in re.findall(r'^#include "(.+)"', text, flags=re.M)}


def defined(text: str) -> set[str]:
    return {name for names in DEFINED.findall(text) for name in names if name and not name.startswith("__")}


def uses(name: str) -> set[str]:
    """The headers of which ``name`` uses something that they alone define: an overload may be anybody's."""
    code = re.sub(r'//.*|^#.*|"[^"\n]*"', "", SOURCES[name], flags=re.M)
    words = set(re.findall(r"\w+", code))
    headers = {header: defined(text) for header, text in SOURCES.items() if header.endswith(".h")}
    of_all = [word for names in headers.values() for word in names]
    return {
        header for header, names in headers.items() if header != name and any(of_all.count(word) == 1 for word in names & words)
    }


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_file_includes_every_header_that_it_uses(name: str) -> None:
    assert uses(name) <= includes(SOURCES[name])


def test_no_headers_need_each_other_in_a_circle() -> None:
    needed, done = {name: uses(name) | includes(SOURCES[name]) for name in SOURCES}, set[str]()
    while ready := [name for name in needed if name not in done and needed[name] <= done]:
        done |= set(ready)
    assert set(needed) == done, f"in a circle: {sorted(set(needed) - done)}"


def test_the_definitions_are_found() -> None:
    assert {"CHECK", "row", "session", "median", "block_bytes", "host_seconds"} <= defined(SOURCES["common.h"])
    assert {"kind", "managed_range", "driver_function", "prefetch"} <= defined(SOURCES["memory.h"])


def xors(words: np.ndarray, shape: tuple[int, ...], order: tuple[int, ...], count: int) -> np.ndarray:
    return np.bitwise_xor.reduce(words.reshape(shape).transpose(order).reshape(-1, count), axis=1)


def test_bytes_of_an_earlier_seed_change_the_checksum_of_every_page_and_box() -> None:
    (listed,) = re.findall(r"seeds\[\] = \{(.+)\};", SOURCES["stall_tma.h"])
    (step,) = re.findall(r"static_cast<unsigned>\(word\) \* (\d+)u \+ seed", SOURCES["kernels.h"])
    indices = np.arange(4 << 18, dtype=np.uint64) * np.uint64(step)  # 4 MiB
    patterns = [((indices + np.uint64(int(seed, 16))) % 2**32).astype(np.uint32) for seed in listed.split(", ")]
    for i, now in enumerate(patterns):
        for before in patterns[:i]:
            for page_words in (32, 1 << 10, 1 << 11, 1 << 14, 1 << 19):  # 128 bytes to 2 MiB
                pages = ((-1, page_words), (0, 1), page_words)
                assert (xors(now, *pages) != xors(before, *pages)).all()
            boxes = ((-1, 64, 16, 32), (0, 2, 1, 3), 64 * 32)  # 64 rows of 128 bytes, in rows of 2 KiB
            assert (xors(now, *boxes) != xors(before, *boxes)).all()
