"""Limits the VRAM that torch takes from the driver once the KV cache exists.

If VRAM is full, the driver evicts managed pages rather than let ``cudaMalloc`` fail. So torch would never free its cached
blocks, and the driver would evict residents instead. With its own limit, torch frees its cache first.
"""

from __future__ import annotations

import logging

import torch

from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)


def torch_bytes(reserved: int, free: int, headroom: int) -> int:
    """The most that torch may reserve, in bytes: what it has, plus the free VRAM minus the headroom. That is as much as without
    offloading, where the KV cache would take the headroom. What torch does not allocate (collectives, graphs, kernels loaded
    late) has its VRAM already or takes it from the headroom. If little is free, torch may still take half of it."""
    return reserved + free - min(headroom, free // 2)


def bound_torch(headroom_gb: float) -> None:
    """Limit torch's allocator in this process, on its current GPU. Keeps a tighter existing limit."""
    device = torch.cuda.current_device()
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    most = torch_bytes(reserved, free, int(headroom_gb * 2**30))
    fraction = min(most / total, torch.cuda.get_per_process_memory_fraction(device))
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    logger.info(
        "Expert offload: torch frees its cache before it takes more than %s of VRAM, so that no residents are evicted (%s "
        "taken now, %s free)",
        *map(size, (fraction * total, reserved, free)),
    )
