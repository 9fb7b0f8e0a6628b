"""The routing format of a launch: what its MoE runner shows of the router's choices, as far as the launcher can know.

SGLang decides layer by layer, when it binds a router to its runner (``TopK.bind_runner_backend``). A model whose routing the
kernel does not support keeps its ids. This module knows only ``ASKS_FOR_IDS`` of those models; it refuses the others
needlessly, but ``flashinfer_trtllm_routed`` runs the same kernels with ids. ``LayerHooks`` refuses what this module does not
recognise.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import get_platform

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.flags import flag_name

RUNNER = "--moe-runner-backend"

IN_KERNEL = {"flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4"}
"""Runners that route inside their kernel, from the router's logits."""

ASKS_FOR_IDS = {"XllmForCausalLM", "K2HorizonForCausalLM", "KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM"}
"""Architectures whose code passes ids to every runner."""

NVFP4 = {"modelopt_fp4", "modelopt_mixed"}
"""Quantisations for which SGLang resolves ``auto`` layer by layer: Marlin before Blackwell, flashinfer_trtllm on it."""

DEEPEP_LAYER_A2A = {"deepep", "mooncake", "nixl", "mori", "pplx"}
"""All-to-all backends that compute W4AFP8 experts with ``apply_deepep_normal`` or ``apply_deepep_ll``, not ``apply``."""

COUNTED_RUNNERS = {
    "mxfp8": "flashinfer_trtllm_routed or deep_gemm",
    "modelopt_fp4": "flashinfer_trtllm_routed or flashinfer_cutlass",
    "modelopt_mixed": "flashinfer_trtllm_routed or flashinfer_cutlass",
    "nvfp4_online": "flashinfer_trtllm_routed or flashinfer_cutedsl",
    "modelopt_fp8": "triton or flashinfer_cutlass",
    "compressed-tensors": "triton",
    "mxfp4": "triton_kernel or marlin",
}
"""For each quantisation, the runners that SGLang accepts and whose routing is counted."""
_ELSE = "triton or flashinfer_trtllm_routed"


class Shown(enum.Enum):
    """What a runner's input contains of the router's choices."""

    IDS = "expert ids"
    TOKENS_PER_EXPERT = "tokens per expert"
    NOTHING = "nothing"


@dataclass(frozen=True)
class RoutingFormat:
    """What a launch shows of its routing; if not everything, why, and what to choose instead."""

    runner: str
    """SGLang's resolved ``--moe-runner-backend``, or what its layers resolve ``auto`` to."""
    shown: Shown = Shown.IDS
    reason: str = ""
    remedy: str = ""

    @property
    def counted(self) -> bool:
        return self.shown is not Shown.NOTHING

    def problems(self, config: Settings) -> list[str]:
        """Why flags of ``config`` cannot work with this format."""
        needs = {} if self.counted else counting_flags(config)
        if config.trace is not None and self.shown is not Shown.IDS:
            needs[f"{flag_name('trace')} {str(config.trace)!r}"] = "leave it out"
        return [f"{flag}: {self.reason}; choose {self.remedy}, or {instead}" for flag, instead in needs.items()]


def counting_flags(config: Settings) -> dict[str, str]:
    """The flags of ``config`` that need counted routing, each with the alternative without it."""
    selection, adapt = flag_name("resident_selection"), flag_name("adapt")
    needs = {}
    if config.resident_selection == "frequency":
        needs[f"{selection} frequency"] = f"{selection} first_n or manual"
    if config.prefetch != "none":
        needs[f"{flag_name('prefetch')} {config.prefetch}"] = "leave it out"
    elif config.adapt == "continuous":
        needs[f"{adapt} continuous"] = f"{adapt} off or warmup"
    if config.save_profile is not None:
        needs[f"{config.saving_flag} {str(config.save_profile)!r}"] = "leave it out"
    return needs


def routing_format(cfg: Any, model_config: Any, given_runner: str = "auto") -> RoutingFormat:
    """The format of a launch with the resolved arguments ``cfg``. ``given_runner``: the user's ``--moe-runner-backend``."""
    quantization = cfg.quantization or model_config.quantization
    runner = resolved_runner(cfg.moe_runner_backend, quantization)
    if cfg.device != "cuda":  # torch computes the routing, whatever the runner
        return RoutingFormat(runner)
    if quantization == "w4afp8" and cfg.moe_a2a_backend in DEEPEP_LAYER_A2A:
        reason = f"--moe-a2a-backend {cfg.moe_a2a_backend} computes W4AFP8 experts with its own kernels, which are not counted"
        return RoutingFormat(runner, Shown.NOTHING, reason, "--moe-a2a-backend none")
    if cfg.moe_a2a_backend != "none":  # exchanges tokens by their experts' ids
        return RoutingFormat(runner)
    if runner == "triton_kernel":
        reason = f"{RUNNER} triton_kernel shows the tokens of each expert, not the experts of each token"
        return RoutingFormat(runner, Shown.TOKENS_PER_EXPERT, reason, f"{RUNNER} triton")
    if _routes_in_kernel(runner, model_config):
        choice = "" if runner == given_runner else " (SGLang's choice for this model and GPU)"
        reason = f"{RUNNER} {runner}{choice} routes in its kernel and shows no expert ids"
        return RoutingFormat(runner, Shown.NOTHING, reason, f"{RUNNER} {COUNTED_RUNNERS.get(quantization, _ELSE)}")
    return RoutingFormat(runner)


def resolved_runner(resolved: str, quantization: str | None) -> str:
    """``--moe-runner-backend``, or what layers resolve ``auto`` to, as far as it is known before they are built."""
    if resolved == "auto" and quantization in NVFP4 and get_platform().is_blackwell:
        return "flashinfer_trtllm"
    return resolved


def _routes_in_kernel(runner: str, model_config: Any) -> bool:
    if runner not in IN_KERNEL or ASKS_FOR_IDS & set(model_config.hf_config.architectures or ()):
        return False
    # For FP4 experts in an FP8 checkpoint this runner takes ids.
    return not (runner == "flashinfer_mxfp4" and getattr(model_config, "is_fp4_experts", False))
