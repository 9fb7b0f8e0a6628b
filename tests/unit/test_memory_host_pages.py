"""Physical stretches of host memory, as the kernel's files show them."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_uvm_offload.memory.host_pages import fragmentation, free_in_blocks

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
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
    assert "is free in blocks of 2 MiB, for 20.00 GiB of offloaded experts" in told
    assert "drop_caches" in told
    assert "compact_memory" in told
    assert fragmentation(20 * GIB, tmp_path / "none") is None
