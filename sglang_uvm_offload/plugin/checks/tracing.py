"""Which launches can record a trace of their routing."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import flag_name

_FLAG = flag_name("trace")


def problems(config: RequestedConfig, cfg: Any) -> list[str]:
    """Why ``cfg`` (SGLang's resolved arguments) cannot be served with a trace."""
    if config.trace is None:
        return []
    parts = "no rank sees the routing of whole steps"
    refused = {
        f"--ep-size {cfg.ep_size}": (cfg.ep_size > 1, parts),
        f"--pp-size {cfg.pp_size}": (cfg.pp_size > 1, parts),
        "--enable-dp-attention / --attn-dp-size": (cfg.attn_dp_size > 1, parts),
        f"--moe-a2a-backend {cfg.moe_a2a_backend}": (cfg.moe_a2a_backend != "none", parts),
        f"--attn-cp-size {cfg.attn_cp_size}": (cfg.attn_cp_size > 1, parts),
        f"--moe-dp-size {cfg.moe_dp_size}": (cfg.moe_dp_size > 1, parts),
        f"--speculative-algorithm {cfg.speculative_algorithm}": (
            cfg.speculative_algorithm,
            "its steps verify several draft tokens per request and reject some",
        ),
        f"--dllm-algorithm {cfg.dllm_algorithm}": (cfg.dllm_algorithm, "it decodes blocks, not tokens"),
    }
    return [f"{name}: cannot be combined with {_FLAG}: {why}" for name, (given, why) in refused.items() if given]
