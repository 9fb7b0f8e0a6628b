"""Host RAM that holds a launch's offloaded experts, but not as well as it could: warnings, and pages that are given back."""

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
    """``ranks``: those of this machine."""
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
            "Expert offload: --enable-memory-saver: release_memory_occupation can never free the VRAM of experts: host RAM "
            "must hold all of them meanwhile, %s, and has %s left after %s; they stay in VRAM, unless you add host RAM",
            size(need.experts),
            size(max(0, available - need.total + need.experts)),
            need.beside_experts() or "nothing else",
        )


def make_room(resident_bytes: int, models: Sequence[Path]) -> None:
    """Give back the checkpoint's file cache where moves will want the memory in large pages: an expert that is demoted takes
    new ones, and the driver does not wait for the kernel to free them (``memory/host_pages``). Call it when all ranks have
    loaded. ``resident_bytes``: what all ranks of this machine may demote. Does nothing where so much is free in blocks: the
    next start then finds the checkpoint in memory."""
    free = free_in_blocks()
    if free is None or free >= resident_bytes:
        return
    read = sum(give_back(model) for model in models if model.is_dir())
    after = free_in_blocks()
    if read and after is not None:
        logger.info(
            "Expert offload: the file cache of the checkpoint (%s) was given back, for experts that move: %s of host RAM is "
            "free in stretches of 2 MiB, %s before",
            *map(size, (read, after, free)),
        )
