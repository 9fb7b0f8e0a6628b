"""Warns about host RAM that serves offloaded experts badly, and drops page cache that is in their way."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.runtime_context import get_exec

from sglang_uvm_offload.cuda.numa import crowded
from sglang_uvm_offload.files.page_cache import give_back
from sglang_uvm_offload.memory.host_pages import free_in_blocks
from sglang_uvm_offload.residency.budget import Division, RankBudget
from sglang_uvm_offload.residency.host_need import HostNeed
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)


def warn_of_host_ram(ranks: Sequence[RankBudget], division: Division) -> None:
    """Log warnings about host RAM for ``ranks``, the ranks of this machine."""
    by_gpu = Counter[int]()
    for rank in ranks:
        by_gpu[rank.gpu] += rank.experts.offloaded[division.num_resident]
    for line in crowded(by_gpu):
        logger.warning("Expert offload: %s", line)
    if get_exec().features.enable_memory_saver and not ranks[0].one_memory:
        _warn_of_sleep(ranks, division)


def _warn_of_sleep(ranks: Sequence[RankBudget], division: Division) -> None:
    every = sum(rank.experts.offloaded[0] + rank.experts.slots[division.slots] for rank in ranks)
    need, available = HostNeed(every, sum(rank.host_cache for rank in ranks)), min(rank.host for rank in ranks)
    if need.total > available:
        logger.warning(
            "Expert offload: --enable-memory-saver: release_memory_occupation will not free the VRAM of experts: host RAM "
            "would have to hold all of them (%s) but has %s left after %s; add host RAM to free it",
            size(need.experts),
            size(max(0, available - need.total + need.experts)),
            need.beside_experts() or "nothing else",
        )


def make_room(resident_bytes: int, models: Sequence[Path]) -> None:
    """Drop the checkpoint from the page cache if demotions need its memory as large pages: a demoted expert takes new host
    pages, and the driver does not wait for the kernel to reclaim them (``memory/host_pages``). Call this once all ranks have
    loaded. ``resident_bytes`` is what all ranks of this machine may demote. If that much is free in 2 MiB blocks, the
    checkpoint stays cached for the next start."""
    free = free_in_blocks()
    if free is None or free >= resident_bytes:
        return
    read = sum(give_back(model) for model in models if model.is_dir())
    after = free_in_blocks()
    if read and after is not None:
        logger.info(
            "Expert offload: dropped the checkpoint from the page cache (%s) to make room for demoted experts: %s of host RAM "
            "is free in blocks of 2 MiB, up from %s",
            *map(size, (read, after, free)),
        )
