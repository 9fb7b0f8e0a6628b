"""The report on a server: where its experts were served from. It turns data into one self-contained HTML page.

The data come from outside. They are checked when they are decoded, and their texts become nodes of a tree, so they cannot
become markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from xml.etree.ElementTree import Element

import msgspec
import numpy as np

from sglang_uvm_offload.replay.policies import LINK_GBPS
from sglang_uvm_offload.report.advice import advice, alerts
from sglang_uvm_offload.report.charts import Chart, Line, cell_map, column_chart, line_chart, picture
from sglang_uvm_offload.report.headline import headline
from sglang_uvm_offload.report.html import Child, document, element, explained, facts, folded, items, section, table, written
from sglang_uvm_offload.report.source import ServerInfo, budget, decode_hit_rate, hit_rate, slots_a_layer
from sglang_uvm_offload.report.units import LEAST, PERCENT, Axis, axis_to, byte_unit, duration, percent, percents
from sglang_uvm_offload.residency.history import Curve, Past, ProfileVerdict
from sglang_uvm_offload.residency.status import (
    MAX_EXPERTS,
    LayerStatus,
    RankStatus,
    SlotStatus,
    TraceStatus,
    described,
)
from sglang_uvm_offload.units import size

RANKS_DRAWN = 8
SAMPLES_OF_SEVERAL = 60


def server_report(info: ServerInfo, source: str) -> str:
    """The report on a server; ``info`` has at least one rank."""
    ranks, names = info.ranks, info.rank_names
    drawn = [(name, _drawn(rank, len(ranks))) for name, rank in zip(names[:RANKS_DRAWN], ranks, strict=False)]
    more = advice(info)
    return document(
        "Where experts were served from",
        *(element("p", alert, class_="alert") for alert in alerts(info)),
        element("p", headline(info), class_="headline"),
        *([items(more)] if more else []),
        *_facts(info, source),
        section("Totals", _totals(info), *_notes(info)),
        section("Where the experts are", picture(_map(info))),
        section("Hit rate over time", *_over_time(drawn)),
        section("Bytes over the link", picture(_bytes_over_time(drawn))),
        section("Moves", picture(_moves_over_time(drawn))),
        section("Hit rate by budget", *_curve_chart(ranks, info.curve)),
        section("Hit rate of each layer", picture(_layers_chart(ranks))),
    )


def _drawn(rank: RankStatus, ranks: int) -> RankStatus:
    """The rank with as few samples as its line needs to be legible beside those of other ranks."""
    if ranks == 1:
        return rank
    step = -(-len(rank.history.seconds) // SAMPLES_OF_SEVERAL)
    columns = [getattr(rank.history, name) for name in Past.__struct_fields__]
    return msgspec.structs.replace(rank, history=Past(*(column[:-1:step] + column[-1:] for column in columns)))


def _facts(info: ServerInfo, source: str) -> list[Element]:
    state, rank = info.internal_states[0], info.ranks[0]
    pairs = [
        ("source", source),
        ("written", written()),
        ("model", info.model_path),
        ("SGLang", info.version),
        *([("sglang-uvm-offload", rank.plugin_version)] if rank.plugin_version else []),
        ("model loaded", f"{duration(rank.history.seconds[-1])} before"),
        ("--expert-offload-num-resident", str(state.expert_offload_num_resident)),
        ("resident selection, adapt", f"{state.expert_offload_resident_selection}, {rank.adapt}{_paused(info.ranks)}"),
        ("ranks", f"TP {state.tp_size}, PP {state.pp_size}, EP {state.ep_size}, DP {state.dp_size}"),
        ("backend", rank.backend),
    ]
    each = [_rank_facts(found) for found in info.ranks]
    differing = []
    for what in dict.fromkeys(what for found in each for what in found):
        if all(found.get(what) == each[0].get(what) for found in each):
            pairs.append((what, each[0][what]))
        else:
            named = zip(info.rank_names, each, strict=True)
            differing += [(f"{what}, {name}", found[what]) for name, found in named if what in found]
    return [facts(pairs), *([folded("What differs between ranks", facts(differing))] if differing else [])]


def _rank_facts(rank: RankStatus) -> dict[str, str]:
    """Facts about one rank: its slots, profile, link and so on, by name."""
    found = {}
    if rank.slots is not None:
        found["slots"] = _slots(rank.slots)
    if rank.lookahead is not None:
        found["look-ahead"] = str(rank.lookahead)
    if rank.profile is not None:
        found["profile"] = _profile(rank.profile)
    if rank.link is not None:
        found["link"] = "; ".join([rank.link.verdict(), *rank.link.because])
    if rank.start:
        found["start"] = described(rank.start)
    if rank.trace is not None:
        found["trace"] = _trace(rank.trace)
    return found


def _paused(ranks: Sequence[RankStatus]) -> str:
    return " (paused by an operator)" if any(rank.paused for rank in ranks) else ""


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
    """Notes on what the figures leave out or approximate."""
    state, notes = info.internal_states[0], []
    if any(rank.backend == "emulated" for rank in info.ranks):
        notes.append(
            "The emulated backend replaces unified memory on a machine without a GPU: VRAM is host memory, and bytes over the "
            "link are those that a GPU would have read."
        )
    replicas = 1 if state.enable_dp_attention else state.dp_size
    if state.tp_size * state.pp_size * replicas > len(info.ranks):
        notes.append(
            f"{'Ranks of other nodes, and those that did not answer,' if info.all_ranks else 'Other ranks'} are not included. "
            "Ranks that share experts have the same residents, and each reads as much over its own link. The experts of other "
            "expert-parallel ranks and the layers of other pipeline stages are missing here."
        )
    if len(info.ranks) > RANKS_DRAWN:
        notes.append(f"Charts over time show the first {RANKS_DRAWN} of {len(info.ranks)} ranks.")
    return [element("p", note) for note in notes]


def _totals(info: ServerInfo) -> Element:
    """A row for each figure, a column for each rank."""
    ranks = info.ranks
    rows: list[list[Child]] = [
        [explained(name, meaning) if meaning else name, *map(figure, ranks)] for name, meaning, figure in _figures(ranks)
    ]
    return table(["", *info.rank_names] if len(ranks) > 1 else [], rows)


def _figures(ranks: Sequence[RankStatus]) -> list[tuple[str, str, Callable[[RankStatus], str]]]:
    """Each figure's name and meaning, and what it is for one rank."""
    slots = any(rank.slots is not None for rank in ranks)
    return [
        ("experts in VRAM", "", lambda rank: f"{rank.resident_experts} of {rank.num_experts}"),
        ("their bytes", "", lambda rank: size(rank.resident_bytes)),
        (
            "reclaimable",
            "VRAM that the driver keeps for experts that left it, until something needs it.",
            lambda rank: "not counted" if rank.reclaimable_bytes is None else f"at most {size(rank.reclaimable_bytes)}",
        ),
        ("experts in host RAM", "", lambda rank: size(rank.offloaded_bytes)),
        ("tokens", "", lambda rank: str(rank.tokens)),
        (
            "hit rate",
            "The share of routed tokens, prefill and decode, whose expert was in VRAM, resident or in a slot.",
            lambda rank: _share(hit_rate(rank.history.routed_resident[-1], rank.history.routed[-1])),
        ),
        (
            "hit rate of bytes",
            "The share of the bytes of the experts that steps used in place, each expert once a step, that was in VRAM.",
            lambda rank: _share(rank.byte_hit_rate),
        ),
        (
            "zero-copy reads",
            "Bytes of offloaded experts that steps read in place over the link, each expert once a step; a prefill may read "
            "one more often.",
            lambda rank: size(rank.history.zero_copy_bytes[-1]),
        ),
        (
            "streamed",
            "Bytes of offloaded experts that were copied over the link into VRAM for steps with many tokens, each byte once a "
            "step.",
            lambda rank: size(rank.history.streamed_bytes[-1]),
        ),
        *(
            [
                (
                    "copied into slots",
                    "Bytes of offloaded experts that steps copied over the link into slots, where later steps read them.",
                    lambda rank: size(rank.history.filled_bytes[-1]),
                )
            ]
            if slots
            else []
        ),
        (
            "moves",
            "Promotions from host RAM to VRAM, of neighbouring blocks together.",
            lambda rank: str(rank.history.moves[-1]),
        ),
        ("moved", "", lambda rank: size(rank.history.moved_bytes[-1])),
        (
            "link time, estimated",
            f"The time of all these bytes {_link_rate(ranks)}.",
            lambda rank: f"{_link_seconds(rank):.3g} s",
        ),
        ("link time a step", "", _link_seconds_a_step),
    ]


