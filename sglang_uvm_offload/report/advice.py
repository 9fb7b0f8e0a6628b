"""Advice from a server's statistics or a replay's results, in short sentences: each rule and its threshold."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.replay.policies import AHEAD, OFFERED
from sglang_uvm_offload.replay.results import Replay
from sglang_uvm_offload.report.source import ServerInfo, budget, pooled, recent_hit_rate
from sglang_uvm_offload.report.units import percent, points
from sglang_uvm_offload.residency.history import Curve
from sglang_uvm_offload.residency.status import RankStatus
from sglang_uvm_offload.units import size

FEW_STEPS = 256
"""With fewer decode steps, the best set in hindsight means nothing."""
HIGH, LOW = 0.9, 0.6
"""Hit rates are called high from ``HIGH`` on, and low below ``LOW``."""
NEAR, FAR = 0.03, 0.10
"""Residents are well chosen up to NEAR below the best fixed set, and badly chosen beyond FAR."""
WORTH, SAME = 0.05, 0.01
"""The gain from which a larger budget is worth its VRAM, and the loss up to which a smaller one is as good."""
LAYERS_DIFFER = 0.02
MANY_MOVES = 0.25
"""The share of moves in the bytes that are moved or read in place from which they are mentioned."""


def advice(info: ServerInfo) -> list[str]:
    """The verdict, which is the most urgent thing to know, and what else there is to say."""
    ranks = info.ranks
    lines = [
        f"Moving experts stopped ({name}): {rank.fault}. Outputs are not affected, but residents no longer change: fix the "
        "cause and restart the server."
        for name, rank in zip(info.rank_names, ranks, strict=True)
        if rank.fault is not None
    ]
    lines += [
        f"About {size(rank.evicted_bytes)} of residents were evicted from VRAM ({name}), because something else needed it; hit "
        "rates count them as resident. Leave more VRAM free: a larger --expert-offload-headroom-gb, fewer residents, or no "
        "other process on this GPU."
        for name, rank in zip(info.rank_names, ranks, strict=True)
        if rank.evicted_bytes
    ]
    if not any(rank.offloaded_experts for rank in ranks):
        return [*lines, "Every expert is in VRAM: offloading does nothing here, and plain SGLang is simpler."]
    routed = sum(rank.routed for rank in ranks)
    if not routed:
        return [*lines, "No routing was counted yet, or the MoE runner shows none: send requests, and report again."]
    early = f"Hit rate {percent(sum(rank.history.routed_resident[-1] for rank in ranks) / routed)} so far; too early to judge"
    if not all(rank.warmup_done for rank in ranks):
        return [*lines, f"{early}: the warm-up is not over, and residents are still the initial ones. Send more requests."]
    curve = info.curve
    steps = 0 if curve is None else curve.decode_steps
    if curve is None or steps < FEW_STEPS:
        return [*lines, f"{early}: of {FEW_STEPS} decode steps {FEW_STEPS - steps} are missing. Send more requests."]
    return [
        *lines,
        _how_well_chosen(info, curve),
        *_other_budgets(info, curve),
        *_layers_differ(ranks, curve),
        *_many_moves(ranks),
    ]


def _how_well_chosen(info: ServerInfo, curve: Curve) -> str:
    """Judges by the better of two hit rates: the current residents' over all steps, and the recent one."""
    ranks, now = info.ranks, budget(info.ranks)
    best, reached = curve.at(now, pooled(ranks)), max(curve.present, recent_hit_rate(ranks) or 0.0)
    level = "high" if reached >= HIGH else "low" if reached < LOW else "fair"
    verdict = f"Hit rate {percent(reached)} in decode steps: {level}"
    held = f"{now:.4g} of {curve.residents[-1]} experts a layer"
    gap = best - reached
    if gap > NEAR:
        return (
            f"{verdict}, and {points(gap)} below the best fixed set of as many residents, {percent(best)} in hindsight. "
            f"{_remedy(info) if gap > FAR else ''}"
        ).strip()
    if level == "high":
        return f"{verdict}, and about the best that {held} in VRAM can reach ({percent(best)}). Nothing needs to be done."
    return (
        f"{verdict}, because {held} are in VRAM, and the best choice of so many reaches {percent(best)}. Only more experts in "
        "VRAM raise it: a larger --expert-offload-num-resident, or --expert-offload-slots."
    )


