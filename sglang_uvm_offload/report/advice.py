"""Advice from a server's statistics or a replay's results, in short sentences: each rule and its threshold."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.replay.policies import AHEAD, OFFERED
from sglang_uvm_offload.replay.results import Replay
from sglang_uvm_offload.report.headline import Comparison, comparison
from sglang_uvm_offload.report.source import ServerInfo, budget, follows, recent_hit_rate, slots_a_layer
from sglang_uvm_offload.report.units import change, percent, points
from sglang_uvm_offload.residency.history import Curve
from sglang_uvm_offload.residency.status import RankStatus
from sglang_uvm_offload.units import size

HIGH = 0.9
"""At this hit rate or above, nothing needs to be done."""
NEAR, FAR = 3.0, 10.0
"""Experts in VRAM are well chosen if at most NEAR points below the best fixed set, and badly chosen if more than FAR below."""
WORTH, SAME = 0.05, 0.01
"""The least gain that makes a larger budget worth its VRAM, and the largest loss at which a smaller one is as good."""
LAYERS_DIFFER = 0.02
MANY_MOVES = 0.25
"""Moves are mentioned if they are at least this share of all bytes that are moved or read in place."""


def alerts(info: ServerInfo) -> list[str]:
    """Warnings that the reader must see first: faults, and evicted residents."""
    ranks = list(zip(info.rank_names, info.ranks, strict=True))
    faults = [
        f"Moving experts stopped ({name}): {rank.fault}. Outputs are not affected, but residents no longer change: fix the "
        "cause and restart the server."
        for name, rank in ranks
        if rank.fault is not None
    ]
    evictions = [
        f"About {size(rank.evicted_bytes)} of residents were evicted from VRAM ({name}), because something else needed it; hit "
        "rates count them as resident. Leave more VRAM free: a larger --expert-offload-headroom-gb, fewer residents, or no "
        "other process on this GPU."
        for name, rank in ranks
        if rank.evicted_bytes
    ]
    return faults + evictions


def advice(info: ServerInfo) -> list[str]:
    """Changes that would raise the hit rate, or save VRAM or moves; none if it is too early to judge."""
    found, curve = comparison(info), info.curve
    if found is None or curve is None:
        return []
    return [
        *_of_late(info, found),
        *_how_well_chosen(info, found, curve),
        *_other_budgets(info, found, curve),
        *_layers_differ(info.ranks, curve),
        *_many_moves(info.ranks),
    ]


def _of_late(info: ServerInfo, found: Comparison) -> list[str]:
    """The hit rate without the warm-up and earlier traffic, if it differs."""
    recent = recent_hit_rate(info.ranks)
    if recent is None or abs(change(found.hit_rate, recent)) < NEAR:
        return []
    return [f"In the latest half of the time, the hit rate was {percent(recent)}."]


def _how_well_chosen(info: ServerInfo, found: Comparison, curve: Curve) -> list[str]:
    """Experts that follow the traffic are judged by their recent hit rate if it is better, as it excludes the warm-up."""
    reached = max(found.hit_rate, recent_hit_rate(info.ranks) or 0.0) if found.follows else found.hit_rate
    gain = change(found.best, reached)
    if gain < -FAR:
        return [_remedy(info)]
    if gain < -NEAR:
        return []
    if reached >= HIGH:
        return ["The hit rate is high: nothing needs to be done."]
    held = f"{found.experts:.4g} of {curve.residents[-1]} experts a layer"
    if found.follows:
        return [f"With {held} in VRAM, only more of them raise the hit rate much: {_larger(info)}."]
    return [
        f"No fixed choice of {held} does much better. A larger --expert-offload-num-resident does, and experts that follow the "
        "traffic may: --expert-offload-adapt continuous, or --expert-offload-slots."
    ]


def _remedy(info: ServerInfo) -> str:
    """Advice for badly chosen experts in VRAM."""
    if follows(info.ranks):
        return f"The traffic changes too fast to follow; more experts in VRAM help more: {_larger(info)}."
    if info.internal_states[0].expert_offload_resident_selection != "frequency" or info.ranks[0].adapt == "off":
        return "Residents do not follow the traffic; with --expert-offload-adapt continuous they would."
    return (
        f"--expert-offload-adapt continuous, or a longer warm-up ({flag_name('warmup_tokens')}), would choose better residents."
    )


def _larger(info: ServerInfo) -> str:
    """The flags that bring more experts into VRAM."""
    if any(rank.slots is not None for rank in info.ranks):
        return "a larger --expert-offload-slots"
    return "a larger --expert-offload-num-resident, or --expert-offload-slots"


def _other_budgets(info: ServerInfo, found: Comparison, curve: Curve) -> list[str]:
    """Whether VRAM for an eighth more of the experts is worth it, and whether an eighth less is as good."""
    now, step, here = found.experts, curve.residents[-1] / 8, found.best
    lines = []
    more = next((n for n in curve.residents if n >= now + step), curve.residents[-1])
    if more > now:
        there = curve.at(more, found.follows)
        price = f"{size((more - now) * _bytes_an_expert(info.ranks))} more VRAM on each rank"
        lines.append(
            f"{_flag(info, more)}, for {price}, would {'' if there - here >= WORTH else 'only '}have raised the best fixed "
            f"choice from {percent(here)} to {percent(there)}: {points(here, there)}."
        )
    less = next((n for n in reversed(curve.residents) if n <= now - step), None)
    if less is not None and less > _unchanged(info) and here - (there := curve.at(less, found.follows)) <= SAME:
        freed = size((now - less) * _bytes_an_expert(info.ranks))
        lines.append(
            f"{_flag(info, less)} would have lowered the best fixed choice by only {points(there, here)}, and left {freed} of "
            "each rank's VRAM to the KV cache."
        )
    return lines


def _layers_differ(ranks: Sequence[RankStatus], curve: Curve) -> list[str]:
    here, there = (curve.at(budget(ranks), pooled) for pooled in (False, True))
    if there - here < LAYERS_DIFFER or follows(ranks):
        return []
    return [
        "Layers differ: in the same VRAM, more residents in the layers that use them would have raised the hit rate by "
        f"{points(here, there)} (--expert-offload-adapt continuous)."
    ]


def _many_moves(ranks: Sequence[RankStatus]) -> list[str]:
    """Compares moves with reads in place alone, which they are meant to save: a step that streams copies as many bytes
    whichever experts are resident."""
    moved, read = (sum(rank.history.recent_growth(name) for rank in ranks) for name in ("moved_bytes", "zero_copy_bytes"))
    if not moved or moved / (moved + read) < MANY_MOVES:
        return []
    if any(rank.adapt == "continuous" for rank in ranks):
        remedy = "If they do not raise the hit rate, use --expert-offload-adapt warmup: it moves nothing after the warm-up."
    else:
        remedy = "Residents were chosen after the warm-up; the share falls as the server runs."
    share = percent(moved / (moved + read))
    return [f"Moves are {share} of the bytes that were moved or read in place in the latest half of the time. {remedy}"]


def replay_advice(results: Sequence[Replay]) -> list[str]:
    """The best policy that a server offers, and how it compares with the others."""
    offered = [result for result in results if result.policy in OFFERED]
    if not offered:
        return [f"A server offers none of these policies ({', '.join(OFFERED)})."]
    best = min(offered, key=lambda result: result.step_seconds)
    lines = [
        f"Of the policies that a server offers, {best.policy} ({OFFERED[best.policy]}) spends the least time on the link: "
        f"{1e3 * best.step_seconds:.3f} ms a decode step, with a hit rate of {percent(best.hit_rate)}."
    ]
    paging = [result for result in results if result.policy not in (*OFFERED, *AHEAD)]
    least = min(paging, key=lambda result: result.step_seconds, default=best)
    if least.step_seconds < best.step_seconds:
        share = 1 - least.step_seconds / best.step_seconds
        lines.append(
            f"{least.policy}, a cache that keeps each expert it reads, would take {percent(share)} less; no server offers it."
        )
    belady = next((result for result in results if result.policy == "belady"), None)
    if belady is not None and belady.hit_rate > best.hit_rate:
        gap = points(best.hit_rate, belady.hit_rate)
        lines.append(
            f"belady, which knows the future, has a hit rate {gap} higher: the bound for as many residents of each layer."
        )
    if best.hit_rate >= 1:
        lines.append("Residents serve everything: a smaller residency may suffice.")
    return lines


def _bytes_an_expert(ranks: Sequence[RankStatus]) -> float:
    """The VRAM that one more expert in each of a rank's layers takes."""
    return sum(layer.expert_bytes for rank in ranks for layer in rank.layers) / len(ranks)


def _unchanged(info: ServerInfo) -> float:
    """Experts per layer in VRAM that ``_flag`` does not change: with slots, the residents."""
    return budget(info.ranks) if slots_a_layer(info.ranks) else 0.0


def _flag(info: ServerInfo, experts: int) -> str:
    """The flag that gives each rank this many experts per layer in VRAM. Flags count experts over all expert-parallel ranks."""
    name = "slots" if slots_a_layer(info.ranks) else "num-resident"
    return f"--expert-offload-{name} {round((experts - _unchanged(info)) * info.internal_states[0].ep_size)}"
