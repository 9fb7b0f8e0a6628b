"""Which layers can compute experts from slots: those that run SGLang's Triton or Marlin MoE functions (``triton``, ``marlin``)
or its DeepGEMM runner in the contiguous layout (``deep_gemm``).

Settings that offloading refuses altogether (``combinations``), such as two-batch overlap, are not repeated here. Single-batch
overlap is allowed: it runs shared experts on a second stream, not routed ones.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_lora, get_platform

from sglang_uvm_offload.plugin.compat import moe_runner_backend

RUNNER = "--moe-runner-backend"

_AS_GROUPS = "indexes experts by number inside its kernels"

DEEP_GEMM = "deep_gemm"

RUNNERS = {
    "triton_kernel": "interleaves experts instead of storing one after the other",
    "humming": "does not support slots yet",
    DEEP_GEMM: "supports slots only for BF16 experts, and for FP8 ones with 128 x 128 scale blocks",
    **dict.fromkeys(
        [
            "cutlass",
            "flashinfer_cutlass",
            "flashinfer_cutedsl",
            "flashinfer_trtllm",
            "flashinfer_trtllm_routed",
            "flashinfer_mxfp4",
            "flashinfer_megamoe",
            "experimental_sgl_trtllm",
            "hpc_ops",
        ],
        _AS_GROUPS,
    ),
    **dict.fromkeys(["lora_triton", "lora_marlin", "lora_cutedsl"], "computes experts together with LoRA adapters"),
}
"""Why a runner does not support slots; for DeepGEMM, why it does not for experts that ``_by_deep_gemm`` refuses."""


def no_slots_in(layer: Any) -> str | None:
    """Why a built MoE layer cannot compute from slots, None if it can."""
    exchange, backend = get_moe_a2a_backend(), moe_runner_backend(layer)
    if not exchange.is_none():
        taken = "SGLang's Triton and Marlin runners do not support"
        return f"--moe-a2a-backend {exchange.value} dispatches tokens in a format that {taken}"
    if backend is None:
        return f"{type(layer.quant_method).__name__} computes its experts in its own kernels"
    if backend.is_triton():
        return None
    if get_lora().enable_lora:
        return f"with --enable-lora, only {RUNNER} triton supports slots"
    if backend.is_deep_gemm():
        return _by_deep_gemm(layer.quant_method)
    return None if backend.is_marlin() else _by_runner(backend.value)


def pads_with_first(layer: Any) -> bool:
    """Whether padding rows of a built MoE layer read its first expert, unless they read a slot (``deep_gemm``)."""
    backend = moe_runner_backend(layer)
    return backend is not None and bool(backend.is_deep_gemm())


def _by_runner(runner: str) -> str:
    return f"{RUNNER} {runner} {RUNNERS.get(runner, 'is not known to compute blocks of tokens per expert')}"


def _by_deep_gemm(method: Any) -> str | None:
    """Why DeepGEMM cannot compute from slots, None if it can. Decode steps use the masked layout by default. With one scale per
    expert, DeepGEMM gets a new tensor of scales on each call."""
    in_blocks = isinstance(method, Fp8MoEMethod) and method.quant_config.weight_block_size == [128, 128]
    if not (in_blocks or isinstance(method, UnquantizedFusedMoEMethod)):
        return _by_runner(DEEP_GEMM)
    if not get_platform().is_sm90:
        return f"{RUNNER} {DEEP_GEMM} supports slots only on Hopper GPUs; use {RUNNER} triton"
    if envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.get().lower() != "compact":
        layout = "computes decode steps in a masked layout, which indexes experts by number"
        return f"{RUNNER} {DEEP_GEMM} {layout}; set SGLANG_DEEPGEMM_STANDARD_LAYOUT=compact, or use {RUNNER} triton"
    return None