def _remedy(info: ServerInfo) -> str:
    """For badly chosen residents."""
    if all(rank.adapt == "continuous" for rank in info.ranks):
        return "The traffic changes too fast for moves to pay off; a larger budget helps more."
    if info.internal_states[0].expert_offload_resident_selection != "frequency" or info.ranks[0].adapt == "off":
        return "They do not follow the traffic; with --expert-offload-adapt continuous they would."
    return f"--expert-offload-adapt continuous, or a longer warm-up ({flag_name('warmup_tokens')}), would choose better."


def _other_budgets(info: ServerInfo, curve: Curve) -> list[str]:
    """Whether an eighth of the experts more is worth its VRAM, and whether an eighth less is as good."""
    now, shared, step = budget(info.ranks), pooled(info.ranks), curve.residents[-1] / 8
    here = curve.at(now, shared)
    lines = []
    more = next((n for n in curve.residents if n >= now + step), curve.residents[-1])
    if more > now:
        gain = curve.at(more, shared) - here
        price = f"{size((more - now) * _bytes_a_resident(info.ranks))} more VRAM on each rank"
        lines.append(
            f"{_flag(info, more)}, for {price}, would {'' if gain >= WORTH else 'only '}have raised the best hit rate from "
            f"{percent(here)} to {percent(here + gain)}: {points(gain)}."
        )
    less = next((n for n in reversed(curve.residents) if n <= now - step), None)
    if less is not None and here - curve.at(less, shared) <= SAME:
        lines.append(
            f"{_flag(info, less)} would have lowered the best hit rate by only {points(here - curve.at(less, shared))}, and "
            f"left {size((now - less) * _bytes_a_resident(info.ranks))} of each rank's VRAM to the KV cache."
        )
    return lines


def _layers_differ(ranks: Sequence[RankStatus], curve: Curve) -> list[str]:
    gain = curve.at(budget(ranks), True) - curve.at(budget(ranks), False)
    if gain < LAYERS_DIFFER or pooled(ranks):
        return []
    return [
        "Layers differ: in the same VRAM, more residents in the layers that use them would have raised the hit rate by "
        f"{points(gain)} (--expert-offload-adapt continuous)."
    ]


def _many_moves(ranks: Sequence[RankStatus]) -> list[str]:
    """Moves are to save reads in place, so they are held against those alone: a step that streams copies as many bytes
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
    """Advice from a replay's numbers."""
    offered = [result for result in results if result.policy in OFFERED]
    if not offered:
        return [f"A server offers none of these policies ({', '.join(OFFERED)})."]
    best = min(offered, key=lambda result: result.step_seconds)
    lines = [f"Of the policies that a server offers, {best.policy} ({OFFERED[best.policy]}) spends the least time on the link."]
    paging = [result for result in results if result.policy not in (*OFFERED, *AHEAD)]
    least = min(paging, key=lambda result: result.step_seconds, default=best)
    if least.step_seconds < best.step_seconds:
        share = 1 - least.step_seconds / best.step_seconds
        lines.append(
            f"{least.policy}, a cache that keeps each expert it reads, would take {percent(share)} less; no server offers it."
        )
    belady = next((result for result in results if result.policy == "belady"), None)
    if belady is not None and belady.hit_rate > best.hit_rate:
        gap = points(belady.hit_rate - best.hit_rate)
        lines.append(
            f"belady, which knows the future, has a hit rate {gap} higher: the bound for as many residents of each layer."
        )
    if best.hit_rate >= 1:
        lines.append("Residents serve everything: a smaller residency may suffice.")
    return lines


def _bytes_a_resident(ranks: Sequence[RankStatus]) -> float:
    """VRAM on a rank for one more resident in each of its layers."""
    return sum(layer.expert_bytes for rank in ranks for layer in rank.layers) / len(ranks)


def _flag(info: ServerInfo, residents: int) -> str:
    """The flag that keeps this many residents a layer on each rank: N counts over expert-parallel ranks."""
    return f"--expert-offload-num-resident {residents * info.internal_states[0].ep_size}"
