"""The report's charts, drawn by matplotlib: lines, columns, stacked bars, a map of cells. Lengths are CSS pixels."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal
from xml.etree.ElementTree import Element, fromstring

import numpy as np
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis as Ruler
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sglang_uvm_offload.files.reading import printable
from sglang_uvm_offload.report.html import element
from sglang_uvm_offload.report.units import Axis

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#7f3c8d")
"""Of series, in order; distinguishable for colour-blind readers."""
MARKERS = "osD^vPX*"
DASH = 4
"""Of lines that coincide, in multiples of their width."""
WIDTH = 880
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 42
LEGEND_ROW = 20
LONGEST_NAME = 60
GRID, INK = "#dddddd", "#444444"

STYLE: list[str | dict[str, Any]] = [
    "default",
    {
        "svg.fonttype": "none",  # text stays text: it can be searched, and the report stays small
        "svg.hashsalt": "sglang-uvm-offload",  # the same data give the same report
        "text.parse_math": False,  # names come from outside, and a $ in them is a $
        "font.size": 9,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": GRID,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size", "xtick.minor.size", "ytick.minor.size"), 0),
        "legend.frameon": False,
        "lines.linewidth": 1.5,
        "lines.solid_capstyle": "round",
    },
]
"""Applied over the user's matplotlibrc."""


@dataclass(frozen=True)
class Line:
    """A series: ``(x, y)`` in the units of the axes. The line is interrupted where ``y`` is None."""

    label: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False
    joined: bool = True
    """Whether a line joins the points; else each is a marker."""


def picture(figure: Figure) -> Element:
    """The figure as an SVG element, titled by its label."""
    file = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with style.context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has fonts of its own
        figure.savefig(file, format="svg", metadata=nothing)
    svg = fromstring(file.getvalue())
    for node in svg.iter():
        node.tag = node.tag.rpartition("}")[2]
        node.attrib = {name.rpartition("}")[2]: value for name, value in node.attrib.items()}
        if node.tag == "g":
            node.attrib.pop("id", None)  # figure_1, in every picture of the report
    svg.set("role", "img")
    svg.insert(0, element("title", str(figure.get_label())))
    return element("figure", svg)


@style.context(STYLE)
def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line], marks: Sequence[tuple[float, str]] = ()) -> Figure:
    """Lines over a grid with their legend; each of ``marks`` is a vertical line at an x with its name."""
    figure, axes = _figure(title, 260, [line.label for line in lines])
    _rule(axes, x, y)
    styles = _styles(lines)
    for line, line_style in zip(lines, styles, strict=True):
        ys = np.array([math.nan if value is None else value for _, value in line.points], dtype=float)
        marked = {"markevery": _lone(ys), "marker": "o", "markersize": 3} if line.joined else {}
        axes.plot([at for at, _ in line.points], ys, clip_on=False, **(line_style | marked))
    for at, name in marks:
        axes.axvline(at, color="#888888", linestyle=":", linewidth=1)
        left_half = at < (x.low + x.high) / 2
        axes.annotate(
            name,
            (at, 0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(4 if left_half else -4, 5),
            textcoords="offset points",
            ha="left" if left_half else "right",
        )
    # A legend's line is shorter than the gaps of lines that take turns.
    shown = [each | {"linestyle": "-"} if isinstance(each["linestyle"], tuple) else each for each in styles]
    _legend(figure, [Line2D([], [], **each) for each in shown], [line.label for line in lines])
    return figure


@style.context(STYLE)
def column_chart(title: str, x_label: str, names: Sequence[str], y: Axis, values: Sequence[float | None]) -> Figure:
    """One column per name; none where the value is None."""
    figure, axes = _figure(title, 220)
    _rule(axes, Axis(x_label, -0.5, max(len(names), 1) - 0.5), y)
    there = [(index, value) for index, value in enumerate(values) if value is not None]
    axes.bar([index for index, _ in there], [value for _, value in there], width=0.9, color=COLOURS[0])
    step = max(1, math.ceil(len(names) * 26 / WIDTH))
    axes.set_xticks(range(0, len(names), step), [_short(name) for name in names[::step]])
    return figure


@style.context(STYLE)
def bar_chart(title: str, x: Axis, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str]) -> Figure:
    """Horizontal stacked bars, each with one value for each of ``parts``."""
    labels = list(parts) if len(parts) > 1 else []
    figure, axes = _figure(title, TOP + 26 * len(rows) + BOTTOM, labels)
    _rule(axes, x, Axis("", -0.5, len(rows) - 0.5))
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    ends, drawn = np.zeros(len(rows)), []
    for part, colour in zip(range(len(parts)), COLOURS, strict=False):
        values = np.array([values[part] for _, values in rows])
        drawn.append(axes.barh(range(len(rows)), values, left=ends, height=0.7, color=colour)[0])
        ends += values
    axes.set_yticks(range(len(rows)), [_short(name) for name, _ in rows])
    _legend(figure, drawn[: len(labels)], labels)
    return figure


