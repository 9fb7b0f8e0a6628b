"""The KV cache that a launch asks for."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.residency.demand import Demand


def demand_of(cfg: Any, given: Any, model: Any) -> Demand:
    """``given`` are the user's arguments and ``cfg`` the resolved ones. ``cfg`` cannot serve for the number of requests: SGLang
    fills in its own with speculation."""
    # The flag is per replica; the attention groups of a replica share it.
    requests = given.max_running_requests  # SGLang treats 0 or less as 1
    if requests is not None:
        requests = max(1, requests) * (1 if cfg.attn_dp_size > 1 else cfg.dp_size)
    return Demand(
        model.context_len,
        given.context_length,
        requests,
        cfg.max_total_tokens,
        page_tokens=max(64, cfg.page_size or 1),
    )
