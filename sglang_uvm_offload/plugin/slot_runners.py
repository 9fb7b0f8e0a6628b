"""Which launches can compute experts from slots: those whose experts SGLang's Triton MoE functions compute (``slot_seam``).

What is refused with offloading as a whole (``combinations``) is not repeated here: LoRA, EPLB, torch.compile and two-batch
overlap among it. Single-batch overlap is no reason: it has shared experts on a second stream, not routed ones.
"""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.plugin.routing_formats import RUNNER, resolved_runner

_AS_GROUPS = "takes each expert as a group, by its number, inside its kernels"
_NOT_YET = "does not compute from slots yet"

RUNNERS = {
    "triton_kernel": "keeps experts interleaved, not one behind the other",
    "marlin": _NOT_YET,
    "humming": _NOT_YET,
    "deep_gemm": _NOT_YET,
    "experimental_sgl_marlin": _NOT_YET,
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
"""Why a runner has no slots."""

ALWAYS_TRITON = {"moe_wna16", "w8a8_int8", "w8a8_fp8", "blockwise_int8", "auto-round-int8"}
"""Quantisations whose experts the Triton runner computes, whatever ``--moe-runner-backend``."""

TRITON = {None, "fp8", "modelopt_fp8"}
"""Quantisations whose experts it computes by ``auto`` and by ``triton``."""

QUANTIZATIONS = {
    **dict.fromkeys(["awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round"], f"its runner, marlin, {_NOT_YET}"),
    **dict.fromkeys(["modelopt_fp4", "modelopt_mixed"], f"its runner, marlin, {_NOT_YET}"),
    "w4afp8": f"its runner, cutlass, {_AS_GROUPS}",
    "bitsandbytes": "its experts are dequantized for each step, and computed from that",
}
"""Why a quantisation has no slots, whatever the runner."""


def no_slots(cfg: Any, model_config: Any) -> str | None:
    """Why a launch with SGLang's resolved arguments ``cfg`` has no slots, None if it may have some. ``no_slots_in`` knows more
    once the layers are built."""
    quantization = cfg.quantization or model_config.quantization
    if cfg.moe_a2a_backend != "none":
        return f"--moe-a2a-backend {cfg.moe_a2a_backend} hands tokens over in a form that SGLang's Triton runner does not take"
    if cfg.device != "cuda":
        return None
    if quantization in ALWAYS_TRITON:
        return None
    runner = resolved_runner(cfg.moe_runner_backend, quantization)
    if runner not in ("auto", "triton"):
        return _by_runner(runner)
    if getattr(model_config, "is_fp4_experts", False):
        return "the model's FP4 experts are computed by other kernels than SGLang's Triton ones"
    if quantization == "compressed-tensors":
        return _compressed(model_config, runner)
    if quantization in TRITON or (quantization == "mxfp4" and runner == "triton"):
        return None
    reason = QUANTIZATIONS.get(quantization, "its experts are computed by other kernels than SGLang's Triton ones")
    return f"--quantization {quantization}: {reason}"


def _by_runner(runner: str) -> str:
    return f"{RUNNER} {runner} {RUNNERS.get(runner, 'is not known to compute by blocks of tokens')}"


def _compressed(model_config: Any, runner: str) -> str | None:
    """FP8 is Triton's; 4-bit integers are where the runner is asked for."""
    stated = getattr(model_config.hf_config, "quantization_config", None) or {}
    weights = [group.get("weights") or {} for group in stated.get("config_groups", {}).values()]
    kinds = {(each.get("type"), each.get("num_bits")) for each in weights}
    if kinds == {("float", 8)} or (kinds == {("int", 4)} and runner == "triton"):
        return None
    if kinds and kinds <= {("int", 4), ("int", 8)}:
        return f"--quantization compressed-tensors: its runner for integers, marlin, {_NOT_YET}"
    return "--quantization compressed-tensors: its experts are computed by other kernels than SGLang's Triton ones"


def no_slots_in(layer: Any) -> str | None:
    """Why a MoE layer that is built and loaded computes nothing from slots, None if it does."""
    backend = layer.quant_method.get_moe_runner_backend(layer)
    if backend is None:
        return f"{type(layer.quant_method).__name__} computes its experts by kernels of its own"
    return None if backend.is_triton() else _by_runner(backend.value)
