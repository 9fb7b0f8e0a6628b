"""A bound on the VRAM that torch takes from the driver once the KV cache exists.

Where VRAM is full, the driver evicts managed pages rather than let ``cudaMalloc`` fail. So torch would never learn that it
should free the blocks that it has cached, and residents would give way to them. Under a bound of its own torch frees its cache.
"""

from __future__ import annotations

import logging

import torch

from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)


def torch_bytes(reserved: int, free: int, headroom: int) -> int:
    """The most that torch may reserve, in bytes: what it has, and what is free but for the headroom. That is as much as without
    offloading, where the KV cache would have the headroom. What torch does not allocate (collectives, graphs, kernels that are
    loaded late) has its VRAM already, or takes it from the headroom. Where little is free, torch may still have half of it."""
    return reserved + free - min(headroom, free // 2)


def bound_torch(headroom_gb: float) -> None:
    """Bound torch's allocator in this process, on its current GPU. Keeps a bound that is tighter already."""
    device = torch.cuda.current_device()
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    most = torch_bytes(reserved, free, int(headroom_gb * 2**30))
    fraction = min(most / total, torch.cuda.get_per_process_memory_fraction(device))
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    logger.info(
        "Expert offload: torch frees its cache before it takes more than %s of VRAM, so that it evicts no residents (%s taken "
        "now, %s free)",
        *map(size, (fraction * total, reserved, free)),
    )
