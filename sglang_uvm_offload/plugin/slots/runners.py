"""Which layers can compute experts from slots: those whose experts SGLang's Triton or Marlin MoE functions compute (``triton``,
``marlin``), or its DeepGEMM runner in the contiguous layout (``deep_gemm``).

This does not repeat what offloading as a whole refuses (``combinations``), such as two-batch overlap. Single-batch overlap is
allowed: it runs shared experts on a second stream, not routed ones.
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

_AS_GROUPS = "takes each expert as a group, by its number, inside its kernels"

DEEP_GEMM = "deep_gemm"

RUNNERS = {
    "triton_kernel": "keeps experts interleaved, not one after the other",
    "humming": "does not compute from slots yet",
    DEEP_GEMM: "computes from slots only BF16 experts, and FP8 ones with a scale for each block of 128 x 128",
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
"""Why a runner has no slots, or has none for experts outside ``_by_deep_gemm``."""


def no_slots_in(layer: Any) -> str | None:
    """Why a built MoE layer computes nothing from slots, None if it does."""
    exchange, backend = get_moe_a2a_backend(), moe_runner_backend(layer)
    if not exchange.is_none():
        taken = "SGLang's Triton and Marlin runners do not take"
        return f"--moe-a2a-backend {exchange.value} passes tokens on in a form that {taken}"
    if backend is None:
        return f"{type(layer.quant_method).__name__} computes its experts with its own kernels"
    if backend.is_triton():
        return None
    if get_lora().enable_lora:
        return f"with --enable-lora SGLang computes experts from slots by {RUNNER} triton only"
    if backend.is_deep_gemm():
        return _by_deep_gemm(layer.quant_method)
    return None if backend.is_marlin() else _by_runner(backend.value)


def pads_with_first(layer: Any) -> bool:
    """Whether a built MoE layer computes rows of padding that read its first expert, unless a slot is read (``deep_gemm``)."""
    backend = moe_runner_backend(layer)
    return backend is not None and bool(backend.is_deep_gemm())


def _by_runner(runner: str) -> str:
    return f"{RUNNER} {runner} {RUNNERS.get(runner, 'is not known to compute by blocks of tokens')}"


def _by_deep_gemm(method: Any) -> str | None:
    """Why DeepGEMM computes nothing from slots, None if it does. Decode steps use the masked layout by default. With one scale
    per expert, it gets a new tensor of scales on each call."""
    in_blocks = isinstance(method, Fp8MoEMethod) and method.quant_config.weight_block_size == [128, 128]
    if not (in_blocks or isinstance(method, UnquantizedFusedMoEMethod)):
        return _by_runner(DEEP_GEMM)
    if not get_platform().is_sm90:
        return f"{RUNNER} {DEEP_GEMM} computes from slots on Hopper GPUs only; {RUNNER} triton does here"
    if envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.get().lower() != "compact":
        layout = "computes decode steps in a masked layout, which takes each expert as a group, by its number"
        return f"{RUNNER} {DEEP_GEMM} {layout}; set SGLANG_DEEPGEMM_STANDARD_LAYOUT=compact, or choose {RUNNER} triton"
    return None
