"""The number of tokens from which a step streams."""

from __future__ import annotations

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import NEVER
from sglang_uvm_offload.plan.rates import StreamRates
from sglang_uvm_offload.plan.streaming import break_even_tokens

USUAL_TOP_K = 8
"""Assumed for a model whose config does not state its top-k."""


def stream_tokens(
    requested: RequestedConfig,
    num_resident: int,
    slots: int,
    num_experts: int,
    top_k: int,
    rates: StreamRates | None,
    longest: int,
) -> int:
    """The number of tokens from which a step streams, ``NEVER`` if none does. ``slots`` is per layer; experts in slots count as
    offloaded. ``rates`` is None if unknown. ``longest`` is the most tokens of a step."""
    if requested.stream_gb == 0 or requested.stream_tokens == NEVER or num_resident >= num_experts:
        return NEVER
    if requested.stream_tokens is not None:
        return requested.stream_tokens
    tokens = break_even_tokens(num_experts, top_k, num_resident + slots, rates)
    return NEVER if tokens > longest and requested.stream_gb is None else tokens
