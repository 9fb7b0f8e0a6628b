"""How many ranks share a model's embedding and head in SGLang 0.5.23, by its model classes."""

from __future__ import annotations

from collections.abc import Collection

from sglang_uvm_offload.plan.inputs import Parallel

WHOLE = frozenset({"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"})
"""Their embedding is torch's (``gemma4_causal.py``): every rank has all of it."""
WHOLE_IN_GROUPS = frozenset(
    {
        *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "DeepseekV4ForCausalLM"),
        *("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "InternS2MobiusForConditionalGeneration"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        *("SarvamMLAForCausalLM", "SarvamMoEForCausalLM", "Step3p5ForCausalLM"),
    }
)
"""With DP attention so has every rank of these (``enable_tp=not is_dp_attention_enabled()``)."""


def embedding_ranks(architectures: Collection[str], parallel: Parallel) -> int:
    """Those that share one embedding: a group of DP attention has its own."""
    if WHOLE.intersection(architectures) or (parallel.dp_attention and WHOLE_IN_GROUPS.intersection(architectures)):
        return 1
    return parallel.attn_tp


def head_ranks(parallel: Parallel) -> int:
    """Those that share one head."""
    return parallel.attn_tp if parallel.dp_lm_head else parallel.tp
