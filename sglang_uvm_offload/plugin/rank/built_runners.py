"""Checks that a built model's MoE runners support what the flags need: expert ids to count, slots, or no TMA loads.

SGLang picks each layer's runner while it builds the model and binds the layer's router to it (``TopK.bind_runner_backend``).
The launcher only knows ``--moe-runner-backend``, which some layers do not follow.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.runtime_context import get_parallel, get_platform, get_server_args

from sglang_uvm_offload.config import AUTO, RequestedConfig, Settings
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.plugin.compat import moe_runner_backend, routing_shown
from sglang_uvm_offload.plugin.launch.ranks import chooses_runners_by_layer
from sglang_uvm_offload.plugin.slots.runners import RUNNER, no_slots_in

logger = logging.getLogger(__name__)

DRAFT_RUNNER = "--speculative-moe-runner-backend"

IN_KERNEL = {"flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4"}
"""Runners whose kernel computes the routing from the router's logits, if it supports the model's routing."""

COUNTED_RUNNERS = {
    "mxfp8": "flashinfer_trtllm_routed or deep_gemm",
    "modelopt_fp4": "flashinfer_trtllm_routed or flashinfer_cutlass",
    "modelopt_mixed": "flashinfer_trtllm_routed or flashinfer_cutlass",
    "nvfp4_online": "flashinfer_trtllm_routed or flashinfer_cutedsl",
    "modelopt_fp8": "triton or flashinfer_cutlass",
    "compressed-tensors": "triton",
    "mxfp4": "triton_kernel or marlin",
}
"""For each quantisation, the runners that SGLang accepts and whose routing can be counted."""
ELSE_COUNTED = "triton or flashinfer_trtllm_routed"


def problems(config: RequestedConfig, module: torch.nn.Module, layers: Sequence[Any], quantization: str | None) -> list[str]:
    """Why the target ``module`` cannot be served. ``layers`` are its ``FusedMoE`` layers on this rank's GPU."""
    return [*_routing(config, module, layers, quantization), *_slots(config, layers), *tma_problems(config, layers, RUNNER)]


def counting_flags(config: Settings) -> dict[str, str]:
    """The flags in ``config`` that need counted routing, each with what to use instead."""
    selection, adapt = flag_name("resident_selection"), flag_name("adapt")
    needs = {}
    if config.resident_selection == "frequency":
        needs[f"{selection} frequency"] = f"{selection} first_n or manual"
    if config.prefetch != "none":
        needs[f"{flag_name('prefetch')} {config.prefetch}"] = "remove it"
    elif config.adapt == "continuous":
        needs[f"{adapt} continuous"] = f"{adapt} off or warmup"
    if config.save_profile is not None:
        needs[f"{config.saving_flag} {str(config.save_profile)!r}"] = "remove it"
    return needs


def doubts(config: Settings, cfg: Any, quantization: str | None) -> list[str]:
    """Warnings, from SGLang's resolved arguments ``cfg``, of what may only show once the model is built."""
    chosen = chooses_runners_by_layer(cfg, quantization) and get_platform().is_blackwell
    runner = "flashinfer_trtllm" if chosen else cfg.moe_runner_backend
    if cfg.device != "cuda" or cfg.moe_a2a_backend != "none" or runner not in IN_KERNEL:
        return []
    ends = ", ".join(_needing_ids(config))
    then = f", and the launch fails because of {ends}" if ends else ""
    counts = f"{_counted(quantization)} can be counted"
    return [f"{RUNNER} {runner} routes most models in its kernel, which leaves no hit rate{then}; {counts}"]


def _routing(config: Settings, module: torch.nn.Module, layers: Sequence[Any], quantization: str | None) -> Iterator[str]:
    exchange = get_moe_a2a_backend()
    if not exchange.is_none():  # tokens are dispatched by expert ids, so the ids are visible
        if any(getattr(layer, "use_w4afp8", False) for layer in layers):  # in ``DeepEPMoE``, which calls no ``apply``
            reason = f"--moe-a2a-backend {exchange.value} computes W4AFP8 experts in its own kernels, which cannot be counted"
            yield from _refused(counting_flags(config), reason, "--moe-a2a-backend none")
        return
    for shown, runner in sorted({routing_shown(router) for router in module.modules() if isinstance(router, TopK)}):
        if shown == "TRITON_KERNEL":
            reason = f"{RUNNER} {runner} exposes the tokens of each expert, not the experts of each token"
            yield from _refused(_traces(config), reason, f"{RUNNER} triton")
        elif shown == "BYPASSED":
            choice = "" if runner == get_server_args().moe_runner_backend else " (SGLang's choice for this model and GPU)"
            reason = f"{RUNNER} {runner}{choice} routes in its kernel and exposes no expert ids"
            yield from _refused(_needing_ids(config), reason, _counted(quantization))


def _counted(quantization: str | None) -> str:
    return f"{RUNNER} {COUNTED_RUNNERS.get(quantization or '', ELSE_COUNTED)}"


def _traces(config: Settings) -> dict[str, str]:
    return {} if config.trace is None else {f"{flag_name('trace')} {str(config.trace)!r}": "remove it"}


def _needing_ids(config: Settings) -> dict[str, str]:
    return counting_flags(config) | _traces(config)


def _refused(flags: Mapping[str, str], reason: str, remedy: str) -> Iterator[str]:
    return (f"{flag}: {reason}; use {remedy}, or {instead}" for flag, instead in flags.items())


def _slots(config: RequestedConfig, layers: Sequence[Any]) -> Iterator[str]:
    reasons = {no_slots_in(layer) for layer in layers}
    if config.slots == 0 or None in reasons:
        return
    for reason in sorted(filter(None, reasons)):
        if config.slots is not None:
            yield f"{flag_name('slots')} {config.slots}: {reason}; remove it"
        elif get_parallel().tp_rank == 0:
            logger.info("%s %s: no slots: %s", flag_name("slots"), AUTO, reason)


def tma_problems(config: Settings, layers: Sequence[Any], runner_flag: str) -> list[str]:
    """Why ``layers`` may use TMA although ``config`` turns it off."""
    backends = [] if config.tma else list(map(moe_runner_backend, layers))
    others = {each.value if each else "auto" for each in backends if not (each and (each.is_triton() or each.is_marlin()))}
    kernels = "may load experts with TMA; only SGLang's Triton and Marlin kernels can do without"
    return [
        f"{flag_name('tma')} off: {runner_flag} {other} {kernels}; use {runner_flag} triton, or remove {flag_name('tma')}"
        for other in sorted(others)
    ]
