"""SGLang's Marlin MoE function over MXFP4 experts.

MXFP4, because SGLang's kernels add nothing atomically there: the outputs of a call do not vary from run to run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from benchmarks.gpu.moe import Tiles
from benchmarks.gpu.shapes import MoeShape
from benchmarks.gpu.slot_function import MoeFunction, RowsRead, Tensors, function_here, matrices, random_bytes
from benchmarks.gpu.slot_moe import Find

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.slots.marlin import MarlinSlotSeam

NAMES = tuple(f"{matrix}_weight{what}" for what in ("", "_scale", "_bias") for matrix in ("w13", "w2"))
GROUP = 32
"""Values that share a scale."""


class SglangMarlin:
    """SGLang's ``fused_marlin_moe`` with the plugin's hooks, at one batch size."""

    kernels: ClassVar[str] = "SGLang's Marlin kernels"

    def __init__(self, shape: MoeShape, tokens: int, find: Find, device: str = "cuda"):
        from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

        self._find = find
        self._ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32, device=device)
        self._factors = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device=device)
        self._logits = torch.zeros(tokens, shape.experts, device=device)
        self._workspace = marlin_make_workspace(torch.device(device), 4)
        random = torch.Generator(device).manual_seed(tokens)
        self._x = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device=device).normal_(generator=random)

    @staticmethod
    def weights(shape: MoeShape, device: str = "cuda") -> Tensors:
        """Of a checkpoint's format, repacked by SGLang. Scales keep outputs near one."""
        from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

        random, module = np.random.default_rng(1), torch.nn.Module()
        for matrix, (n, k) in matrices(shape).items():
            values = random.integers(0, 256, (shape.experts, n, k // 2), "uint8")
            scales = random.integers(118, 122, (shape.experts, n, k // GROUP), "uint8")
            bias = random.standard_normal((shape.experts, n), "float32")
            made = (values, scales, bias)
            for name, array in zip((f"{matrix}_weight{what}" for what in ("", "_scale", "_bias")), made, strict=True):
                tensor = torch.from_numpy(array).to(device)
                typed = tensor.bfloat16() if array is bias else tensor
                setattr(module, name, torch.nn.Parameter(typed, requires_grad=False))
        prepare_moe_mxfp4_layer_for_marlin(module)
        return {name: getattr(module, name).data for name in NAMES}

    def route(self, ids: np.ndarray) -> None:
        self._ids.copy_(torch.from_numpy(ids))

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

    def result(self, weights: Tensors) -> torch.Tensor:
        return self._out.clone()


@functools.cache
def installed_seam() -> MarlinSlotSeam:
    """The plugin's hooks on SGLang's functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_uvm_offload.plugin.slots.marlin import MarlinSlotSeam

    seam = MarlinSlotSeam()
    seam.install(HookRegistry.register)
    HookRegistry.apply_hooks()
    return seam


class MarlinRowsRead(RowsRead):
    """The rows of its tensors, whose shapes are those that SGLang's repacking leaves."""

    block = Tiles().m

    @staticmethod
    def weights(shape: MoeShape, device: str = "cuda") -> Tensors:
        random, made = np.random.default_rng(1), {}
        for matrix, (n, k) in matrices(shape).items():
            sizes = {"": (k // 16, 2 * n, torch.int32), "_scale": (k // GROUP, n, torch.float8_e8m0fnu)}
            for what, (high, wide, dtype) in (sizes | {"_bias": (1, n, torch.bfloat16)}).items():
                made[f"{matrix}_weight{what}"] = random_bytes(random, (shape.experts, high, wide), dtype, device)
        return {name: made[name] for name in NAMES}


def marlin_here() -> type[MoeFunction]:
    return function_here(SglangMarlin, MarlinRowsRead, "sglang", "sgl_kernel")
