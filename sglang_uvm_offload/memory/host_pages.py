"""Physical stretches of host memory: whether the kernel has long ones to give.

The driver asks the kernel for host pages of 2 MiB, then 64 KiB, then 4 KiB, and tells it not to try hard for the large ones
(``__GFP_NORETRY``, ``uvm_cpu_chunk_alloc_page`` in ``uvm_pmm_sysmem.c`` of NVIDIA's open kernel modules, 595.45.04). So where
free memory is in small pieces, for instance behind the file cache of a checkpoint, experts lie in small pages: their reads need
more translations, and the driver keeps more bookkeeping.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.units import size

BUDDYINFO = Path("/proc/buddyinfo")

SHORT_PAGES = (
    "the driver then takes host pages of 64 or 4 KiB, which the GPU may read more slowly; before the start, as root: "
    "sync; echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory"
)


def free_in_blocks(buddyinfo: Path | None = None) -> int | None:
    """Bytes of free host memory in stretches of a block (2 MiB) or more, over all nodes; None where the kernel shows none.
    What it could free or move together is not counted."""
    try:
        zones = [line.split() for line in (buddyinfo or BUDDYINFO).read_text().splitlines()]
    except OSError:
        return None
    # "Node 0, zone Normal" and then the number of free stretches of each order: of 2^order pages.
    free = 0
    for words in zones:
        orders = [int(word) << order for order, word in enumerate(words[4:])]
        free += sum(pages for order, pages in enumerate(orders) if mmap.PAGESIZE << order >= BLOCK_BYTES)
    return free * mmap.PAGESIZE


def fragmentation(needed: int, buddyinfo: Path | None = None) -> str | None:
    """A warning where ``needed`` bytes of host memory are not free in blocks."""
    free = free_in_blocks(buddyinfo)
    if free is None or free >= needed:
        return None
    return f"{size(free)} of host RAM is free in stretches of 2 MiB, for {size(needed)} of offloaded experts: {SHORT_PAGES}"
