"""SGLang's Triton MoE function with bf16 experts, and with FP8 experts (a scale per 128 x 128 block)."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from benchmarks.gpu.moe_function import (
    FP8_BLOCK,
    Find,
    Fp8Experts,
    MoeShape,
    OnTokens,
    Sizes,
    Tensors,
    installed,
    runner_config,
    without_server,
)

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.slots.triton import TritonSlotSeam


class SglangTriton(OnTokens):
    """SGLang's ``fused_experts`` with the plugin's hooks, as a server without tensor parallelism calls it, at one batch
    size."""

    kernels: ClassVar[str] = "SGLang's Triton kernels"
    needs: ClassVar[tuple[str, ...]] = ("sglang",)
    block: ClassVar[int] = 16
    how: ClassVar[dict[str, Any]] = {}

    def __init__(self, shape: MoeShape, tokens: int, find: Find, device: str = "cuda"):
        super().__init__(shape, tokens, find, device)
        self._config = runner_config(shape)

    @staticmethod
    def sizes(shape: MoeShape) -> Sizes:
        return {f"{matrix}_weight": (size, torch.bfloat16) for matrix, size in shape.matrices.items()}

    @classmethod
    def weights(cls, shape: MoeShape, device: str = "cuda") -> Tensors:
        """Returns values that keep outputs near one."""
        random, made = torch.Generator(device).manual_seed(1), {}
        for matrix, (n, k) in shape.matrices.items():
            values = torch.empty(shape.experts, n, k, device=device).normal_(generator=random)
            made[f"{matrix}_weight"] = (values / k**0.5).bfloat16()
        return made

    def run(self, weights: Tensors) -> None:
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        installed_seam().find = self._find
        scales = {f"w{1 + i}_scale": weights[name] for i, name in enumerate(("w13_scale", "w2_scale")) if name in weights}
        topk = StandardTopKOutput(self._factors, self._ids, None)
        w13, w2 = weights["w13_weight"], weights["w2_weight"]
        self._out = fused_moe.fused_experts(self._x, w13, w2, topk, self._config, **self.how, **scales)


class SglangTritonFp8(Fp8Experts, SglangTriton):
    how: ClassVar[dict[str, Any]] = {"use_fp8_w8a8": True, "block_shape": [FP8_BLOCK, FP8_BLOCK]}


@functools.cache
def installed_seam() -> TritonSlotSeam:
    """Installs the plugin's hooks on SGLang's functions, and replaces what these need of a server."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    from sglang_uvm_offload.plugin.slots.triton import TritonSlotSeam

    settings = SimpleNamespace(
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    for module in (fused_moe, fused_moe_triton_config):
        without_server(module, settings)
    return installed(TritonSlotSeam())
