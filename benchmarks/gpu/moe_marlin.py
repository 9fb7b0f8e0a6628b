"""SGLang's Marlin MoE function with MXFP4 experts.

It uses MXFP4 because SGLang's kernels use no atomic adds there, so outputs do not vary from run to run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from benchmarks.gpu.moe_function import Find, MoeShape, OnTokens, Sizes, Tensors, installed

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.slots.marlin import MarlinSlotSeam

GROUP = 32
"""Values per scale."""


class SglangMarlin(OnTokens):
    """SGLang's ``fused_marlin_moe`` with the plugin's hooks, at one batch size."""

    kernels: ClassVar[str] = "SGLang's Marlin kernels"
    needs: ClassVar[tuple[str, ...]] = ("sglang", "sgl_kernel")
    block: ClassVar[int] = 16

    def __init__(self, shape: MoeShape, tokens: int, find: Find, device: str = "cuda"):
        from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

        super().__init__(shape, tokens, find, device)
        self._logits = torch.zeros(tokens, shape.experts, device=device)
        self._workspace = marlin_make_workspace(torch.device(device), 4)

    @staticmethod
    def sizes(shape: MoeShape) -> Sizes:
        made: Sizes = {}
        for matrix, (n, k) in shape.matrices.items():
            made[f"{matrix}_weight"] = ((k // 16, 2 * n), torch.int32)
            made[f"{matrix}_weight_scale"] = ((k // GROUP, n), torch.float8_e8m0fnu)
            made[f"{matrix}_weight_bias"] = ((1, n), torch.bfloat16)
        return made

    @classmethod
    def weights(cls, shape: MoeShape, device: str = "cuda") -> Tensors:
        """Returns weights in a checkpoint's format, repacked by SGLang. Scales keep outputs near one."""
        from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

        random, module = np.random.default_rng(1), torch.nn.Module()
        for matrix, (n, k) in shape.matrices.items():
            made = {
                "": torch.from_numpy(random.integers(0, 256, (shape.experts, n, k // 2), "uint8")),
                "_scale": torch.from_numpy(random.integers(118, 122, (shape.experts, n, k // GROUP), "uint8")),
                "_bias": torch.from_numpy(random.standard_normal((shape.experts, n), "float32")).bfloat16(),
            }
            for what, tensor in made.items():
                setattr(module, f"{matrix}_weight{what}", torch.nn.Parameter(tensor.to(device), requires_grad=False))
        prepare_moe_mxfp4_layer_for_marlin(module)
        return {name: getattr(module, name).data for name in cls.sizes(shape)}

    def run(self, weights: Tensors) -> None:
        from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe

        installed_seam().find = self._find
        self._out = fused_marlin_moe.fused_marlin_moe(
            self._x,
            weights["w13_weight"],
            weights["w2_weight"],
            weights["w13_weight_scale"],
            weights["w2_weight_scale"],
            self._logits,
            self._factors,
            self._ids,
            w1_bias=weights["w13_weight_bias"],
            w2_bias=weights["w2_weight_bias"],
            workspace=self._workspace,
            num_bits=4,
        )


@functools.cache
def installed_seam() -> MarlinSlotSeam:
    """Installs the plugin's hooks on SGLang's functions."""
    from sglang_uvm_offload.plugin.slots.marlin import MarlinSlotSeam

    return installed(MarlinSlotSeam())
