"""Hooks on SGLang's Marlin MoE functions that compute an expert from its copy in a slot.

As for the Triton functions (``triton``), the hooks rewrite the list with the expert of each block of tokens, which both GEMMs
share. They rely on these properties of SGLang's Marlin kernels, taken from their source (``kernels/jit/csrc/gemm/marlin_moe``)
and tried on an H200 in MXFP4 (GPU_STATUS.md):

- They read weights, scales, global scales, zero points, biases, group indices and permutations at base + row * stride, in 64
  bits, with the stride of the given shapes and without a bounds check. None receives the number of experts.
- SGLang guarantees a list in ascending order, with blocks without an expert (-1) first. The kernels use only the sign: they
  search for the end of the -1 blocks, or read it next to ``num_tokens_post_padded``. Rewriting keeps every sign.
- They split the work by the number of blocks and the shapes, which do not change. If they add a split's partial sums atomically
  (from sm_90 on except for MXFP4, and in float16), outputs vary from run to run anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.plugin.slots.seam import ExpertCalls

_EXPERTS = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe.fused_marlin_moe"
_GEMM = "sglang.kernels.ops.moe.moe_wna16_marlin.moe_wna16_marlin_gemm"

_ALIGN = "sglang.srt.layers.moe.fused_moe_triton.moe_align_block_size"
_ALIGN_TOKEN = "sglang.kernels.ops.moe.moe_align_single_token.moe_align_single_token"


class MarlinSlotSeam(ExpertCalls):
    """The Marlin hooks. They track calls of SGLang's ``fused_marlin_moe``."""

    first = ("hidden_states", "w1", "w2", "w1_scale", "w2_scale", "gating_output", "topk_weights", "topk_ids")
    by_expert = (
        *("w1", "w2", "w1_scale", "w2_scale", "w1_global_scale", "w2_global_scale", "w1_zeros", "w2_zeros"),
        *("g_idx1", "g_idx2", "sort_indices1", "sort_indices2", "w1_bias", "w2_bias"),
    )

    second = ("w2", "w2_scale", "w2_global_scale", "w2_zeros", "g_idx2", "sort_indices2", "w2_bias")

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(_EXPERTS, self.around_experts, HookType.AROUND)
        add(_ALIGN, self.around_align, HookType.AROUND)
        add(_ALIGN_TOKEN, self.around_align, HookType.AROUND)
        add(_GEMM, self._around_gemm, HookType.AROUND)

    def _around_gemm(
        self,
        original: Callable[..., Any],
        a: torch.Tensor,
        c: torch.Tensor | None,
        weights: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.before_gemm(weights)
        return original(a, c, weights, *args, **kwargs)
