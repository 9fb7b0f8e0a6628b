"""Makes SGLang's indexer for sparse attention (DeepSeek-V3.2, GLM-5) measure its VRAM budget for logits before experts move.

The indexer measures free VRAM once per process, at its first long prefill, and keeps the result
(``Indexer._get_mqa_logits_budget_bytes``). Demoted blocks keep their VRAM until something needs it, so after moves little VRAM
looks free, and every later prefill would go through the indexer in small pieces.
"""

from __future__ import annotations

import sys

import torch

INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"


def take_indexer_budget() -> None:
    """Let the indexer of this process measure now, on the current GPU. Does nothing without such a model, or with an SGLang
    that does not measure."""
    module = sys.modules.get(INDEXER)
    budgets = getattr(getattr(module, "Indexer", None), "_mqa_logits_budget_bytes", None)
    measure = getattr(module, "mqa_logits_budget_bytes", None)
    if budgets is None or measure is None:
        return
    device = torch.cuda.current_device()
    if device not in budgets:
        budgets[device] = measure(device_index=device, allow_sync=True)
