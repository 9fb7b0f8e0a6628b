"""SGLang's DeepGEMM MoE runner with FP8 experts (a scale per 128 x 128 block)."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.gpu.moe_function import (
    FP8_BLOCK,
    Find,
    Fp8Experts,
    MoeShape,
    OnTokens,
    Tensors,
    installed,
    runner_config,
    without_server,
)

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam

os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # compile only what a step needs; SGLang reads this at import
CONTIGUOUS, MASKED = LAYOUTS = ("compact", "masked")
"""SGLang's names for the layouts of a step's rows."""


class SglangDeepGemm(Fp8Experts, OnTokens):
    """SGLang's runner with the plugin's hook, as a server without tensor parallelism calls it, at one batch size."""

    kernels: ClassVar[str] = "DeepGEMM's kernels"
    needs: ClassVar[tuple[str, ...]] = ("sglang", "sgl_kernel", "deep_gemm")
    block: ClassVar[int] = 1
    layout: ClassVar[str] = CONTIGUOUS

    def __init__(self, shape: MoeShape, tokens: int, find: Find, device: str = "cuda"):
        from sglang.srt.layers.moe import MoeRunner
        from sglang.srt.layers.moe.utils import MoeRunnerBackend

        installed_seam()
        super().__init__(shape, tokens, find, device)
        self._runner = MoeRunner(MoeRunnerBackend.DEEP_GEMM, runner_config(shape))

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


class MaskedDeepGemm(SglangDeepGemm):
    """The masked layout: each expert has a group of rows, by its id."""

    layout = MASKED


@functools.cache
def installed_seam() -> DeepGemmSlotSeam:
    """Installs the plugin's hook on SGLang's runner, and replaces what the runner needs of a server."""
    from sglang.srt.layers.moe.moe_runner import deep_gemm

    from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam

    without_server(deep_gemm, SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False)))
    return installed(DeepGemmSlotSeam())
