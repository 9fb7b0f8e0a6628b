"""SGLang's DeepGEMM MoE runner over experts in FP8 with a scale for each 128 x 128."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from benchmarks.gpu.shapes import FP8_BLOCK, MoeShape
from benchmarks.gpu.slot_function import MoeFunction, RowsRead, Tensors, function_here, matrices, random_bytes
from benchmarks.gpu.slot_moe import Find, without_server

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam

os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # only what a step needs; SGLang reads it as it is imported
NAMES = ("w13_weight", "w2_weight", "w13_scale", "w2_scale")
CONTIGUOUS, MASKED = LAYOUTS = ("compact", "masked")
"""How SGLang lays out the rows of a step, by its own words."""


class SglangDeepGemm:
    """SGLang's runner with the plugin's hook, as a server without tensor parallelism calls it, at one batch size."""

    kernels: ClassVar[str] = "DeepGEMM's kernels"
    layout: ClassVar[str] = CONTIGUOUS

    def __init__(self, shape: MoeShape, tokens: int, find: Find, device: str = "cuda"):
        from sglang.srt.layers.moe import MoeRunner, MoeRunnerConfig
        from sglang.srt.layers.moe.utils import MoeRunnerBackend

        installed_seam()
        config = MoeRunnerConfig(
            num_experts=shape.experts,
            num_local_experts=shape.experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden,
            intermediate_size_per_partition=shape.intermediate,
            inplace=False,
        )
        self._runner, self._find = MoeRunner(MoeRunnerBackend.DEEP_GEMM, config), find
        self._ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32, device=device)
        self._factors = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device=device)
        random = torch.Generator(device).manual_seed(tokens)
        self._x = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device=device).normal_(generator=random)

    @staticmethod
    def weights(shape: MoeShape, device: str = "cuda") -> Tensors:
        """The bytes are finite numbers, and scales keep outputs near one."""
        random, made = np.random.default_rng(1), {}
        for matrix, (n, k) in matrices(shape).items():
            values = random.standard_normal((shape.experts, n, k), "float32")
            made[f"{matrix}_weight"] = torch.from_numpy(values).to(device).to(torch.float8_e4m3fn)
            scales = random.uniform(0.5, 1, (shape.experts, n // FP8_BLOCK, k // FP8_BLOCK)).astype("float32") / k**0.5
            made[f"{matrix}_scale"] = torch.from_numpy(scales).to(device)
        return {name: made[name] for name in NAMES}

    def route(self, ids: np.ndarray) -> None:
        self._ids.copy_(torch.from_numpy(ids))

    def run(self, weights: Tensors) -> None:
        from sglang.srt.environ import envs
        from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        installed_seam().find = self._find
        given: dict[str, Any] = {"use_fp8": True, "block_shape": [FP8_BLOCK, FP8_BLOCK], **weights}
        topk = StandardTopKOutput(self._factors, self._ids, None)
        with envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.override(self.layout):
            dispatched = StandardDispatchOutput(self._x, None, topk)
            self._out = self._runner.run(dispatched, DeepGemmMoeQuantInfo(**given)).hidden_states

    def result(self, weights: Tensors) -> torch.Tensor:
        return self._out.clone()


class MaskedDeepGemm(SglangDeepGemm):
    """Each expert is a group of rows, by its number."""

    layout = MASKED


@functools.cache
def installed_seam() -> DeepGemmSlotSeam:
    """The plugin's hook on SGLang's runner, and what this asks of a server that does not run here."""
    from sglang.srt.layers.moe.moe_runner import deep_gemm
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam

    without_server(deep_gemm, SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False)))
    seam = DeepGemmSlotSeam()
    seam.install(HookRegistry.register)
    HookRegistry.apply_hooks()
    return seam


class DeepGemmRowsRead(RowsRead):
    """The rows of its tensors, in either layout."""

    block = 1

    @staticmethod
    def weights(shape: MoeShape, device: str = "cuda") -> Tensors:
        random, made = np.random.default_rng(1), {}
        for matrix, (n, k) in matrices(shape).items():
            made[f"{matrix}_weight"] = random_bytes(random, (shape.experts, n, k), torch.float8_e4m3fn, device)
            blocks = (shape.experts, n // FP8_BLOCK, k // FP8_BLOCK)
            made[f"{matrix}_scale"] = random_bytes(random, blocks, torch.float32, device)
        return {name: made[name] for name in NAMES}


def deep_gemm_here() -> dict[str, type[MoeFunction]]:
    """By layout."""
    real = dict(zip(LAYOUTS, (SglangDeepGemm, MaskedDeepGemm), strict=True))
    return {name: function_here(each, DeepGemmRowsRead, "sglang", "sgl_kernel", "deep_gemm") for name, each in real.items()}
