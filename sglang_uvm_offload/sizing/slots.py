"""How the VRAM of a layer's experts is split between residents and slots."""

from __future__ import annotations

FINE_EXPERTS = 128
"""Models with so many experts a layer have no experts that most requests use: what traffic uses right now is worth most."""
FINE_SHARE, COARSE_SHARE = 0.75, 0.5
"""The share of the VRAM that becomes slots without a trace to choose it by. More would take a few percent less of the link for
decode steps (benchmarks/results/slots/splits.md), and would have a prefill bring the more bytes."""


def slots_of(rows: int, num_experts: int) -> int:
    """How many of ``rows`` (residents and slots of a layer, all in VRAM) become slots."""
    return int(rows * (FINE_SHARE if num_experts >= FINE_EXPERTS else COARSE_SHARE)) if rows < num_experts else 0
