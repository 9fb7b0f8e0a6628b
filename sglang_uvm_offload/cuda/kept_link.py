"""Saved link measurements of this process's GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_uvm_offload.cuda.device import DriverError, gpu_ids
from sglang_uvm_offload.memory.kept_links import KeptLink, kept


def kept_link(ranks: int, devices: Sequence[int] | None = None) -> KeptLink | None:
    """The saved measurement for ``ranks`` ranks on ``devices`` (by default all visible GPUs). None if there is none, or without
    a driver."""
    try:
        return kept(gpu_ids(devices), ranks)
    except DriverError:
        return None
