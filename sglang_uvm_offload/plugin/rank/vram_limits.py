"""Limits what takes VRAM, once the KV cache exists and before experts move: torch's allocator, and SGLang's sparse indexer."""

from __future__ import annotations

import logging
import sys

import torch

from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"


def torch_bytes(reserved: int, free: int, headroom: int) -> int:
    """The most that torch may reserve, in bytes: what it has, plus the free VRAM minus the headroom. That is as much as without
    offloading, where the KV cache would take the headroom. What torch does not allocate (collectives, graphs, kernels loaded
    late) has its VRAM already or takes it from the headroom. If little is free, torch may still take half of it."""
    return reserved + free - min(headroom, free // 2)


def bound_torch(headroom_gb: float) -> None:
    """Limit torch's allocator in this process, on its current GPU; a tighter limit stays. If VRAM is full, the driver evicts
    managed pages rather than let ``cudaMalloc`` fail, so torch would never free its cached blocks. At its own limit it does."""
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


def take_indexer_budget() -> None:
    """Let SGLang's indexer for sparse attention (DeepSeek-V3.2, GLM-5) measure its budget for logits now, on the current GPU.
    It does so once per process, else at its first long prefill (``Indexer._get_mqa_logits_budget_bytes``): demoted blocks keep
    their VRAM until something needs it, so after moves little looks free, and every later prefill would take small pieces.
    Does nothing without such a model, or with an SGLang that does not measure."""
    module = sys.modules.get(INDEXER)
    budgets = getattr(getattr(module, "Indexer", None), "_mqa_logits_budget_bytes", None)
    measure = getattr(module, "mqa_logits_budget_bytes", None)
    if budgets is None or measure is None:
        return
    device = torch.cuda.current_device()
    if device not in budgets:
        budgets[device] = measure(device_index=device, allow_sync=True)