def _share(share: float | None) -> str:
    return "not counted" if share is None else percent(share)


def _link_rate(ranks: Sequence[RankStatus]) -> str:
    if all(rank.link for rank in ranks):
        return "at the rate that the server measured for scattered reads when it started"
    return f"at an assumed {LINK_GBPS:g} GB/s (PCIe 5 x16; PCIe 4 takes about twice as long) where the server measured no rate"


LINK_COLUMNS = ("zero_copy_bytes", "streamed_bytes", "filled_bytes", "moved_bytes")
"""The totals of bytes that crossed the link."""


def _link_seconds(rank: RankStatus) -> float:
    """The link time since the model was loaded."""
    gbps = LINK_GBPS if rank.link is None else rank.link.measured.together.scattered
    return sum(getattr(rank.history, name)[-1] for name in LINK_COLUMNS) / (gbps * 1e9)


def _link_seconds_a_step(rank: RankStatus) -> str:
    steps = rank.history.steps[-1]
    return f"{1e3 * _link_seconds(rank) / steps:.3g} ms" if steps else "no steps"


def _map(info: ServerInfo) -> Chart:
    """Where each layer's experts are, over all ranks; fused shared experts come after the routed ones."""
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
    every = np.concatenate([cells, shared], axis=1)
    return partial(cell_map, title, "expert", "decoder layer", [str(i) for i in ids], every, KINDS)


