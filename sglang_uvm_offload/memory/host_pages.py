"""Fragmentation of free host memory: whether the kernel can give large pages.

The driver asks the kernel for host pages of 2 MiB, then 64 KiB, then 4 KiB, and does not let it try hard for the large ones
(``__GFP_NORETRY``, ``uvm_cpu_chunk_alloc_page`` in ``uvm_pmm_sysmem.c`` of NVIDIA's open kernel modules, 595.45.04). So with
fragmented free memory, for example next to a checkpoint in the page cache, experts land in small pages. Reading them then needs
more address translations, and the driver keeps more bookkeeping.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.units import size

BUDDYINFO = Path("/proc/buddyinfo")

SHORT_PAGES = (
    "the driver then uses host pages of 64 or 4 KiB, which the GPU may read more slowly; before launching, run as root: "
    "sync; echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory"
)


def free_in_blocks(buddyinfo: Path | None = None) -> int | None:
    """Bytes of free host memory in contiguous blocks of 2 MiB or more, over all nodes. None if the kernel does not show them.
    Memory that the kernel could reclaim or compact does not count."""
    try:
        zones = [line.split() for line in (buddyinfo or BUDDYINFO).read_text().splitlines()]
    except OSError:
        return None
    # "Node 0, zone Normal", then the number of free chunks of each order (2^order pages).
    free = 0
    for words in zones:
        orders = [int(word) << order for order, word in enumerate(words[4:])]
        free += sum(pages for order, pages in enumerate(orders) if mmap.PAGESIZE << order >= BLOCK_BYTES)
    return free * mmap.PAGESIZE


def fragmentation(needed: int, buddyinfo: Path | None = None) -> str | None:
    """A warning if fewer than ``needed`` bytes of host memory are free in 2 MiB blocks."""
    free = free_in_blocks(buddyinfo)
    if free is None or free >= needed:
        return None
    return f"only {size(free)} of host RAM is free in blocks of 2 MiB, for {size(needed)} of offloaded experts: {SHORT_PAGES}"
