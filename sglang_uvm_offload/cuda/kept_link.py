"""What earlier servers measured of the link of this process's GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_uvm_offload.cuda.device import DriverError, gpu_ids
from sglang_uvm_offload.memory.kept_links import KeptLink, kept


def kept_link(ranks: int, devices: Sequence[int] | None = None) -> KeptLink | None:
    """For ``ranks`` ranks on ``devices``, on all GPUs that this process sees by default. None if nothing is kept, and without a
    driver."""
    try:
        return kept(gpu_ids(devices), ranks)
    except DriverError:
        return None
