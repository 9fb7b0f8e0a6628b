"""The report on a server: where its experts were served from. Data in, one self-contained HTML text out.

The data come from outside. They are checked when decoded, and their texts become nodes of a tree, so they cannot become
markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from xml.etree.ElementTree import Element

import numpy as np
from matplotlib.figure import Figure

from sglang_uvm_offload.replay.policies import LINK_GBPS
from sglang_uvm_offload.report.advice import advice
from sglang_uvm_offload.report.charts import Line, cell_map, column_chart, line_chart, picture
from sglang_uvm_offload.report.html import document, element, facts, items, section, table, written
from sglang_uvm_offload.report.source import ServerInfo, budget, recent_hit_rate
from sglang_uvm_offload.report.units import LEAST, PERCENT, Axis, axis_to, byte_unit, duration, percent, percents
from sglang_uvm_offload.residency.history import Curve, ProfileVerdict
from sglang_uvm_offload.residency.status import (
    MAX_EXPERTS,
    LayerStatus,
    RankStatus,
    SlotStatus,
    TraceStatus,
    described,
)
from sglang_uvm_offload.units import size

RANKS_DRAWN = 4


def server_report(info: ServerInfo, source: str) -> str:
    """The report on a server; ``info`` has at least one rank."""
    ranks, names = info.ranks, info.rank_names
    drawn = list(zip(names, ranks, strict=True))[:RANKS_DRAWN]
    verdict, *more = advice(info)
    return document(
        "Where experts were served from",
        element("p", verdict, class_="verdict"),
        _facts(info, source),
        *([section("Advice", items(more))] if more else []),
        section(
            "Totals",
            table(
                [
                    "rank",
                    "experts in VRAM",
                    "in VRAM",
                    "reclaimable",
                    "in host RAM",
                    "tokens",
                    "hit rate",
                    "of bytes",
                    "zero-copy reads",
                    "streamed",
                    "into slots",
                    "moves",
                    "moved",
                    "link time, estimated",
                ],
                [[name, *_served(rank)] for name, rank in zip(names, ranks, strict=True)],
            ),
            element(
                "p",
                "Hit rate: the share of routed tokens, prefill and decode, whose expert was in VRAM, resident or in a slot. "
                "Reclaimable: VRAM that the driver keeps for experts that left it, until something needs it. "
                "Zero-copy reads: bytes of offloaded experts that steps read in place over the link, each expert once a step; "
                "a prefill may read one more often. Streamed: bytes of offloaded experts that were copied over the link into "
                "VRAM for steps with many tokens, each byte once a step. Into slots: bytes of offloaded experts that steps "
                "copied over the link into slots, where later steps read them. Link time: of all these bytes and those moved, "
                f"{_link_rate(ranks)}.",
            ),
            *_notes(info),
        ),
        section("Where the experts are", picture(_map(info))),
        section("Hit rate over time", *_over_time(drawn)),
        section("Bytes over the link", picture(_bytes_over_time(drawn))),
        section("Moves", picture(_moves_over_time(drawn))),
        section("Hit rate by budget", *_curve_chart(ranks, info.curve)),
        section("Hit rate of each layer", picture(_layers_chart(ranks))),
    )


def _facts(info: ServerInfo, source: str) -> Element:
    state, rank = info.internal_states[0], info.ranks[0]
    pairs = [
        ("source", source),
        ("written", written()),
        ("model", info.model_path),
        ("SGLang", info.version),
        *([("sglang-uvm-offload", rank.plugin_version)] if rank.plugin_version else []),
        ("model loaded", f"{duration(rank.history.seconds[-1])} before"),
        ("--expert-offload-num-resident", str(state.expert_offload_num_resident)),
        ("resident selection, adapt", f"{state.expert_offload_resident_selection}, {rank.adapt}"),
        ("ranks", f"TP {state.tp_size}, PP {state.pp_size}, EP {state.ep_size}, DP {state.dp_size}"),
        ("backend", rank.backend),
    ]
    for name, shown in zip(info.rank_names, info.ranks, strict=True):
        if shown.slots is not None:
            pairs.append((_of("slots", name, info.ranks), _slots(shown.slots)))
        if shown.lookahead is not None:
            pairs.append((_of("look-ahead", name, info.ranks), str(shown.lookahead)))
        if shown.profile is not None:
            pairs.append((_of("profile", name, info.ranks), _profile(shown.profile)))
        if shown.link is not None:
            pairs.append((_of("link", name, info.ranks), "; ".join([shown.link.verdict(), *shown.link.because])))
        if shown.start:
            pairs.append((_of("start", name, info.ranks), described(shown.start)))
        if shown.trace is not None:
            pairs.append((_of("trace", name, info.ranks), _trace(shown.trace)))
    return facts(pairs)


def _slots(slots: SlotStatus) -> str:
    used = slots.hits + slots.fills + slots.bypasses
    text = f"{slots.a_layer} a layer"
    if used:
        shares = (percent(part / used) for part in (slots.hits, slots.fills, slots.bypasses))
        text += ": of the uses of offloaded experts, {} were served by a slot, {} filled one, {} were read in place".format(
            *shares
        )
    if slots.brought:
        text += f"; {slots.brought} experts came into slots ahead of prompts"
    return text + ("" if slots.missing is None else f"; {slots.missing} has no rows for them")


def _profile(verdict: ProfileVerdict) -> str:
    return (
        f"hit rate {percent(verdict.hit_rate)} over the first {verdict.tokens} live tokens; the best residents for these "
        f"tokens would have reached {percent(verdict.best)}: "
        f"{'residents kept' if verdict.kept else 'residents were chosen again'}"
    )


def _trace(trace: TraceStatus) -> str:
    text = f"{trace.path}: {trace.tokens} tokens of {trace.requests} requests, {trace.dropped_steps} steps not recorded"
    return text + ("; recording stopped: see the server's log" if trace.stopped else "")


def _notes(info: ServerInfo) -> list[Element]:
    """What the figures leave out or only approximate."""
    state, notes = info.internal_states[0], []
    if any(rank.backend == "emulated" for rank in info.ranks):
        notes.append(
            "The emulated backend replaces unified memory on a machine without a GPU: VRAM is host memory, and bytes over the "
            "link are those that a GPU would have read."
        )
    replicas = 1 if state.enable_dp_attention else state.dp_size
    if state.tp_size * state.pp_size * replicas > len(info.ranks):
        notes.append(
            "SGLang shows the first rank of each data-parallel rank. Ranks that share experts have the same residents, and "
            "each reads as much over its own link. The experts of other expert-parallel ranks and the layers of other "
            "pipeline stages are not included."
        )
    if len(info.ranks) > RANKS_DRAWN:
        notes.append(f"Charts over time show the first {RANKS_DRAWN} of {len(info.ranks)} ranks.")
    return [element("p", note) for note in notes]


def _served(rank: RankStatus) -> list[str]:
    past, experts = rank.history, rank.num_experts
    return [
        f"{rank.resident_experts} of {experts}",
        size(rank.resident_bytes),
        "not counted" if rank.reclaimable_bytes is None else f"at most {size(rank.reclaimable_bytes)}",
        size(rank.offloaded_bytes),
        str(rank.tokens),
        percent(past.routed_resident[-1] / past.routed[-1]) if past.routed[-1] else "not counted",
        percent(rank.byte_hit_rate) if rank.byte_hit_rate is not None else "not counted",
        size(past.zero_copy_bytes[-1]),
        size(past.streamed_bytes[-1]),
        "none" if rank.slots is None else size(past.filled_bytes[-1]),
        str(past.moves[-1]),
        size(past.moved_bytes[-1]),
        _link_time(rank),
    ]


def _link_rate(ranks: Sequence[RankStatus]) -> str:
    if all(rank.link for rank in ranks):
        return "at the rate that the server measured for scattered reads when it started"
    return f"at an assumed {LINK_GBPS:g} GB/s (PCIe 5 x16; PCIe 4 takes about twice as long) where the server measured no rate"


def _link_time(rank: RankStatus) -> str:
    """Since the model was loaded, and on average over steps."""
    past = rank.history
    gbps = LINK_GBPS if rank.link is None else rank.link.measured.together.scattered
    nbytes = past.zero_copy_bytes[-1] + past.streamed_bytes[-1] + past.filled_bytes[-1] + past.moved_bytes[-1]
    seconds = nbytes / (gbps * 1e9)
    each = f", {1e3 * seconds / past.steps[-1]:.3g} ms a step" if past.steps[-1] else ""
    return f"{seconds:.3g} s{each}"


def _map(info: ServerInfo) -> Figure:
    """Layers x experts over all shown ranks; fused shared experts come after the routed ones."""
    ranks = info.ranks
    ids = sorted({layer.layer for rank in ranks for layer in rank.layers})
    index_of = {layer: index for index, layer in enumerate(ids)}
    held = [layer for rank in ranks for layer in rank.layers]
    routed = min(max((_routed_experts(layer, info.internal_states[0].ep_size) for layer in held), default=0), MAX_EXPERTS)
    known, resident = np.zeros((2, len(ids), routed))
    shared = np.full((len(ids), max((layer.shared_experts for layer in held), default=0)), -1, dtype=np.int8)
    for rank in ranks:
        for layer, in_vram, partly in rank.routed_residents:
            index = index_of[layer.layer]
            np.add.at(known[index], layer.ids, 1)
            np.add.at(resident[index], in_vram, 1)
            np.add.at(resident[index], partly, 0.5)
            shared[index, : layer.shared_experts] = SHARED
    cells = np.select([known == 0, resident == known, resident == 0], [NOT_SHOWN, IN_VRAM, IN_HOST], PARTLY)
    title = "Residency of each expert of each layer"
    return cell_map(title, "expert", "decoder layer", [str(i) for i in ids], np.concatenate([cells, shared], axis=1), KINDS)


def _routed_experts(layer: LayerStatus, ep_size: int) -> int:
    """Of the whole layer, as far as one rank shows it."""
    return max(max(layer.ids, default=-1) + 1, 0 if layer.expert_ids else layer.experts * ep_size)


IN_VRAM, IN_HOST, PARTLY, NOT_SHOWN, SHARED = range(5)
KINDS = (
    ("in VRAM", "#0072b2"),
    ("in host RAM", "#dbe2e8"),
    ("in VRAM in part, or on some replicas", "#7fb5d8"),
    ("on a rank that SGLang does not show", "#f6f1d3"),
    ("shared expert, always in VRAM", "#e69f00"),
)


def _over_time(ranks: Sequence[tuple[str, RankStatus]]) -> list[Element]:
    lines = []
    for name, rank in ranks:
        past = rank.history
        lines.append(Line(_of("routed tokens", name, ranks), percents(past.rates("routed_resident", "routed"))))
        reads = percents(past.rates("activations_resident", "activations"))
        lines.append(Line(_of("uses in decode steps", name, ranks), reads, dashed=True))
    note = "Dashed: each decode step reads an offloaded expert once, however many of its tokens use it."
    return [picture(_time_chart("Hit rate over time", ranks, PERCENT, lines)), element("p", note)]


def _bytes_over_time(ranks: Sequence[tuple[str, RankStatus]]) -> Figure:
    lines = []
    for name, rank in ranks:
        lines.append(Line(_of("zero-copy reads", name, ranks), rank.history.rates("zero_copy_bytes", "steps")))
        lines.append(Line(_of("streamed", name, ranks), rank.history.rates("streamed_bytes", "steps")))
        if rank.slots is not None:
            lines.append(Line(_of("into slots", name, ranks), rank.history.rates("filled_bytes", "steps")))
        lines.append(Line(_of("moved", name, ranks), rank.history.rates("moved_bytes", "steps"), dashed=True))
    most = max((y for line in lines for _, y in line.points if y is not None), default=0.0)
    scale, unit = byte_unit(most)
    scaled = [replace(line, points=[(x, None if y is None else y / scale) for x, y in line.points]) for line in lines]
    return _time_chart("Bytes over the link a step", ranks, axis_to(f"{unit} a step", most / scale), scaled)


def _moves_over_time(ranks: Sequence[tuple[str, RankStatus]]) -> Figure:
    label = "promotions since the start"
    lines = [
        Line(_of(label, name, ranks), list(zip(rank.history.seconds, rank.history.moves, strict=True))) for name, rank in ranks
    ]
    most = max(rank.history.moves[-1] for _, rank in ranks)
    return _time_chart("Moves", ranks, axis_to("promotions", most, whole=True), lines)


def _time_chart(title: str, ranks: Sequence[tuple[str, RankStatus]], y: Axis, lines: Sequence[Line]) -> Figure:
    """Lines whose x is in seconds."""
    end = max(rank.history.seconds[-1] for _, rank in ranks)
    units = ((2 * 86400, 86400.0, "days"), (2 * 3600, 3600.0, "hours"), (120, 60.0, "minutes"))
    scale, unit = next(((scale, unit) for least, scale, unit in units if end >= least), (1.0, "seconds"))
    x = Axis(f"{unit} since the model was loaded", 0, end / scale if end > LEAST else 1)
    return line_chart(title, x, y, [replace(line, points=[(at / scale, value) for at, value in line.points]) for line in lines])


def _curve_chart(ranks: Sequence[RankStatus], curve: Curve | None) -> list[Element]:
    if curve is None:
        return [element("p", "No decode step was counted yet.")]
    grid, now = curve.residents, budget(ranks)
    served = recent_hit_rate(ranks)
    lines = [
        Line("as many in each layer (uniform)", percents(zip(grid, curve.uniform, strict=True))),
        Line("one ranking of all layers (global)", percents(zip(grid, curve.pooled, strict=True)), dashed=True),
        Line("the current residents", [(n, 100 * curve.present) for n in grid], dashed=True),
        Line("served in the latest half of the time", percents((n, served) for n in grid), dashed=True),
    ]
    x = Axis("residents a layer on each rank", 0, grid[-1], whole=True)
    note = (
        f"The share of {curve.activations} activations in {curve.decode_steps} decode steps that the best fixed residents "
        "would have served. They are chosen in hindsight from the same steps, so the curves are upper bounds for a fixed set; "
        "residents that follow the traffic can lie above them. Shared experts are left out."
    )
    chart = line_chart("Hit rate by budget", x, PERCENT, lines, [(now, f"now: {now:.4g}")])
    return [picture(chart), element("p", note)]


def _layers_chart(ranks: Sequence[RankStatus]) -> Figure:
    """Over all shown ranks."""
    total: dict[int, tuple[int, int]] = {}
    for layer in (layer for rank in ranks for layer in rank.layers):
        served, routed = total.get(layer.layer, (0, 0))
        total[layer.layer] = (served + layer.routed_resident, routed + layer.routed)
    ids = sorted(total)
    values = [100 * total[i][0] / total[i][1] if total[i][1] else None for i in ids]
    return column_chart("Hit rate of each layer", "decoder layer", [str(i) for i in ids], PERCENT, values)


def _of(what: str, name: str, ranks: Sequence[object]) -> str:
    """``what``, with the name of its rank if several are shown."""
    return what if len(ranks) == 1 else f"{what}, {name}"
