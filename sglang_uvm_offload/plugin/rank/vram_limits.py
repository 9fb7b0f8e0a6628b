"""Limits other users of VRAM (torch's allocator, SGLang's sparse indexer) after the KV cache exists and before experts move."""

from __future__ import annotations

import logging
import sys

import torch

from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"


def torch_bytes(reserved: int, free: int, headroom: int) -> int:
    """The limit of torch's reserved memory in bytes: what it has, plus the free VRAM, minus the headroom. Without offloading it
    could reserve as much, because the KV cache would take the headroom. Other allocations (collectives, graphs, kernels loaded
    late) already have their VRAM or take it from the headroom. If little is free, torch may still take half of it."""
    return reserved + free - min(headroom, free // 2)


def bound_torch(headroom_gb: float) -> None:
    """Limit torch's allocator in this process on its current GPU; a tighter limit stays. With full VRAM, the driver evicts
    managed pages instead of failing ``cudaMalloc``, so torch would never free its cached blocks. At its own limit it does."""
    device = torch.cuda.current_device()
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    most = torch_bytes(reserved, free, int(headroom_gb * 2**30))
    fraction = min(most / total, torch.cuda.get_per_process_memory_fraction(device))
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    logger.info(
        "Expert offload: torch's allocator is limited to %s of VRAM, so that it does not evict residents (%s reserved now, %s "
        "free)",
        *map(size, (fraction * total, reserved, free)),
    )


def take_indexer_budget() -> None:
    """Let SGLang's sparse-attention indexer (DeepSeek-V3.2, GLM-5) measure its logits budget now on the current GPU. It
    measures once per process, by default at the first long prefill (``Indexer._get_mqa_logits_budget_bytes``). By then little
    VRAM would look free, because demoted blocks keep theirs until something needs it, and every later prefill would use small
    chunks. Does nothing without such a model, or if this SGLang does not measure."""
    module = sys.modules.get(INDEXER)
    budgets = getattr(getattr(module, "Indexer", None), "_mqa_logits_budget_bytes", None)
    measure = getattr(module, "mqa_logits_budget_bytes", None)
    if budgets is None or measure is None:
        return
    device = torch.cuda.current_device()
    if device not in budgets:
        budgets[device] = measure(device_index=device, allow_sync=True)
