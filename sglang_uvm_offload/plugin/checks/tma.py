"""``tma`` off: whether this launch's kernels can do without TMA."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.plugin.launch.routing_formats import RUNNER
from sglang_uvm_offload.plugin.slots.runners import DEEP_GEMM, other_kernels

_DRAFTS = "--speculative-moe-runner-backend"


def problems(requested: RequestedConfig, cfg: Any, model_config: Any) -> list[str]:
    """Why SGLang's resolved arguments ``cfg`` cannot be served without TMA, where ``requested`` asks for that."""
    if requested.tma:
        return []
    named = []
    if other_kernels(cfg, model_config):
        named.append(f"{RUNNER} {cfg.moe_runner_backend}")
    if requested.draft_num_resident is not None and cfg.speculative_moe_runner_backend == DEEP_GEMM:
        named.append(f"{_DRAFTS} {DEEP_GEMM}")
    kernels = "has kernels that may load experts by TMA, and only SGLang's Triton and Marlin ones are known to do without"
    return [
        f"{flag_name('tma')} off: {name} {kernels}; choose {name.split()[0]} triton, or leave {flag_name('tma')} out"
        for name in named
    ]
