"""Advice from a server's statistics or a replay's results, in short sentences: each rule and its threshold."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.replay.policies import AHEAD, OFFERED
from sglang_uvm_offload.report.source import Result, ServerInfo, budget, pooled, recent_hit_rate
from sglang_uvm_offload.report.units import percent, points
from sglang_uvm_offload.residency.history import Curve
from sglang_uvm_offload.residency.status import RankStatus
from sglang_uvm_offload.units import size

FEW_STEPS = 256
"""With fewer decode steps, the best set in hindsight means nothing."""
NEAR, FAR = 0.03, 0.10
"""Residents are well chosen up to NEAR below the best fixed set, and badly chosen beyond FAR."""
WORTH, SAME = 0.05, 0.01
"""The gain from which a larger budget is worth its VRAM, and the loss up to which a smaller one is as good."""
LAYERS_DIFFER = 0.02
MANY_MOVES = 0.25
"""The share of moves in the bytes that are moved or read in place from which they are mentioned."""


def advice(info: ServerInfo) -> list[str]:
    """Advice from the numbers, the most urgent first."""
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
    if not all(rank.warmup_done for rank in ranks):
        return [*lines, "The warm-up is not over: residents are still the initial ones. Report again after the warm-up."]
    curve = info.curve
    if curve is None:
        return [*lines, "No decode step was counted yet (or the MoE runner shows no routing), so residents cannot be judged."]
    if curve.decode_steps < FEW_STEPS:
        return [*lines, few_steps(curve.decode_steps)]
    return [
        *lines,
        _how_well_chosen(info, curve),
        *_other_budgets(info, curve),
        *_layers_differ(ranks, curve),
        *_many_moves(ranks),
    ]


def few_steps(decode_steps: int) -> str:
    """How many steps are missing."""
    return (
        f"Only {decode_steps} decode steps were counted, too few to judge residents: it takes {FEW_STEPS}. Report again after "
        f"{FEW_STEPS - decode_steps} more."
    )


def _how_well_chosen(info: ServerInfo, curve: Curve) -> str:
    """Judges by the better of two hit rates: the current residents' over all steps, and the recent one."""
    ranks, best = info.ranks, curve.at(budget(info.ranks), pooled(info.ranks))
    reached = max(curve.present, recent_hit_rate(ranks) or 0.0)
    gap = best - reached
    compared = (
        f"their hit rate in decode steps is {percent(reached)}, and the best fixed set of this size, in hindsight, reaches "
        f"{percent(best)}"
    )
    if gap <= NEAR:
        return f"Residents are well chosen: {compared}."
    if gap <= FAR:
        return f"Residents are {points(gap)} below the best: {compared}."
    if all(rank.adapt == "continuous" for rank in ranks):
        remedy = "The traffic changes too fast for moves to pay off; a larger budget helps more."
    elif info.internal_states[0].expert_offload_resident_selection != "frequency" or ranks[0].adapt == "off":
        remedy = "They do not follow the traffic; with --expert-offload-adapt continuous they would."
    else:
        warmup = flag_name("warmup_tokens")
        remedy = f"--expert-offload-adapt continuous, or a longer warm-up ({warmup}), would choose better."
    return f"Residents are {points(gap)} below the best: {compared}. {remedy}"


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


def replay_advice(results: Sequence[Result]) -> list[str]:
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
