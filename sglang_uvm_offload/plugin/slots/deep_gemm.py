"""A hook on SGLang's DeepGEMM runner that computes an expert from its copy in a slot.

In the contiguous layout, ``m_indices`` holds the expert of each row, and both GEMMs share it. The hook rewrites it before the
first GEMM. It passes both GEMMs the weights and scales of all rows, experts and slots, because TMA descriptors check bounds.
The masked layout indexes groups of rows by expert number, so it is computed in place. The hook relies on these properties of
DeepGEMM's Hopper kernels, taken from their source (``scheduler/gemm.cuh``, ``sm90_fp8_gemm_1d2d.cuh``,
``sm90_bf16_gemm.cuh``); the FP8 ones were tried on an H200 (GPU_STATUS.md):

- A block of rows belongs to the expert of its first row. TMA reads its weights from row ``expert * N``. Scales of 128 x 128 are
  read at base + expert * stride without a bounds check.
- A block without an expert (-1) is not computed, but its weights are still read: those of expert 0, which may be in host RAM.
  SGLang pads each step to the number of blocks of the worst-case routing. Here the padding points to the first slot, which is
  in VRAM. SGLang discards the padding's output, and rows are independent.
- The number of groups is part of a compiled kernel's name, but does not affect the kernel in this layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.memory.slots import BlockLists
from sglang_uvm_offload.plugin.slots.seam import Seam
from sglang_uvm_offload.streaming.model_slots import LayerSlots

_BLOCK_ROWS = 128
"""Rows per block in the contiguous layout; a block belongs to one expert."""
_RUN = "sglang.srt.layers.moe.moe_runner.deep_gemm.DeepGemmRunnerCore.run"


class DeepGemmSlotSeam(Seam):
    """The DeepGEMM hook. ``by_expert`` are fields of SGLang's ``DeepGemmMoeQuantInfo``."""

    by_expert = ("w13_weight", "w2_weight", "w13_scale", "w2_scale")

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(_RUN, self.around_run, HookType.AROUND)

    def around_run(
        self, original: Callable[..., Any], core: Any, rows: Any, experts: Any, state: dict[str, Any], **kwargs: Any
    ) -> Any:
        """``rows`` is SGLang's ``DeepGemmRunnerInput`` and ``experts`` its ``DeepGemmMoeQuantInfo``."""
        slots = None if rows.use_masked_gemm else self.serving(experts.w13_weight, vars(experts))
        if slots is not None:
            with_slots = dataclasses.replace(experts, **self._all_rows(slots, experts))
            _compile(experts, with_slots)
            _resolve(slots, state["topk_ids"], rows.m_indices)
            experts = with_slots
        return original(core, rows, experts, state, **kwargs)

    def _all_rows(self, slots: LayerSlots, experts: Any) -> dict[str, torch.Tensor]:
        """The tensors of ``experts``, extended by the slot rows."""
        tensors = {name: getattr(experts, name) for name in self.by_expert}
        return {name: slots.all_rows(tensor) for name, tensor in tensors.items() if tensor is not None}


def _resolve(slots: LayerSlots, ids: torch.Tensor, indices: torch.Tensor) -> None:
    """Rewrite ``indices`` (int32 ``[rows]``): experts with a copy become the copy's row, padding becomes the first slot."""
    slots.resolve(ids, BlockLists(indices, indices.new_full((1,), len(indices)), 1, read_rows=_BLOCK_ROWS))
    indices.masked_fill_(indices < 0, slots.first_slot)


def _compile(experts: Any, with_slots: Any) -> None:
    """Compile the kernels now, both for the experts alone and for all rows. SGLang compiles on the first call with a number of
    groups. A prefill through stream buffers uses only the experts, so it would compile while serving."""
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils  # imported late, because importing it queries the GPU

    kinds = compile_utils.DeepGemmKernelType
    bf16 = experts.w13_weight.dtype == torch.bfloat16
    kind = kinds.GROUPED_GEMM_NT_BF16_CONTIG if bf16 else kinds.GROUPED_GEMM_NT_F8F8BF16_CONTIG
    for name in ("w13", "w2"):
        (num_experts, n, k), rows = getattr(experts, f"{name}_weight").shape, getattr(with_slots, f"{name}_weight")
        with compile_utils.deep_gemm_execution_hook(1, n, k, num_experts, kind):
            pass  # entering it compiles
        with (
            _warming_up_with(compile_utils._BaseWarmupExecutor, rows, getattr(with_slots, f"{name}_scale")),
            compile_utils.deep_gemm_execution_hook(1, n, k, len(rows), kind),
        ):
            pass


@contextmanager
def _warming_up_with(executor: Any, weights: torch.Tensor, scales: torch.Tensor | None) -> Iterator[None]:
    """Stop SGLang's kernel warm-up from allocating weights for all groups, here those of the whole model. It allocates one
    group instead, which the layer's own rows replace."""
    own = {name: vars(executor)[name] for name in ("create", "get_memory_requirement")}
    create, needed = executor.create, executor.get_memory_requirement

    def created(kind: Any, **sizes: int) -> Any:
        made = create(kind, **sizes | {"num_groups": 1})
        vars(made).update({name: value for name, value in _right_hand_side(weights, scales).items() if name in vars(made)})
        return made

    executor.create = staticmethod(created)
    executor.get_memory_requirement = staticmethod(lambda kind, **sizes: needed(kind, **sizes | {"num_groups": 1}))
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(executor, name, value)


def _right_hand_side(weights: torch.Tensor, scales: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """The weights and scales under the names that SGLang's warm-up uses for BF16 and FP8."""
    return {"b": weights, "rhs_q": weights, "rhs_s": scales}
