"""The headline of a server's report: its hit rate, and what the best fixed choice of as many experts would have reached."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.report.source import ServerInfo, budget, decode_hit_rate, follows, hit_rate, slots_a_layer, slots_serve
from sglang_uvm_offload.report.units import change, percent

FEW_STEPS = 256
"""With fewer decode steps, the best set in hindsight means nothing."""


@dataclass(frozen=True)
class Comparison:
    """The hit rate of decode activations, and that of the best fixed choice over the same steps."""

    hit_rate: float
    """If VRAM follows the traffic, the share that it served; if residents are fixed, the share that they would have served."""
    best: float
    """This choice is made in hindsight; no server could have made it."""
    experts: float
    """Experts per layer in each rank's VRAM, in residents and slots together. The best fixed choice has as many."""
    follows: bool
    """Whether the experts in VRAM change with the traffic: residents that adapt continuously, or slots."""
    slots: bool

    @property
    def gain(self) -> float:
        """How many points the hit rate is above the best fixed choice, both rounded as they are shown."""
        return change(self.best, self.hit_rate)

    def __str__(self) -> str:
        where = ", slots included" if self.slots else "" if self.follows else " with the current residents, which are fixed"
        rates = (
            f"Hit rate {percent(self.hit_rate)} in decode steps{where}; the best fixed choice of as many experts in hindsight: "
            f"{percent(self.best)}"
        )
        by = f"{abs(self.gain):.1f} points"
        if not self.follows:
            return f"{rates}, {by} {'more' if self.gain < 0 else 'less'}." if self.gain else f"{rates} as well."
        if self.gain > 0:
            return f"{rates}, so following the traffic gained {by}."
        return f"{rates}, so following the traffic {f'lost {by}' if self.gain else 'gained nothing'}, warm-up included."


def comparison(info: ServerInfo) -> Comparison | None:
    """The comparison; None if it is too early to judge, or if there is nothing to judge."""
    return None if _too_early(info) else _compared(info)


def headline(info: ServerInfo) -> str:
    """The comparison in words, or the reason why there is none."""
    return _too_early(info) or str(_compared(info))


def _compared(info: ServerInfo) -> Comparison:
    """Requires that decode steps were counted."""
    ranks, curve = info.ranks, info.curve
    assert curve is not None
    experts, moving = budget(ranks) + slots_a_layer(ranks), follows(ranks)
    return Comparison(
        hit_rate=(decode_hit_rate(ranks) or 0.0) if moving else curve.present,
        best=curve.at(experts, pooled=moving),
        experts=experts,
        follows=moving,
        slots=slots_serve(ranks),
    )


def _too_early(info: ServerInfo) -> str | None:
    ranks = info.ranks
    if not any(rank.offloaded_bytes for rank in ranks):
        return "Every expert is in VRAM: offloading does nothing here, and plain SGLang is simpler."
    routed = sum(rank.routed for rank in ranks)
    rate = hit_rate(sum(rank.history.routed_resident[-1] for rank in ranks), routed)
    if rate is None:
        return "No routing has been counted yet, or the MoE runner shows none: send requests, and report again."
    early = f"Hit rate {percent(rate)} so far; too early to judge"
    if budget(ranks) and not all(rank.warmup_done for rank in ranks):
        return f"{early}: the warm-up is not over, and residents are still the initial ones. Send more requests."
    steps = 0 if info.curve is None else info.curve.decode_steps
    if steps < FEW_STEPS:
        return f"{early}: {FEW_STEPS - steps} of {FEW_STEPS} decode steps are missing. Send more requests."
    return None
