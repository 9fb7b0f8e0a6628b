"""Hooks on SGLang's Marlin MoE functions that compute an expert from its copy in a slot.

As for the Triton functions (``triton``), the list that names the expert of each block of tokens is rewritten; here before
the first of the two GEMMs, which share it. What SGLang's Marlin kernels do with the list is taken from their source
(``kernels/jit/csrc/gemm/marlin_moe``), and was tried on an H200 in MXFP4 (GPU_STATUS.md):

- They read weights, scales, global scales, zero points, biases, group indices and permutations at base + row * stride, in 64
  bits, with the stride of the given shapes and without bounds. None receives the number of experts.
- SGLang certifies a list in ascending order, blocks without an expert (-1) first. They use only the sign: they search where the
  blocks of -1 end, or read it next to ``num_tokens_post_padded``. Rewriting keeps every sign.
- They split the work by the number of blocks and the shapes, which do not change. Where they add the partial sums of a split
  atomically (from sm_90 on except for MXFP4, and in float16), outputs vary from run to run anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.plugin.slots.seam import ExpertCalls

_EXPERTS = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe.fused_marlin_moe"
_GEMM = "sglang.kernels.ops.moe.moe_wna16_marlin.moe_wna16_marlin_gemm"

_GEMM_FIRST = (
    *("a", "c_or_none", "b_q_weight", "b_bias_or_none", "b_scales", "global_scale_or_none", "b_zeros_or_none"),
    *("g_idx_or_none", "perm_or_none", "workspace", "sorted_token_ids", "expert_ids", "num_tokens_post_padded"),
)
"""The positional parameters of SGLang's ``moe_wna16_marlin_gemm``. Its caller passes ``moe_block_size`` by name."""


class MarlinSlotSeam(ExpertCalls):
    """The hooks. The calls are those of SGLang's ``fused_marlin_moe``."""

    first = ("hidden_states", "w1", "w2", "w1_scale", "w2_scale", "gating_output", "topk_weights", "topk_ids")
    by_expert = (
        *("w1", "w2", "w1_scale", "w2_scale", "w1_global_scale", "w2_global_scale", "w1_zeros", "w2_zeros"),
        *("g_idx1", "g_idx2", "sort_indices1", "sort_indices2", "w1_bias", "w2_bias"),
    )

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(_EXPERTS, self.around_experts, HookType.AROUND)
        add(_GEMM, self._around_gemm, HookType.AROUND)

    def _around_gemm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self.call
        if call is not None:
            given = dict(zip(_GEMM_FIRST, args, strict=False)) | kwargs
            if given["b_q_weight"].data_ptr() == call.given["w1"].data_ptr():  # the second GEMM gets the same list
                call.slots.resolve(
                    call.given["topk_ids"], given["expert_ids"], given["num_tokens_post_padded"], given["moe_block_size"]
                )
        return original(*args, **kwargs)