def _routed_experts(layer: LayerStatus, ep_size: int) -> int:
    """The routed experts of the whole layer, as far as one rank shows them."""
    return max(max(layer.ids, default=-1) + 1, 0 if layer.expert_ids else layer.experts * ep_size)


IN_VRAM, IN_HOST, PARTLY, NOT_SHOWN, SHARED = range(5)
KINDS = (
    ("in VRAM", "#0072b2"),
    ("in host RAM", "#dbe2e8"),
    ("in VRAM in part, or on some replicas", "#7fb5d8"),
    ("on a rank that is not included", "#f6f1d3"),
    ("shared expert, always in VRAM", "#e69f00"),
)


def _over_time(ranks: Sequence[tuple[str, RankStatus]]) -> list[Element]:
    """A single rank has two lines, by routed tokens and by uses; several ranks have one each, by routed tokens."""
    lines = [Line(name, percents(rank.history.rates("routed_resident", "routed"))) for name, rank in ranks]
    note = "The share of routed tokens whose expert was in VRAM."
    if len(ranks) == 1:
        uses = percents(ranks[0][1].history.rates("activations_resident", "activations"))
        lines = [replace(lines[0], label="routed tokens"), Line("uses in decode steps", uses)]
        note = "A decode step uses an expert once, however many of its tokens go there."
    return [picture(_time_chart("Hit rate over time", ranks, PERCENT, lines)), element("p", note)]


