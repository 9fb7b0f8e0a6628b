"""Which launches can compute experts from slots: those whose experts SGLang's Triton or Marlin MoE functions compute
(``triton``, ``marlin``), or its DeepGEMM runner in the contiguous layout (``deep_gemm``).

This does not repeat what offloading as a whole refuses (``combinations``), such as two-batch overlap. Single-batch overlap is
allowed: it runs shared experts on a second stream, not routed ones.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_platform

from sglang_uvm_offload.plugin.compat import moe_runner_backend
from sglang_uvm_offload.plugin.launch.routing_formats import RUNNER, resolved_runner
from sglang_uvm_offload.plugin.launch.stated_quantization import stated_quantization

_AS_GROUPS = "takes each expert as a group, by its number, inside its kernels"
_OTHER_KERNELS = "experts use other kernels than SGLang's Triton and Marlin ones"

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

AUTO, TRITON = {"auto"}, {"triton"}
MARLIN = {"marlin", "experimental_sgl_marlin"}
"""``experimental_sgl_marlin`` is another name for ``marlin`` without LoRA adapters."""

ALWAYS_TRITON = {"moe_wna16", "w8a8_int8", "w8a8_fp8", "blockwise_int8", "auto-round-int8"}
"""Quantisations whose experts the Triton runner computes, whatever ``--moe-runner-backend``."""

BY_BLOCKS = {
    **dict.fromkeys([None, "modelopt_fp8"], AUTO | TRITON | MARLIN),
    "fp8": AUTO | TRITON,
    "mxfp4": TRITON | MARLIN,
    **dict.fromkeys(["awq_marlin", "gptq_marlin", "auto-round"], AUTO),
    **dict.fromkeys(["modelopt_fp4", "modelopt_mixed"], AUTO | MARLIN),
    "minimax_m3_nvfp4": MARLIN,
}
"""By quantisation, the values of ``--moe-runner-backend`` for which the Triton or the Marlin runner computes its experts."""

QUANTIZATIONS = {"w4afp8": f"its runner, cutlass, {_AS_GROUPS}"}
"""Why a quantisation has no slots, whatever the runner."""


def no_slots(cfg: Any, model_config: Any) -> str | None:
    """Why a launch with SGLang's resolved arguments ``cfg`` cannot have slots, None if it may. ``no_slots_in`` knows more once
    the layers are built."""
    quantization = cfg.quantization or model_config.quantization
    if cfg.moe_a2a_backend != "none":
        taken = "SGLang's Triton and Marlin runners do not take"
        return f"--moe-a2a-backend {cfg.moe_a2a_backend} passes tokens on in a form that {taken}"
    if cfg.device != "cuda":
        return None
    if quantization in ALWAYS_TRITON:
        return None
    runner = resolved_runner(cfg.moe_runner_backend, quantization)
    if runner not in AUTO | TRITON | MARLIN | {DEEP_GEMM}:
        return _by_runner(runner)
    if cfg.enable_lora and runner not in TRITON:
        return f"with --enable-lora SGLang computes experts from slots by {RUNNER} triton only"
    if getattr(model_config, "is_fp4_experts", False):
        return None if runner in MARLIN else f"the model's FP4 {_OTHER_KERNELS}"
    if runner == DEEP_GEMM:
        return _by_deep_gemm() if quantization is None or _in_blocks(quantization, model_config) else _by_runner(runner)
    if quantization == "compressed-tensors":
        served = _compressed(model_config, runner)
    else:
        served = runner in BY_BLOCKS.get(quantization, set())
    return None if served else f"--quantization {quantization}: {QUANTIZATIONS.get(quantization, f'its {_OTHER_KERNELS}')}"


def other_kernels(cfg: Any, model_config: Any) -> bool:
    """Whether kernels other than SGLang's Triton and Marlin ones may compute the experts of a launch."""
    runner = resolved_runner(cfg.moe_runner_backend, cfg.quantization or model_config.quantization)
    return runner == DEEP_GEMM or no_slots(cfg, model_config) is not None


def _by_runner(runner: str) -> str:
    return f"{RUNNER} {runner} {RUNNERS.get(runner, 'is not known to compute by blocks of tokens')}"


def _by_deep_gemm() -> str | None:
    """Why DeepGEMM computes nothing from slots, None if it does. Decode steps use the masked layout by default."""
    if not get_platform().is_sm90:
        return f"{RUNNER} {DEEP_GEMM} computes from slots on Hopper GPUs only; {RUNNER} triton does here"
    if envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.get().lower() != "compact":
        layout = "computes decode steps in a masked layout, which takes each expert as a group, by its number"
        return f"{RUNNER} {DEEP_GEMM} {layout}; set SGLANG_DEEPGEMM_STANDARD_LAYOUT=compact, or choose {RUNNER} triton"
    return None


def _in_blocks(quantization: str, model_config: Any) -> bool:
    """Whether DeepGEMM reads the experts' scales as they are. With one scale per expert, it gets a new tensor on each call."""
    return quantization == "fp8" and stated_quantization(model_config).get("weight_block_size") == [128, 128]


def _compressed(model_config: Any, runner: str) -> bool:
    """Whether Triton or Marlin computes compressed-tensors experts. Triton computes FP8. Marlin computes integers, and Triton
    those of 4 bits, unless activations are quantised as well. Marlin computes FP4, unless activations are FP4 and the GPU
    supports that."""
    groups = list(stated_quantization(model_config).get("config_groups", {}).values())
    weights = [group.get("weights") or {} for group in groups]
    kinds = {(each.get("type"), each.get("num_bits")) for each in weights}
    activations = any(group.get("input_activations") for group in groups)
    if kinds == {("float", 8)}:
        return runner not in MARLIN
    if kinds == {("float", 4)}:
        return not (activations and get_platform().is_blackwell)
    return bool(kinds) and kinds <= {("int", 4), ("int", 8)} and not activations


def no_slots_in(layer: Any) -> str | None:
    """Why a built MoE layer computes nothing from slots, None if it does."""
    backend = moe_runner_backend(layer)
    if backend is None:
        return f"{type(layer.quant_method).__name__} computes its experts with its own kernels"
    if backend.is_deep_gemm():
        return _by_deep_gemm()
    return None if backend.is_triton() or backend.is_marlin() else _by_runner(backend.value)
