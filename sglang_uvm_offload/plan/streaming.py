"""The smallest step that copies all experts of a layer to VRAM instead of reading in place those that it uses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from sglang_uvm_offload.plan.inputs import Assumptions
from sglang_uvm_offload.plan.rates import StreamRates
from sglang_uvm_offload.plan.speed import distinct

USED_SHARE = 0.98
"""A step that uses this share of a layer's experts copies few that it would not read in place anyway."""

SKEW = 8
"""How many times more tokens than under uniform routing a step needs to stream: routing prefers residents, so offloaded experts
are used later. With measured routing and up to 78 % of the experts in VRAM, this factor costs at most 4 % where reading in
place is faster (benchmarks/results/prefill/prefill.md)."""


def break_even_tokens(num_experts: int, top_k: int, in_vram: int = 0, rates: StreamRates | None = None) -> int:
    """The smallest step that streams, in tokens, with ``in_vram`` experts of a layer in VRAM: ``SKEW`` times the smallest power
    of two that is expected to use ``USED_SHARE`` of ``num_experts`` experts under uniform routing.

    A smaller share is enough on a link that reads experts in place more slowly than it copies them; a slower copy is still
    hidden by what computes. Where most experts are in VRAM, their copies take longer than the link: then it is the smallest
    power of two of tokens for which offloaded ones are read in place so many times, if routing is uniform."""
    choices = max(1, top_k)
    used = USED_SHARE * num_experts * (min(1.0, rates.read / rates.copied) if rates else 1.0)
    least = SKEW * next(tokens for tokens in _powers() if distinct(num_experts, choices, tokens) >= used)
    if rates is None or in_vram >= num_experts:
        return least
    passes = in_vram / rates.in_vram / ((num_experts - in_vram) / rates.read)
    if passes <= 1:
        return least
    reading = (passes - 0.5) * Assumptions.rows_per_read * num_experts / choices
    return max(least, next(tokens for tokens in _powers() if tokens >= reading))


def _powers() -> Iterator[int]:
    return (1 << power for power in count())
