"""Gives back the checkpoint's file cache where moves will want the memory in large pages.

Experts have their host pages before the first byte is read, so the cache of this start does not break them up (those that
SGLang converts get theirs layer by layer). But an expert that is demoted takes new ones, and the driver does not wait for the
kernel to free large pages (``memory/host_pages``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from sglang_uvm_offload.files.page_cache import give_back
from sglang_uvm_offload.memory.host_pages import free_in_blocks
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)


def make_room(resident_bytes: int, models: Sequence[Path]) -> None:
    """Call it when all ranks have loaded. ``resident_bytes``: what all ranks of this machine may demote. Does nothing where so
    much is free in blocks: the next start then finds the checkpoint in memory."""
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
