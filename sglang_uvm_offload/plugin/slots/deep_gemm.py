"""A hook on SGLang's DeepGEMM runner that computes an expert from its copy in a slot.

In the contiguous layout, ``m_indices`` holds the expert of each row, and both GEMMs share it. The hook rewrites it before the
first GEMM and gives both GEMMs the weights and scales of all rows, experts and slots, because TMA descriptors check bounds. The
masked layout gives each expert a group of rows by its number, so it is computed in place. These properties of DeepGEMM's Hopper
kernels come from its source (``scheduler/gemm.cuh``, ``sm90_fp8_gemm_1d2d.cuh``, ``sm90_bf16_gemm.cuh``), and those of FP8 were
tried on an H200 (GPU_STATUS.md):

- A block of rows has the expert of its first row. TMA reads its weights from row ``expert * N`` on. Scales of 128 x 128 are
  read without bounds at base + expert * stride.
- A block without an expert (-1) is not computed, but its weights are still read: those of expert 0, which may be in host RAM.
  SGLang pads each step to as many blocks as its worst routing needs. Here the padding points to the first slot, which is in
  VRAM. SGLang drops what is computed for padding, and no row depends on another.
- The number of groups is part of a compiled kernel's name, but changes nothing that the kernel does in this layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.plugin.slots.seam import Seam
from sglang_uvm_offload.streaming.model_slots import LayerSlots

_RUN = "sglang.srt.layers.moe.moe_runner.deep_gemm.DeepGemmRunnerCore.run"


class DeepGemmSlotSeam(Seam):
    """The hook. ``by_expert`` are fields of SGLang's ``DeepGemmMoeQuantInfo``."""

    by_expert = ("w13_weight", "w2_weight", "w13_scale", "w2_scale")

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(_RUN, self.around_run, HookType.AROUND)

    def around_run(
        self, original: Callable[..., Any], core: Any, rows: Any, experts: Any, state: dict[str, Any], **kwargs: Any
    ) -> Any:
        """``rows``: SGLang's ``DeepGemmRunnerInput``. ``experts``: its ``DeepGemmMoeQuantInfo``."""
        slots = None if rows.use_masked_gemm else self.serving(experts.w13_weight, vars(experts))
        if slots is not None:
            _compile_without_slots(experts)
            _resolve(slots, state["topk_ids"], rows.m_indices, len(experts.w13_weight))
            experts = dataclasses.replace(experts, **self._all_rows(slots, experts))
        return original(core, rows, experts, state, **kwargs)

    def _all_rows(self, slots: LayerSlots, experts: Any) -> dict[str, torch.Tensor]:
        """The tensors of ``experts``, extended by the slot rows."""
        tensors = {name: getattr(experts, name) for name in self.by_expert}
        return {
            name: tensor.as_strided((slots.num_rows, *tensor.shape[1:]), tensor.stride())
            for name, tensor in tensors.items()
            if tensor is not None
        }


def _resolve(slots: LayerSlots, ids: torch.Tensor, indices: torch.Tensor, num_experts: int) -> None:
    """Rewrite ``indices``, int32 ``[rows]``: experts with a copy to the copy's row, and padding to the first slot."""
    slots.resolve(ids, indices, indices.new_full((1,), len(indices)), 1)
    indices.masked_fill_(indices < 0, num_experts)


def _compile_without_slots(experts: Any) -> None:
    """Compile the kernels for the experts without slots now. SGLang compiles kernels for a number of groups on the first call
    with it, and warms up with experts and slots. A prefill that streams has only the experts, so it would compile while
    serving."""
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils  # queries the GPU on import, so imported late

    kinds = compile_utils.DeepGemmKernelType
    bf16 = experts.w13_weight.dtype == torch.bfloat16
    kind = kinds.GROUPED_GEMM_NT_BF16_CONTIG if bf16 else kinds.GROUPED_GEMM_NT_F8F8BF16_CONTIG
    for num_experts, n, k in (experts.w13_weight.shape, experts.w2_weight.shape):
        with compile_utils.deep_gemm_execution_hook(1, n, k, num_experts, kind):
            pass  # entering it compiles
