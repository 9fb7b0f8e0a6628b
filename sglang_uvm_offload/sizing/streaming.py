"""Streaming, in numbers: from how many tokens on a step copies all experts of a layer to VRAM instead of reading those that it
uses in place, and how many stream buffers a given VRAM holds."""

from __future__ import annotations

from itertools import count

from sglang_uvm_offload.memory.link import LinkRates
from sglang_uvm_offload.sizing.machine import GIB
from sglang_uvm_offload.sizing.speed import distinct

MOST_BUFFERS = 2
"""One is filled for the next layer while a layer computes from the other."""

USED_SHARE = 0.98
"""A step that uses this share of a layer's experts copies little that reading in place would not bring."""

SKEW = 8
"""Experts that routing prefers are resident, so offloaded ones are used later than uniform routing would use them. By measured
routing, streaming from so many times the tokens on costs 2 % at most where reading in place is faster
(benchmarks/results/prefill/prefill.md)."""


def break_even_tokens(num_experts: int, top_k: int, measured: LinkRates | None = None) -> int:
    """From how many tokens on a step streams: ``SKEW`` times the smallest power of two that is expected to use
    ``USED_SHARE`` of ``num_experts`` experts if routing is uniform. A smaller share is enough on a link that was
    ``measured`` to read experts in place more slowly than it copies them; a slower copy is still hidden by what computes."""
    choices = max(1, top_k)
    used = USED_SHARE * num_experts * (min(1.0, measured.scattered / measured.copied) if measured else 1.0)
    return SKEW * next(tokens for tokens in (1 << power for power in count()) if distinct(num_experts, choices, tokens) >= used)


def buffers_in(gib: float, layer_bytes: int) -> int:
    """How many whole buffers of ``layer_bytes`` fit in ``gib`` GiB; 0 if no layer streams."""
    return min(MOST_BUFFERS, int(gib * GIB) // layer_bytes) if layer_bytes else 0
