"""The VRAM that SGLang's indexer for sparse attention (DeepSeek-V3.2, GLM-5) grants its logits, taken before experts move.

The indexer asks once a process how much VRAM is free, at its first long prefill, and keeps the answer
(``Indexer._get_mqa_logits_budget_bytes``). Demoted blocks keep their VRAM until something needs it, so after moves little looks
free, and every later prefill would go through the indexer in small pieces.
"""

from __future__ import annotations

import sys

import torch

INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"


def take_indexer_budget() -> None:
    """Let the indexer of this process ask now, on the current GPU. Without such a model, or in an SGLang that does not ask,
    nothing is done."""
    module = sys.modules.get(INDEXER)
    budgets = getattr(getattr(module, "Indexer", None), "_mqa_logits_budget_bytes", None)
    measure = getattr(module, "mqa_logits_budget_bytes", None)
    if budgets is None or measure is None:
        return
    device = torch.cuda.current_device()
    if device not in budgets:
        budgets[device] = measure(device_index=device, allow_sync=True)
