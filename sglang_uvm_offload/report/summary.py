"""The verdict on a server in one or two sentences: how good its hit rate is, why, and what to do."""

from __future__ import annotations

from sglang_uvm_offload.report.advice import FEW_STEPS, NEAR
from sglang_uvm_offload.report.source import ServerInfo, budget, pooled, recent_hit_rate
from sglang_uvm_offload.report.units import percent
from sglang_uvm_offload.residency.history import Curve

HIGH, LOW = 0.9, 0.6
"""Hit rates are called high from ``HIGH`` on, and low below ``LOW``."""


def summary(info: ServerInfo) -> str:
    """The most urgent thing to know; the advice has the rest."""
    ranks = info.ranks
    if any(rank.fault is not None for rank in ranks):
        return "Moving experts stopped on a rank. See the advice for the cause; outputs are not affected."
    if any(rank.evicted_bytes for rank in ranks):
        return "The driver evicted resident experts from VRAM, so steps are slower than hit rates say. Leave more VRAM free."
    if not any(rank.offloaded_experts for rank in ranks):
        return "Every expert is in VRAM. Nothing is read over the link, and plain SGLang would do."
    routed = sum(rank.routed for rank in ranks)
    if not routed:
        return "No routing was counted yet: send requests, and report again."
    rate, curve = sum(rank.history.routed_resident[-1] for rank in ranks) / routed, info.curve
    if not all(rank.warmup_done for rank in ranks):
        return f"Hit rate {percent(rate)} so far; too early to judge, because the warm-up is not over. Send more requests."
    if curve is None or curve.decode_steps < FEW_STEPS:
        steps = 0 if curve is None else curve.decode_steps
        return f"Hit rate {percent(rate)} so far; too early to judge, because {FEW_STEPS - steps} more decode steps are needed."
    return _judged(info, curve, max(curve.present, recent_hit_rate(ranks) or 0.0))


def _judged(info: ServerInfo, curve: Curve, reached: float) -> str:
    """Of the hit rate ``reached`` in decode steps."""
    now = budget(info.ranks)
    best = curve.at(now, pooled(info.ranks))
    level = "high" if reached >= HIGH else "low" if reached < LOW else "fair"
    said = f"Hit rate {percent(reached)} in decode steps: {level}"
    if best - reached > NEAR:
        return (
            f"{said}, because other residents would serve more: the best of as many reach {percent(best)}. Choose better ones; "
            "the advice says how."
        )
    held = f"{now:.4g} of {curve.residents[-1]} experts a layer"
    if level == "high":
        return f"{said}, and about the best that {held} in VRAM can reach. Nothing needs to be done."
    return (
        f"{said}, because {held} are in VRAM, and the best choice of so many reaches {percent(best)}. Only more experts in "
        "VRAM raise it: a larger --expert-offload-num-resident, or --expert-offload-slots."
    )