def _bytes_over_time(ranks: Sequence[tuple[str, RankStatus]]) -> Chart:
    """A single rank has a line for each kind of bytes; several ranks have one each, for all bytes."""
    if len(ranks) == 1:
        ((_, rank),) = ranks
        kinds = {"zero-copy reads": "zero_copy_bytes", "streamed": "streamed_bytes"}
        kinds |= {} if rank.slots is None else {"copied into slots": "filled_bytes"}
        kinds |= {"moved": "moved_bytes"}
        lines = [Line(kind, rank.history.rates(column, "steps")) for kind, column in kinds.items()]
    else:
        lines = [Line(name, _link_rates(rank)) for name, rank in ranks]
    most = max((y for line in lines for _, y in line.points if y is not None), default=0.0)
    scale, unit = byte_unit(most)
    scaled = [replace(line, points=[(x, None if y is None else y / scale) for x, y in line.points]) for line in lines]
    return _time_chart("Bytes over the link a step", ranks, axis_to(f"{unit} a step", most / scale), scaled)


def _link_rates(rank: RankStatus) -> list[tuple[float, float | None]]:
    """``(seconds, bytes over the link a step)``"""
    columns = zip(*(rank.history.rates(name, "steps") for name in LINK_COLUMNS), strict=True)
    return [(points[0][0], None if points[0][1] is None else sum(y for _, y in points if y is not None)) for points in columns]


def _moves_over_time(ranks: Sequence[tuple[str, RankStatus]]) -> Chart:
    lines = [Line(name, list(zip(rank.history.seconds, rank.history.moves, strict=True))) for name, rank in ranks]
    most = max(rank.history.moves[-1] for _, rank in ranks)
    return _time_chart("Moves", ranks, axis_to("moves since the start", most, whole=True), lines)


def _time_chart(title: str, ranks: Sequence[tuple[str, RankStatus]], y: Axis, lines: Sequence[Line]) -> Chart:
    """A chart of ``lines``, whose x is in seconds, in the unit that fits the longest."""
    end = max(rank.history.seconds[-1] for _, rank in ranks)
    units = ((2 * 86400, 86400.0, "days"), (2 * 3600, 3600.0, "hours"), (120, 60.0, "minutes"))
    scale, unit = next(((scale, unit) for least, scale, unit in units if end >= least), (1.0, "seconds"))
    x = Axis(f"{unit} since the model was loaded", 0, end / scale if end > LEAST else 1)
    scaled = [replace(line, points=[(at / scale, value) for at, value in line.points]) for line in lines]
    return partial(line_chart, title, x, y, scaled)


def _curve_chart(ranks: Sequence[RankStatus], curve: Curve | None) -> list[Element]:
    if curve is None:
        return [element("p", "No decode step was counted yet.")]
    grid, now = curve.residents, budget(ranks) + slots_a_layer(ranks)
    served = decode_hit_rate(ranks)
    lines = [
        Line("best fixed, as many in each layer", percents(zip(grid, curve.uniform, strict=True))),
        Line("best fixed, over all layers", percents(zip(grid, curve.pooled, strict=True))),
        Line("the current residents", [(n, 100 * curve.present) for n in grid]),
        Line("served so far", percents((n, served) for n in grid)),
    ]
    x = Axis("experts a layer in VRAM on each rank", 0, grid[-1], whole=True)
    note = (
        f"The share of {curve.activations} activations in {curve.decode_steps} decode steps that the best fixed choices would "
        "have served. They are made in hindsight, from the same steps, so no fixed choice does better; experts in VRAM that "
        "follow the traffic can. Shared experts are left out."
    )
    chart = partial(line_chart, "Hit rate by budget", x, PERCENT, lines, [(now, f"now: {now:.4g}")])
    return [picture(chart), element("p", note)]


def _layers_chart(ranks: Sequence[RankStatus]) -> Chart:
    """The hit rates over all ranks."""
    total: dict[int, tuple[int, int]] = {}
    for layer in (layer for rank in ranks for layer in rank.layers):
        served, routed = total.get(layer.layer, (0, 0))
        total[layer.layer] = (served + layer.routed_resident, routed + layer.routed)
    ids = sorted(total)
    values = [None if (rate := hit_rate(*total[i])) is None else 100 * rate for i in ids]
    return partial(column_chart, "Hit rate of each layer", "decoder layer", [str(i) for i in ids], PERCENT, values)
