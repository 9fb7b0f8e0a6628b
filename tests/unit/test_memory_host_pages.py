"""Physical stretches of host memory, as the kernel's files show them."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from sglang_uvm_offload.memory.host_pages import fragmentation, free_in_blocks, mean_stretch
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGES = BLOCK_BYTES // mmap.PAGESIZE
BUDDY = """Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal  30015  15908  12774  22105  23276   9998   5924   2960   1354    {}   {}
Node 1, zone   Normal      0      0      0      0      0      0      0      0   9999      7     10
"""


def buddyinfo(folder: Path, of_2_mib: int, of_4_mib: int) -> Path:
    (folder / "buddyinfo").write_text(BUDDY.format(of_2_mib, of_4_mib))
    return folder / "buddyinfo"


def test_free_stretches_of_a_block_count_on_all_nodes(tmp_path: Path) -> None:
    assert free_in_blocks(buddyinfo(tmp_path, 666, 1003)) == (1 + 666 + 7) * 2 * MIB + (3 + 1003 + 10) * 4 * MIB
    assert free_in_blocks(tmp_path / "none") is None


def test_this_machine_shows_them() -> None:
    free = free_in_blocks()
    known = re.search(r"MemFree:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert free is None or (known is not None and 0 <= free <= 2 * int(known[1]) * KIB)


def test_too_few_free_stretches_are_warned_of_with_the_remedy(tmp_path: Path) -> None:
    file = buddyinfo(tmp_path, 0, 253)
    free = free_in_blocks(file)
    assert free is not None
    assert fragmentation(free, file) is None
    told = fragmentation(20 * GIB, file)
    assert told is not None
    assert "is free in stretches of 2 MiB, for 20.00 GiB of offloaded experts" in told
    assert "drop_caches" in told
    assert "compact_memory" in told
    assert fragmentation(20 * GIB, tmp_path / "none") is None


def pagemap(folder: Path, frames: list[int]) -> Path:
    """Of a process whose first pages have these frames; 0 for one that is not present."""
    entries = [(frame | 1 << 63) if frame else 0 for frame in frames]
    (folder / "pagemap").write_bytes(np.array(entries, dtype=np.uint64).tobytes())
    return folder / "pagemap"


def test_the_mean_stretch_is_that_of_neighbouring_frames_in_a_block(tmp_path: Path) -> None:
    whole = list(range(5 * PAGES, 6 * PAGES))
    assert mean_stretch([0], pagemap(tmp_path, whole)) == BLOCK_BYTES
    both = pagemap(tmp_path, whole + list(range(1, 2 * PAGES, 2)))
    assert mean_stretch([0, BLOCK_BYTES], both) == pytest.approx(2 * BLOCK_BYTES / (1 + PAGES))
    sixteen = [first + page for first in range(32, 64 * PAGES, 64) for page in range(16)][:PAGES]
    assert mean_stretch([0], pagemap(tmp_path, sixteen)) == 16 * mmap.PAGESIZE
    half = pagemap(tmp_path, whole[: PAGES // 2] + [0] * (PAGES // 2))
    assert mean_stretch([0], half) == BLOCK_BYTES // 2


def test_frames_that_the_kernel_hides_are_no_stretch(tmp_path: Path) -> None:
    hidden = np.full(PAGES, 1 << 63, dtype=np.uint64)
    (tmp_path / "pagemap").write_bytes(hidden.tobytes())
    assert mean_stretch([0], tmp_path / "pagemap") is None
    assert mean_stretch([0], pagemap(tmp_path, [0] * PAGES)) is None
    assert mean_stretch([0], tmp_path / "none") is None


def test_memory_of_this_process_is_found_where_the_kernel_shows_it() -> None:
    memory = mmap.mmap(-1, 2 * BLOCK_BYTES)
    memory.write(b"1" * len(memory))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mean = mean_stretch([-(-start // BLOCK_BYTES) * BLOCK_BYTES])
    assert mean is None or mmap.PAGESIZE <= mean <= BLOCK_BYTES