@style.context(STYLE)
def cell_map(
    title: str, x_label: str, y_label: str, row_names: Sequence[str], cells: np.ndarray, kinds: Sequence[tuple[str, str]]
) -> Figure:
    """``cells`` int ``[rows, columns]``: indices of ``kinds`` (names and colours); -1 is left empty."""
    rows, columns = cells.shape
    tall = max(min(16.0, max(5.0, 460 / max(rows, 1))), 90 / max(rows, 1))  # below 90 pixels the label has no room
    wide = min(16.0, (WIDTH - LEFT - RIGHT) / max(columns, 1))
    shown = [kind for index, kind in enumerate(kinds) if (cells == index).any()]
    high, legend = tall * max(rows, 1), LEGEND_ROW * _legend_shape([name for name, _ in shown])[1]
    height = TOP + high + BOTTOM + legend
    figure = Figure(figsize=(WIDTH / 96, height / 96), label=title)
    axes = figure.add_axes((LEFT / WIDTH, (BOTTOM + legend) / height, wide * max(columns, 1) / WIDTH, high / height))
    if cells.size:
        colours = to_rgba_array([*(colour for _, colour in kinds), "none"])  # -1 is the last
        axes.imshow(colours[cells], interpolation="none", aspect="auto")
    _rule(axes, Axis(x_label, -0.5, max(columns, 1) - 0.5, whole=True), Axis(y_label, -0.5, max(rows, 1) - 0.5))
    axes.invert_yaxis()
    step = max(1, math.ceil(14 / tall))
    axes.set_yticks(range(0, rows, step), [_short(name) for name in row_names[::step]])
    axes.grid(visible=False)
    axes.set_yticks(np.arange(1, rows) - 0.5, minor=True)
    axes.set_xticks(np.arange(1, columns) - 0.5 if wide > 5 else [], minor=True)
    axes.grid(which="minor", axis="both", color="white", linewidth=0.6)
    _legend(figure, [Patch(color=colour) for _, colour in shown], [name for name, _ in shown], outside=False)
    return figure


def _figure(title: str, height: float, labels: Sequence[str] = ()) -> tuple[Figure, Axes]:
    """A figure whose one chart is ``height`` tall, above a legend with ``labels``."""
    height += LEGEND_ROW * _legend_shape(labels)[1]
    figure = Figure(figsize=(WIDTH / 96, height / 96), layout="constrained", label=title)
    return figure, figure.add_subplot()


def _rule(axes: Axes, x: Axis, y: Axis) -> None:
    """Give ``axes`` their ranges, labels and round ticks."""
    axes.set(xlim=(x.low, x.high), ylim=(y.low, y.high), xlabel=x.label, ylabel=y.label)
    rulers: list[tuple[Ruler, Axis, int]] = [(axes.xaxis, x, 9), (axes.yaxis, y, 6)]
    for ruler, axis, most in rulers:
        ruler.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=axis.whole))
        ruler.set_major_formatter(FuncFormatter(lambda at, _: f"{at:.6g}"))


def _styles(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The style of each line. Lines that coincide take turns in dashes, or are rings around each other."""
    groups = [[index for index, other in enumerate(lines) if list(other.points) == list(line.points)] for line in lines]
    styles: list[dict[str, Any]] = []
    for index, (line, colour, group) in enumerate(zip(lines, cycle(COLOURS), groups)):
        turn, turns = group.index(index), len(group)
        if not line.joined:
            rest = {"linestyle": "none", "marker": MARKERS[index % len(MARKERS)], "fillstyle": "none", "markeredgewidth": 1.5}
            styles.append({"color": colour, **rest, "markersize": 6 + 4 * (turns - 1 - turn)})
        elif turns > 1:
            styles.append({"color": colour, "linestyle": (DASH * turn, (DASH, DASH * (turns - 1)))})
        else:
            styles.append({"color": colour, "linestyle": "--" if line.dashed else "-"})
    return styles


def _lone(values: np.ndarray) -> list[int]:
    """The points without a neighbour, which a line alone would not show."""
    there = np.concatenate([[False], ~np.isnan(values), [False]])
    return [int(index) for index in np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])]


def _legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], outside: bool = True) -> None:
    """In the lower left corner, ``outside`` the axes' area."""
    if labels:
        place: Literal["outside lower left", "lower left"] = "outside lower left" if outside else "lower left"
        figure.legend(handles, [_short(label) for label in labels], loc=place, ncols=_legend_shape(labels)[0])


def _legend_shape(labels: Sequence[str]) -> tuple[int, int]:
    """Columns and rows: as many columns as fit the longest label."""
    if not labels:
        return 0, 0
    columns = min(len(labels), max(1, int(WIDTH / (60 + 7 * max(len(_short(label)) for label in labels)))))
    return columns, math.ceil(len(labels) / columns)


def _short(name: str) -> str:
    """``name`` as it can stand in a picture: printable and not long. Tables show it whole."""
    name = printable(name)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
