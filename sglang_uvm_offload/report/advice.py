"""What follows from a server's statistics or a replay's results, in short sentences: each rule and its threshold."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_uvm_offload.replay.policies import SHIPPED
from sglang_uvm_offload.report.source import Result, ServerInfo, budget, served_of_late
from sglang_uvm_offload.report.units import percent, points
from sglang_uvm_offload.residency.status import Curve, RankStatus
from sglang_uvm_offload.units import size

FEW_STEPS = 256
"""Decode steps below which the best set in hindsight says nothing."""
NEAR, FAR = 0.03, 0.10
"""How far below the best fixed set residents may be to be well chosen, and from where they are badly chosen."""
WORTH, SAME = 0.05, 0.01
"""What a larger budget must gain to be worth naming, and what a smaller one may lose."""
LAYERS_DIFFER = 0.02
MANY_MOVES = 0.25
"""The share of moves in the bytes over the link from which they are worth a word."""
AHEAD = ("static-oracle", "belady")
"""Policies of a replay that know what comes."""
OFFERED = {
    "first_n": "--expert-offload-resident-selection first_n",
    "static": "--expert-offload-adapt warmup",
    SHIPPED: "--expert-offload-adapt continuous",
}
"""Those that a server can follow, and how."""


def advice(info: ServerInfo) -> list[str]:
    """What follows from the numbers, in short sentences, the most urgent first."""
    ranks = info.ranks
    said = [
        f"Moving experts stopped ({name}): {rank.fault}. Outputs are not affected, but residents change no more: find the "
        "cause, and restart the server."
        for name, rank in zip(info.rank_names, ranks, strict=True)
        if rank.fault is not None
    ]
    if not any(rank.offloaded_experts for rank in ranks):
        return [*said, "Every expert is in VRAM: offloading does nothing here, and plain SGLang is simpler."]
    if not all(rank.warmup_done for rank in ranks):
        return [*said, "The warm-up is not over: residents are still those of the start. Look again when it is."]
    curve = info.curve
    if curve is None:
        return [*said, "No decode step was counted yet (or the MoE runner shows no routing): there is nothing to judge by."]
    if curve.decode_steps < FEW_STEPS:
        return [*said, f"Only {curve.decode_steps} decode steps were counted: too few to judge residents by. Look again later."]
    return [
        *said,
        _how_well_chosen(info, curve),
        *_other_budgets(info, curve),
        *_layers_differ(ranks, curve),
        *_many_moves(ranks),
    ]


def _how_well_chosen(info: ServerInfo, curve: Curve) -> str:
    """By the better of two figures: what the present residents would have covered of all, and what was served of late."""
    ranks, best = info.ranks, curve.at(budget(info.ranks), _pooled(info.ranks))
    reached = max(curve.present, served_of_late(ranks) or 0.0)
    gap = best - reached
    compared = (
        f"they cover {percent(reached)} of what decode steps use, and the best fixed set of this size, in hindsight, "
        f"{percent(best)}"
    )
    if gap <= NEAR:
        return f"Residents are well chosen: {compared}."
    if gap <= FAR:
        return f"Residents are {points(gap)} below the best: {compared}."
    if all(rank.adapt == "continuous" for rank in ranks):
        remedy = "The traffic changes faster than residents can pay to follow; a larger budget helps more."
    elif info.internal_states[0].expert_offload_resident_selection != "frequency" or ranks[0].adapt == "off":
        remedy = "They do not follow the traffic: --expert-offload-adapt continuous does."
    else:
        remedy = "--expert-offload-adapt continuous, or a longer warm-up (--expert-offload-warmup-tokens), would choose better."
    return f"Residents are {points(gap)} below the best: {compared}. {remedy}"


def _other_budgets(info: ServerInfo, curve: Curve) -> list[str]:
    """Whether an eighth of the experts more would be worth its VRAM, and whether as much less would do."""
    now, pooled, step = budget(info.ranks), _pooled(info.ranks), curve.residents[-1] / 8
    here = curve.at(now, pooled)
    said = []
    more = next((n for n in curve.residents if n >= now + step), curve.residents[-1])
    if more > now:
        gain = curve.at(more, pooled) - here
        price = f"{size((more - now) * _bytes_a_resident(info.ranks))} more VRAM on each rank"
        said.append(
            f"{_flag(info, more)}, for {price}, would {'' if gain >= WORTH else 'only '}have raised the best hit rate from "
            f"{percent(here)} to {percent(here + gain)}: {points(gain)}."
        )
    less = next((n for n in reversed(curve.residents) if n <= now - step), None)
    if less is not None and here - curve.at(less, pooled) <= SAME:
        said.append(
            f"{_flag(info, less)} would have lowered the best hit rate by {points(here - curve.at(less, pooled))} only, and "
            f"left {size((now - less) * _bytes_a_resident(info.ranks))} of each rank's VRAM to the KV cache."
        )
    return said


def _layers_differ(ranks: Sequence[RankStatus], curve: Curve) -> list[str]:
    gain = curve.at(budget(ranks), True) - curve.at(budget(ranks), False)
    if gain < LAYERS_DIFFER or _pooled(ranks):
        return []
    return [
        "Layers differ: in the same VRAM, more residents in the layers that use them would have covered "
        f"{points(gain)} more (--expert-offload-adapt continuous)."
    ]


def _many_moves(ranks: Sequence[RankStatus]) -> list[str]:
    moved, read = (sum(rank.history.of_late(name) for rank in ranks) for name in ("moved_bytes", "zero_copy_bytes"))
    if not moved or moved / (moved + read) < MANY_MOVES:
        return []
    if any(rank.adapt == "continuous" for rank in ranks):
        so = "If hit rate does not rise with them, --expert-offload-adapt warmup moves nothing after the warm-up."
    else:
        so = "That was the choice after the warm-up: the share falls as the server goes on."
    return [f"Moves are {percent(moved / (moved + read))} of the bytes over the link in the latest half of the time. {so}"]


def replay_advice(results: Sequence[Result]) -> list[str]:
    """What follows from a replay's numbers."""
    offered = [result for result in results if result.policy in OFFERED]
    if not offered:
        return [f"None of these policies is one that a server offers ({', '.join(OFFERED)})."]
    best = min(offered, key=lambda result: result.step_seconds)
    said = [f"Of what a server offers here, {best.policy} ({OFFERED[best.policy]}) spends the least time on the link."]
    paging = [result for result in results if result.policy not in OFFERED and result.policy not in AHEAD]
    least = min(paging, key=lambda result: result.step_seconds, default=best)
    if least.step_seconds < best.step_seconds:
        share = 1 - least.step_seconds / best.step_seconds
        said.append(
            f"{least.policy} would take {percent(share)} less, as a cache that keeps what it reads; no server offers it."
        )
    belady = next((result for result in results if result.policy == "belady"), None)
    if belady is not None and belady.hit_rate > best.hit_rate:
        gap = points(belady.hit_rate - best.hit_rate)
        said.append(f"Knowing the future, belady covers {gap} more: an upper bound for as many residents of each layer.")
    if best.hit_rate >= 1:
        said.append("Residents serve everything: a smaller residency may do.")
    return said


def _pooled(ranks: Sequence[RankStatus]) -> bool:
    """Whether the server spends its budget over all layers together."""
    return all(rank.adapt == "continuous" for rank in ranks)


def _bytes_a_resident(ranks: Sequence[RankStatus]) -> float:
    """VRAM on a rank for one more resident in each of its layers."""
    return sum(layer.expert_bytes for rank in ranks for layer in rank.layers) / len(ranks)


def _flag(info: ServerInfo, residents: int) -> str:
    """The flag that keeps so many residents a layer on each rank: N counts over expert-parallel ranks."""
    return f"--expert-offload-num-resident {residents * info.internal_states[0].ep_size}"
