"""The report on a replay: residency policies over one routing trace, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sglang_uvm_offload.replay.results import Replay, Scope
from sglang_uvm_offload.report.advice import replay_advice
from sglang_uvm_offload.report.charts import Chart, Line, bar_chart, line_chart, picture
from sglang_uvm_offload.report.html import document, element, facts, items, section, table, written
from sglang_uvm_offload.report.source import ReplayResults
from sglang_uvm_offload.report.units import PERCENT, Axis, axis_to, byte_unit, percent, percents
from sglang_uvm_offload.units import size

FEW_LAYERS = 12
"""With at most this many layers, each is a point: a line between two would look like a trend."""


def replay_report(replay: ReplayResults, source: str) -> str:
    """The report on a replay, as HTML."""
    results = replay.results
    headline, *more = replay_advice(results)
    bars = [(result.policy, [result.read_bytes_per_step, result.moved_bytes_per_step]) for result in results]
    scale, unit = byte_unit(max(sum(values) for _, values in bars))
    milliseconds = [(result.policy, [1e3 * result.step_seconds]) for result in results]
    head = ["policy", "hit rate", "link time/step", "moves/step", "read/step", "moved/step"]
    shared = [("in VRAM", f"{percent(results[0].residency)} of each layer's experts"), ("batch", str(results[0].batch))]
    return document(
        "Residency policies over a routing trace",
        element("p", headline, class_="headline"),
        *([items(more)] if more else []),
        facts([("source", source), ("written", written()), ("trace", replay.trace), *shared, *_scored(replay.scored)]),
        section("Results", table(head, [_row(result) for result in results])),
        section("Hit rate over time", picture(_spans_chart(results))),
        section("Hit rate of each layer", picture(_layers_chart(results))),
        section(
            "Bytes over the link",
            picture(
                partial(
                    bar_chart,
                    "Bytes over the link a step",
                    axis_to(f"{unit} a decode step", max(sum(values) for _, values in bars) / scale),
                    [(name, [value / scale for value in values]) for name, values in bars],
                    ["zero-copy", "moved"],
                )
            ),
        ),
        section(
            "Time on the link",
            picture(
                partial(
                    bar_chart,
                    "Time on the link a step",
                    axis_to("ms a decode step", max(value for _, (value,) in milliseconds)),
                    milliseconds,
                    ["time on the link"],
                )
            ),
        ),
    )


def _scored(scored: Scope | None) -> list[tuple[str, str]]:
    if scored is None:
        return []
    link, expert = (", assumed" if assumed else "" for assumed in (scored.link_assumed, scored.expert_bytes_assumed))
    return [
        ("scored", f"{scored.requests} requests in {scored.steps} decode steps"),
        ("warm-up", f"{scored.warmup_requests} requests in {scored.warmup_steps} decode steps"),
        ("link", f"{scored.link_gbps:g} GB/s{link}"),
        ("an expert", f"{size(scored.expert_bytes)}{expert}"),
    ]


def _row(result: Replay) -> list[str]:
    return [
        result.policy,
        percent(result.hit_rate),
        f"{1e3 * result.step_seconds:.3f} ms",
        f"{result.moves_per_step:.3f}",
        size(result.read_bytes_per_step),
        size(result.moved_bytes_per_step),
    ]


def _spans_chart(results: Sequence[Replay]) -> Chart:
    lines = []
    for result in results:
        spans = result.hit_rate_over_time
        points = percents((100 * (index + 0.5) / len(spans), share) for index, share in enumerate(spans))
        lines.append(Line(result.policy, points))
    return partial(line_chart, "Hit rate over time", Axis("% of the scored steps", 0, 100), PERCENT, lines)


def _layers_chart(results: Sequence[Replay]) -> Chart:
    last = max(len(result.per_layer_hit_rate) for result in results) - 1
    few = last < FEW_LAYERS
    layers = Axis("MoE layer", -0.5, last + 0.5, whole=True) if few else axis_to("MoE layer", last, whole=True)
    lines = [Line(result.policy, percents(enumerate(result.per_layer_hit_rate)), joined=not few) for result in results]
    return partial(line_chart, "Hit rate of each layer", layers, PERCENT, lines)
