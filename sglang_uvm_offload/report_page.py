"""A page for a person: what a server's statistics, or the results of a replay, say. Data in, one self-contained HTML text out.

The data come from outside: their types and sizes are checked when they are decoded into the records below, and their texts
become nodes of a tree, so that they cannot become markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated
from xml.etree.ElementTree import Element

import numpy as np
from msgspec import Meta, Struct

from sglang_uvm_offload.history import Count, Curve, Past, Share, combined
from sglang_uvm_offload.report import size
from sglang_uvm_offload.simulator import SHIPPED
from sglang_uvm_offload.svg import (
    Axis,
    Line,
    bar_chart,
    cell_map,
    column_chart,
    element,
    facts,
    line_chart,
    page,
    section,
    table,
)

MAX_LAYERS, MAX_EXPERTS, MAX_RANKS = 1 << 10, 1 << 13, 1 << 10
Experts = Annotated[int, Meta(ge=0, le=MAX_EXPERTS)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]

PERCENT = Axis("coverage, %", 0, 100)
RANKS_DRAWN = 4
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


class Layer(Struct, frozen=True):
    """One MoE layer on one rank, with what it served since the start."""

    layer: Count
    first_expert: Experts
    experts: Experts
    shared_experts: Experts
    expert_bytes: Count
    routed: Count
    routed_resident: Count


class Rank(Struct, frozen=True):
    """``OffloadManager.status`` of one rank."""

    backend: str
    layers: Annotated[list[Layer], Meta(max_length=MAX_LAYERS)]
    resident_ids: list[list[Count]]
    resident_experts: Count
    offloaded_experts: Count
    resident_bytes: Count
    offloaded_bytes: Count
    tokens: Count
    warmup_done: bool
    adapt: str
    per_layer: str
    fault: str | None
    history: Past
    curve: Curve | None

    def __post_init__(self) -> None:
        if len(self.resident_ids) != len(self.layers):
            raise ValueError("resident_ids must have one list for each of layers")
        for layer, ids in zip(self.layers, self.resident_ids, strict=True):
            first, end = layer.first_expert, layer.first_expert + layer.experts + layer.shared_experts
            if end > MAX_EXPERTS:
                raise ValueError(f"layer {layer.layer} has expert {end - 1}, and more than {MAX_EXPERTS} are not shown")
            if any(not first <= expert < end for expert in ids):
                raise ValueError(f"the resident ids of layer {layer.layer} must be {first}..{end - 1}")


class State(Struct, frozen=True):
    """One of ``internal_states``: SGLang shows the first rank of each data-parallel rank."""

    expert_offload: Rank | None = None
    tp_size: Experts = 1
    pp_size: Experts = 1
    ep_size: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] = 1
    dp_size: Experts = 1
    enable_dp_attention: bool = False
    expert_offload_num_resident: str | int | None = None
    expert_offload_resident_selection: str = ""


class ServerInfo(Struct, frozen=True):
    """``/server_info`` of a server that offloads experts."""

    internal_states: Annotated[list[State], Meta(max_length=MAX_RANKS)]
    model_path: str = ""
    version: str = ""

    @property
    def ranks(self) -> list[Rank]:
        return [state.expert_offload for state in self.internal_states if state.expert_offload is not None]


class Result(Struct, frozen=True):
    """``simulator.Replay``."""

    policy: str
    residency: Share
    batch: Count
    coverage: Share
    moves_per_step: Amount
    read_bytes_per_step: Amount
    moved_bytes_per_step: Amount
    step_seconds: Amount
    per_layer_coverage: Annotated[list[Share], Meta(max_length=MAX_LAYERS)]
    coverage_over_time: Annotated[list[Share], Meta(max_length=1000)]


class ReplayResults(Struct, frozen=True):
    """What ``replay --json`` prints."""

    trace: str
    results: Annotated[list[Result], Meta(min_length=1, max_length=100)]

    def __post_init__(self) -> None:
        if len({(result.residency, result.batch) for result in self.results}) > 1:
            raise ValueError("the results must be of one residency and one batch")


def server_page(info: ServerInfo, source: str) -> str:
    """The page of a server; ``info`` has at least one rank."""
    ranks, names = info.ranks, _rank_names(info)
    drawn = list(zip(names, ranks, strict=True))[:RANKS_DRAWN]
    curve = combined([rank.curve for rank in ranks if rank.curve is not None])
    return page(
        "What the experts were served from",
        _facts(info, source),
        section("Advice", element("ul", *(element("li", line) for line in advice(info)), class_="advice")),
        section(
            "What was served",
            table(
                ["rank", "experts in VRAM", "in VRAM", "in host RAM", "tokens", "coverage", "read through", "moves", "moved"],
                [[name, *_served(rank)] for name, rank in zip(names, ranks, strict=True)],
            ),
            element(
                "p",
                "Coverage: the share of routed tokens, prefill and decode, whose expert was in VRAM. Read through: bytes of "
                "offloaded experts that steps read over the link, each expert once a step; a prefill may read it more often.",
            ),
            *_notes(info),
        ),
        section("Where the experts are", _map(info)),
        section("Coverage over time", *_over_time(drawn)),
        section("Bytes over the link", _bytes_over_time(drawn)),
        section("Moves", _moves_over_time(drawn)),
        section("What another budget would cover", *_curve_chart(ranks, curve)),
        section("Coverage of each layer", _layers_chart(ranks)),
    )


def replay_page(replay: ReplayResults, source: str) -> str:
    """The page of a replay: its policies side by side."""
    results = replay.results
    bars = [(result.policy, [result.read_bytes_per_step, result.moved_bytes_per_step]) for result in results]
    scale, unit = _byte_unit(max(sum(values) for _, values in bars))
    milliseconds = [(result.policy, [1e3 * result.step_seconds]) for result in results]
    head = ["policy", "in VRAM", "batch", "coverage", "moves/step", "read/step", "moved/step", "link time/step"]
    return page(
        "What residency policies do with a routing trace",
        facts([("source", source), ("trace", replay.trace)]),
        section("Advice", element("ul", *(element("li", line) for line in replay_advice(results)), class_="advice")),
        section("Results", table(head, [_row(result) for result in results])),
        section("Coverage over time", _spans_chart(results)),
        section("Coverage of each layer", _result_layers_chart(results)),
        section(
            "Bytes over the link",
            bar_chart(
                "Bytes over the link a step",
                _axis(f"{unit} a decode step", max(sum(values) for _, values in bars) / scale),
                [(name, [value / scale for value in values]) for name, values in bars],
                ["read through", "moved"],
            ),
        ),
        section(
            "Time on the link",
            bar_chart(
                "Time on the link a step",
                _axis("ms a decode step, at the replay's bandwidth", max(value for _, (value,) in milliseconds)),
                milliseconds,
                ["time on the link"],
            ),
        ),
    )


def advice(info: ServerInfo) -> list[str]:
    """What follows from the numbers, in short sentences, the most urgent first."""
    ranks = info.ranks
    said = [
        f"Moving experts stopped ({name}): {rank.fault}. Outputs are not affected, but residents change no more: find the "
        "cause, and restart the server."
        for name, rank in zip(_rank_names(info), ranks, strict=True)
        if rank.fault is not None
    ]
    if not any(rank.offloaded_experts for rank in ranks):
        return [*said, "Every expert is in VRAM: offloading does nothing here, and plain SGLang is simpler."]
    if not all(rank.warmup_done for rank in ranks):
        return [*said, "The warm-up is not over: residents are still those of the start. Look again when it is."]
    curve = combined([rank.curve for rank in ranks if rank.curve is not None])
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
    ranks, best = info.ranks, curve.at(_budget(info.ranks), _pooled(info.ranks))
    reached = max(curve.present, _recent(ranks, "touches_resident", "touches") or 0.0)
    gap = best - reached
    compared = (
        f"they cover {_percent(reached)} of what decode steps use, and the best fixed set of this size, in hindsight, "
        f"{_percent(best)}"
    )
    if gap <= NEAR:
        return f"Residents are well chosen: {compared}."
    if gap <= FAR:
        return f"Residents are {_points(gap)} below the best: {compared}."
    if all(rank.adapt == "continuous" for rank in ranks):
        remedy = "The traffic changes faster than residents can pay to follow; a larger budget helps more."
    elif info.internal_states[0].expert_offload_resident_selection != "frequency" or ranks[0].adapt == "off":
        remedy = "They do not follow the traffic: --expert-offload-adapt continuous does."
    else:
        remedy = "--expert-offload-adapt continuous, or a longer warm-up (--expert-offload-warmup-tokens), would choose better."
    return f"Residents are {_points(gap)} below the best: {compared}. {remedy}"


def _other_budgets(info: ServerInfo, curve: Curve) -> list[str]:
    """Whether an eighth of the experts more would be worth its VRAM, and whether as much less would do."""
    now, pooled, step = _budget(info.ranks), _pooled(info.ranks), curve.residents[-1] / 8
    here = curve.at(now, pooled)
    said = []
    more = next((n for n in curve.residents if n >= now + step), curve.residents[-1])
    if more > now:
        gain = curve.at(more, pooled) - here
        price = f"{size((more - now) * _bytes_a_resident(info.ranks))} more VRAM on each rank"
        said.append(
            f"{_flag(info, more)}, for {price}, would {'' if gain >= WORTH else 'only '}have raised the best coverage from "
            f"{_percent(here)} to {_percent(here + gain)}: {_points(gain)}."
        )
    less = next((n for n in reversed(curve.residents) if n <= now - step), None)
    if less is not None and here - curve.at(less, pooled) <= SAME:
        said.append(
            f"{_flag(info, less)} would have lowered the best coverage by {_points(here - curve.at(less, pooled))} only, and "
            f"left {size((now - less) * _bytes_a_resident(info.ranks))} of each rank's VRAM to the KV cache."
        )
    return said


def _layers_differ(ranks: Sequence[Rank], curve: Curve) -> list[str]:
    gain = curve.at(_budget(ranks), True) - curve.at(_budget(ranks), False)
    if gain < LAYERS_DIFFER or _pooled(ranks):
        return []
    return [
        "Layers differ: in the same VRAM, more residents in the layers that use them would have covered "
        f"{_points(gain)} more (--expert-offload-adapt continuous --expert-offload-per-layer global)."
    ]


def _many_moves(ranks: Sequence[Rank]) -> list[str]:
    moved, read = (sum(rank.history.of_late(name) for rank in ranks) for name in ("moved_bytes", "read_through_bytes"))
    if not moved or moved / (moved + read) < MANY_MOVES:
        return []
    if any(rank.adapt == "continuous" for rank in ranks):
        so = "If coverage does not rise with them, --expert-offload-adapt warmup moves nothing after the warm-up."
    else:
        so = "That was the choice after the warm-up: the share falls as the server goes on."
    return [f"Moves are {_percent(moved / (moved + read))} of the bytes over the link in the latest half of the time. {so}"]


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
            f"{least.policy} would take {_percent(share)} less, as a cache that keeps what it reads; no server offers it."
        )
    belady = next((result for result in results if result.policy == "belady"), None)
    if belady is not None and belady.coverage > best.coverage:
        gap = _points(belady.coverage - best.coverage)
        said.append(f"Knowing the future, belady covers {gap} more: an upper bound for residents that change.")
    if best.coverage >= 1:
        said.append("Residents serve everything: a smaller residency may do.")
    return said


def _pooled(ranks: Sequence[Rank]) -> bool:
    """Whether the server spends its budget over all layers together."""
    return all(rank.adapt == "continuous" and rank.per_layer == "global" for rank in ranks)


def _budget(ranks: Sequence[Rank]) -> float:
    """Routed residents a layer on each rank, in the mean over the layers that can be offloaded."""
    counts = [len(routed) for rank in ranks for layer, routed in _routed_residents(rank) if layer.expert_bytes]
    return sum(counts) / len(counts) if counts else 0.0


def _routed_residents(rank: Rank) -> list[tuple[Layer, list[int]]]:
    """Each layer with the ids of its residents that are no shared experts."""
    pairs = zip(rank.layers, rank.resident_ids, strict=True)
    return [(layer, [i for i in ids if i < layer.first_expert + layer.experts]) for layer, ids in pairs]


def _bytes_a_resident(ranks: Sequence[Rank]) -> float:
    """VRAM on a rank for one more resident in each of its layers."""
    return sum(layer.expert_bytes for rank in ranks for layer in rank.layers) / len(ranks)


def _flag(info: ServerInfo, residents: int) -> str:
    """The flag that keeps so many residents a layer on each rank: N counts over expert-parallel ranks."""
    return f"--expert-offload-num-resident {residents * info.internal_states[0].ep_size}"


def _recent(ranks: Sequence[Rank], part: str, whole: str) -> float | None:
    counted = sum(rank.history.of_late(whole) for rank in ranks)
    return sum(rank.history.of_late(part) for rank in ranks) / counted if counted else None


# Parts of the server's page


def _facts(info: ServerInfo, source: str) -> Element:
    state, rank = info.internal_states[0], info.ranks[0]
    pairs = [
        ("source", source),
        ("model", info.model_path),
        ("SGLang", info.version),
        ("--expert-offload-num-resident", str(state.expert_offload_num_resident)),
        ("resident selection, adapt, per layer", f"{state.expert_offload_resident_selection}, {rank.adapt}, {rank.per_layer}"),
        ("ranks", f"TP {state.tp_size}, PP {state.pp_size}, EP {state.ep_size}, DP {state.dp_size}"),
        ("backend", rank.backend),
    ]
    return facts(pairs)


def _notes(info: ServerInfo) -> list[Element]:
    """What the figures leave out or only stand for."""
    state, notes = info.internal_states[0], []
    if any(rank.backend == "host" for rank in info.ranks):
        notes.append(
            "The host backend emulates unified memory on a machine without a GPU: VRAM is host memory there, and bytes over "
            "the link are those that a GPU would have read."
        )
    replicas = 1 if state.enable_dp_attention else state.dp_size
    if state.tp_size * state.pp_size * replicas > len(info.ranks):
        notes.append(
            "SGLang shows the first rank of each data-parallel rank. Ranks that share experts have the same residents, and "
            "each reads as much over its own link; the experts of other expert-parallel ranks, and the layers of other "
            "pipeline stages, are not in these figures."
        )
    if len(info.ranks) > RANKS_DRAWN:
        notes.append(f"Pictures over time show the first {RANKS_DRAWN} of {len(info.ranks)} ranks.")
    return [element("p", note) for note in notes]


def _served(rank: Rank) -> list[str]:
    past, experts = rank.history, rank.resident_experts + rank.offloaded_experts
    return [
        f"{rank.resident_experts} of {experts}",
        size(rank.resident_bytes),
        size(rank.offloaded_bytes),
        str(rank.tokens),
        _percent(past.routed_resident[-1] / past.routed[-1]) if past.routed[-1] else "not counted",
        size(past.read_through_bytes[-1]),
        str(past.moves[-1]),
        size(past.moved_bytes[-1]),
    ]


def _map(info: ServerInfo) -> Element:
    """Layers x experts over all ranks that are shown; fused shared experts stand behind the routed ones."""
    ranks = info.ranks
    ids = sorted({layer.layer for rank in ranks for layer in rank.layers})
    rows = {layer: row for row, layer in enumerate(ids)}
    held = [layer for rank in ranks for layer in rank.layers]
    routed = max((max(la.first_expert + la.experts, la.experts * info.internal_states[0].ep_size) for la in held), default=0)
    routed = min(routed, MAX_EXPERTS)
    known, resident = np.zeros((2, len(ids), routed), dtype=np.int32)
    shared = np.full((len(ids), max((layer.shared_experts for layer in held), default=0)), -1, dtype=np.int8)
    for rank in ranks:
        for layer, in_vram in _routed_residents(rank):
            known[rows[layer.layer], layer.first_expert : layer.first_expert + layer.experts] += 1
            resident[rows[layer.layer], in_vram] += 1
            shared[rows[layer.layer], : layer.shared_experts] = SHARED
    cells = np.select([known == 0, resident == known, resident == 0], [NOT_SHOWN, IN_VRAM, IN_HOST], PARTLY)
    title = "Residency of each expert of each layer"
    return cell_map(title, "expert", "decoder layer", [str(i) for i in ids], np.concatenate([cells, shared], axis=1), KINDS)


IN_VRAM, IN_HOST, PARTLY, NOT_SHOWN, SHARED = range(5)
KINDS = (
    ("in VRAM", "#0072b2"),
    ("in host RAM", "#dbe2e8"),
    ("in VRAM on some replicas", "#7fb5d8"),
    ("on a rank that SGLang does not show", "#f6f1d3"),
    ("shared expert, always in VRAM", "#e69f00"),
)


def _over_time(ranks: Sequence[tuple[str, Rank]]) -> list[Element]:
    lines = []
    for name, rank in ranks:
        past = rank.history
        lines.append(Line(_of("routed tokens", name, ranks), _percents(past.rates("routed_resident", "routed"))))
        reads = _percents(past.rates("touches_resident", "touches"))
        lines.append(Line(_of("uses in decode steps", name, ranks), reads, dashed=True))
    note = "An offloaded expert is read once by each decode step that uses it, however many of its tokens do: the dashed line."
    return [_time_chart("Coverage over time", ranks, PERCENT, lines), element("p", note)]


def _bytes_over_time(ranks: Sequence[tuple[str, Rank]]) -> Element:
    lines = []
    for name, rank in ranks:
        lines.append(Line(_of("read through", name, ranks), rank.history.rates("read_through_bytes", "steps")))
        lines.append(Line(_of("moved", name, ranks), rank.history.rates("moved_bytes", "steps"), dashed=True))
    most = max((y for line in lines for _, y in line.points if y is not None), default=0.0)
    scale, unit = _byte_unit(most)
    scaled = [replace(line, points=[(x, None if y is None else y / scale) for x, y in line.points]) for line in lines]
    return _time_chart("Bytes over the link a step", ranks, _axis(f"{unit} a step", most / scale), scaled)


def _moves_over_time(ranks: Sequence[tuple[str, Rank]]) -> Element:
    label = "experts brought to VRAM since the start"
    lines = [
        Line(_of(label, name, ranks), list(zip(rank.history.seconds, rank.history.moves, strict=True))) for name, rank in ranks
    ]
    most = max(rank.history.moves[-1] for _, rank in ranks)
    return _time_chart("Moves", ranks, _axis("experts", most, whole=True), lines)


def _time_chart(title: str, ranks: Sequence[tuple[str, Rank]], y: Axis, lines: Sequence[Line]) -> Element:
    """Lines whose x is in seconds."""
    end = max(rank.history.seconds[-1] for _, rank in ranks)
    units = ((2 * 86400, 86400.0, "days"), (2 * 3600, 3600.0, "hours"), (120, 60.0, "minutes"))
    scale, unit = next(((scale, unit) for least, scale, unit in units if end >= least), (1.0, "seconds"))
    x = Axis(f"{unit} since the model was loaded", 0, end / scale or 1)
    return line_chart(title, x, y, [replace(line, points=[(at / scale, value) for at, value in line.points]) for line in lines])


def _curve_chart(ranks: Sequence[Rank], curve: Curve | None) -> list[Element]:
    if curve is None:
        return [element("p", "No decode step was counted, so there is nothing to tell.")]
    grid, now = curve.residents, _budget(ranks)
    served = _recent(ranks, "touches_resident", "touches")
    lines = [
        Line("as many in each layer (uniform)", _percents(zip(grid, curve.uniform, strict=True))),
        Line("one ranking of all layers (global)", _percents(zip(grid, curve.pooled, strict=True)), dashed=True),
        Line("the residents of now", [(n, 100 * curve.present) for n in grid], dashed=True),
        Line("served in the latest half of the time", _percents((n, served) for n in grid), dashed=True),
    ]
    x = Axis("residents a layer on each rank", 0, grid[-1], whole=True)
    note = (
        f"Of {curve.touches} uses of experts in {curve.decode_steps} decode steps, the share that the best fixed residents "
        "would have served. They are chosen in hindsight from the same steps, so that the curves are upper bounds for a fixed "
        "set; residents that follow the traffic can lie above them. Shared experts are left out."
    )
    return [line_chart("Coverage by budget", x, PERCENT, lines, [(now, f"now: {now:.4g}")]), element("p", note)]


def _layers_chart(ranks: Sequence[Rank]) -> Element:
    """Over all ranks that are shown."""
    total: dict[int, tuple[int, int]] = {}
    for layer in (layer for rank in ranks for layer in rank.layers):
        served, routed = total.get(layer.layer, (0, 0))
        total[layer.layer] = (served + layer.routed_resident, routed + layer.routed)
    ids = sorted(total)
    values = [100 * total[i][0] / total[i][1] if total[i][1] else None for i in ids]
    return column_chart("Coverage of each layer", "decoder layer", [str(i) for i in ids], PERCENT, values)


def _rank_names(info: ServerInfo) -> list[str]:
    return [f"DP rank {index}" for index in range(len(info.ranks))] if len(info.ranks) > 1 else ["rank 0"]


def _of(what: str, name: str, ranks: Sequence[tuple[str, Rank]]) -> str:
    return what if len(ranks) == 1 else f"{what}, {name}"


# Parts of a replay's page


def _row(result: Result) -> list[str]:
    return [
        result.policy,
        _percent(result.residency),
        str(result.batch),
        _percent(result.coverage),
        f"{result.moves_per_step:.3f}",
        size(result.read_bytes_per_step),
        size(result.moved_bytes_per_step),
        f"{1e3 * result.step_seconds:.3f} ms",
    ]


def _spans_chart(results: Sequence[Result]) -> Element:
    lines = []
    for result in results:
        spans = result.coverage_over_time
        points = _percents((100 * (index + 0.5) / len(spans), share) for index, share in enumerate(spans))
        lines.append(Line(result.policy, points, dashed=result.policy in AHEAD))
    return line_chart("Coverage over time", Axis("% of the scored steps", 0, 100), PERCENT, lines)


def _result_layers_chart(results: Sequence[Result]) -> Element:
    lines = [
        Line(result.policy, _percents(enumerate(result.per_layer_coverage)), dashed=result.policy in AHEAD)
        for result in results
    ]
    last = max(len(result.per_layer_coverage) for result in results) - 1
    return line_chart("Coverage of each layer", _axis("MoE layer", last, whole=True), PERCENT, lines)


# What both pages are made of


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"


def _percents(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    return [(x, None if share is None else 100 * share) for x, share in points]


def _axis(label: str, most: float, whole: bool = False) -> Axis:
    """From 0 to what shows ``most``."""
    return Axis(label, 0, 1.05 * most if most > 0 else 1, whole)


def _byte_unit(most: float) -> tuple[float, str]:
    return (2.0**30, "GiB") if most >= 2**30 else (2.0**20, "MiB") if most >= 2**20 else (2.0**10, "KiB")
