"""Hooks on SGLang's Triton MoE functions that compute an expert from its copy in a slot.

Every tensor of a layer with slots has slot rows after its expert rows, at the same stride. SGLang builds a list with the expert
of each block of tokens. The hooks replace experts with a copy by the copy's row. The kernels multiply the row by the stride
without a bounds check, so nothing else in SGLang sees the extra rows. TMA descriptors do check bounds, so those of such tensors
are widened to all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.plugin.slots.seam import ExpertCalls

_EXPERTS = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts"
_ALIGN = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.moe_align_block_size"
_GEMM = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.invoke_fused_moe_kernel"
_DESCRIPTOR = "sglang.kernels.ops.moe.fused_moe_triton_kernels._get_b_tma_desc_cached"


class TritonSlotSeam(ExpertCalls):
    """The Triton hooks. They track calls of SGLang's ``fused_experts``."""

    first = ("hidden_states", "w1", "w2", "topk_output", "moe_runner_config")
    by_expert = ("w1", "w2", "b1", "b2", "w1_scale", "w2_scale", "w1_zp", "w2_zp")
    second = ("w2", "b2", "w2_scale", "w2_zp")

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(_EXPERTS, self.around_experts, HookType.AROUND)
        add(_ALIGN, self.around_align, HookType.AROUND)
        add(_GEMM, self._around_gemm, HookType.AROUND)
        add(_DESCRIPTOR, self._around_descriptor, HookType.AROUND)

    def _around_gemm(
        self, original: Callable[..., Any], rows: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self.before_gemm(weights)
        return original(rows, weights, *args, **kwargs)

    def _around_descriptor(self, original: Callable[..., Any], weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Widen a copy of SGLang's descriptor on each call. SGLang caches its own, which spans only the experts, by tensor and
        address."""
        descriptor = original(weights, *args, **kwargs)
        slots = self.find(weights.data_ptr())
        return descriptor if slots is None else dataclasses.replace(descriptor, shape=[slots.num_rows, *descriptor.shape[1:]])
