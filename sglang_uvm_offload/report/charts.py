"""The report's charts, drawn by matplotlib: lines, columns, stacked bars, a map of cells. Lengths are CSS pixels.

Each chart can be drawn at any width. The page holds it twice, for wide and for narrow screens: a wide chart scaled down to a
phone is too small to read.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#aa3377", "#661100")
"""The colours of series, in order. Colour-blind readers can tell them apart, and they stand out on white."""
DASHES = ("-", "--", "-.", (0, (7, 2, 1, 2, 1, 2)))
"""The line styles of series, in order. No two of the first 36 lines share colour and style."""
MARKERS = "osD^vPX*h"
DASH = 4
"""The length of a dash where lines coincide, in multiples of their width."""
WIDE, NARROW = 880, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 46
LEGEND_ROW = 22
LETTER = 7.5
"""The width of an average letter."""
LONGEST_NAME = 60
MANY_LINES = 6
"""A chart with this many lines or more is taller."""
GRID, INK = "#dddddd", "#444444"

STYLE: list[str | dict[str, Any]] = [
    "default",
    {
        "svg.fonttype": "none",  # text stays text: it can be searched, and the report stays small
        "text.parse_math": False,  # names come from outside, and a $ in them is a $
        "font.size": 9.5,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": GRID,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size", "xtick.minor.size", "ytick.minor.size"), 0),
        "xtick.major.pad": 6,  # names of columns stay clear of the other axis' zero
        "legend.frameon": False,
        "lines.linewidth": 1.5,
        "lines.solid_capstyle": "round",
    },
]
"""The style that overrides the user's matplotlibrc."""


@dataclass(frozen=True)
class Line:
    """A series: ``(x, y)`` in the units of the axes. The line is interrupted where ``y`` is None."""

    label: str
    points: Sequence[tuple[float, float | None]]
    joined: bool = True
    """Whether a line joins the points. If not, each point is a marker."""


Chart = partial[Figure]
"""A function that draws a chart, with all its arguments except ``width``."""


def picture(chart: Chart) -> Element:
    """The chart as an HTML figure: one SVG for wide screens, and one for narrow ones."""
    return element("figure", _svg(chart(width=WIDE), "wide"), _svg(chart(width=NARROW), "narrow"))


def _svg(figure: Figure, kind: str) -> Element:
    """The figure as an SVG element, with its label as the title."""
    file = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # Ids depend on the salt, and must differ between the pictures of a page.
    salt: dict[str, Any] = {"svg.hashsalt": f"{kind} {figure.get_label()}"}
    with style.context([*STYLE, salt]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has fonts of its own
        figure.savefig(file, format="svg", metadata=nothing)
    svg = fromstring(file.getvalue())
    for node in svg.iter():
        node.tag = node.tag.rpartition("}")[2]
        node.attrib = {name.rpartition("}")[2]: value for name, value in node.attrib.items()}
        if node.tag == "g":
            node.attrib.pop("id", None)  # figure_1, in every picture of the report
    svg.attrib |= {"role": "img", "class": kind}
    svg.insert(0, element("title", str(figure.get_label())))
    return svg


@style.context(STYLE)
def line_chart(
    title: str, x: Axis, y: Axis, lines: Sequence[Line], marks: Sequence[tuple[float, str]] = (), *, width: int = WIDE
) -> Figure:
    """Lines over a grid with their legend; each of ``marks`` is a vertical line at an x with its name."""
    labels = [line.label for line in lines] if len(lines) > 1 else []
    figure, axes = _figure(title, width, 260 if len(lines) < MANY_LINES else 380, labels)
    _rule(axes, x, y, width)
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
    # In the legend each line has its own style, whether or not it coincides with others.
    shown = [
        each | {"linestyle": DASHES[index % len(DASHES)]} if "marker" not in each else each for index, each in enumerate(styles)
    ]
    _legend(figure, width, [Line2D([], [], **each) for each in shown], labels)
    return figure


@style.context(STYLE)
def column_chart(
    title: str, x_label: str, names: Sequence[str], y: Axis, values: Sequence[float | None], *, width: int = WIDE
) -> Figure:
    """One column per name; none where the value is None."""
    figure, axes = _figure(title, width, 220)
    _rule(axes, Axis(x_label, -0.5, max(len(names), 1) - 0.5), y, width)
    there = [(index, value) for index, value in enumerate(values) if value is not None]
    axes.bar([index for index, _ in there], [value for _, value in there], width=0.9, color=COLOURS[0])
    step = max(1, math.ceil(len(names) * 28 / width))
    axes.set_xticks(range(0, len(names), step), [_short(name) for name in names[::step]])
    return figure


@style.context(STYLE)
def bar_chart(
    title: str, x: Axis, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], *, width: int = WIDE
) -> Figure:
    """Horizontal stacked bars, each with one value for each of ``parts``."""
    labels = list(parts) if len(parts) > 1 else []
    figure, axes = _figure(title, width, TOP + 26 * len(rows) + BOTTOM, labels)
    _rule(axes, x, Axis("", -0.5, len(rows) - 0.5), width)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    ends, drawn = np.zeros(len(rows)), []
    for part, colour in zip(range(len(parts)), COLOURS, strict=False):
        values = np.array([values[part] for _, values in rows])
        drawn.append(axes.barh(range(len(rows)), values, left=ends, height=0.7, color=colour)[0])
        ends += values
    axes.set_yticks(range(len(rows)), [_short(name, int(width / 2 / LETTER)) for name, _ in rows])
    _legend(figure, width, drawn[: len(labels)], labels)
    return figure


@style.context(STYLE)
def cell_map(
    title: str,
    x_label: str,
    y_label: str,
    row_names: Sequence[str],
    cells: np.ndarray,
    kinds: Sequence[tuple[str, str]],
    *,
    width: int = WIDE,
) -> Figure:
    """A map of ``cells``, int ``[rows, columns]``: indices of ``kinds`` (names and colours), or -1 for an empty cell."""
    rows, columns = cells.shape
    tall = max(min(16.0, max(5.0, 460 / max(rows, 1))), 90 / max(rows, 1))  # below 90 pixels the label has no room
    wide = min(16.0, (width - LEFT - RIGHT) / max(columns, 1))
    shown = [kind for index, kind in enumerate(kinds) if (cells == index).any()]
    high, legend = tall * max(rows, 1), LEGEND_ROW * _legend_shape([name for name, _ in shown], width)[1]
    height = TOP + high + BOTTOM + legend
    figure = Figure(figsize=(width / 96, height / 96), label=title)
    axes = figure.add_axes((LEFT / width, (BOTTOM + legend) / height, wide * max(columns, 1) / width, high / height))
    if cells.size:
        colours = to_rgba_array([*(colour for _, colour in kinds), "none"])  # -1 is the last
        axes.imshow(colours[cells], interpolation="none", aspect="auto")
    _rule(axes, Axis(x_label, -0.5, max(columns, 1) - 0.5, whole=True), Axis(y_label, -0.5, max(rows, 1) - 0.5), width)
    axes.invert_yaxis()
    step = max(1, math.ceil(14 / tall))
    axes.set_yticks(range(0, rows, step), [_short(name) for name in row_names[::step]])
    axes.grid(visible=False)
    axes.set_yticks(np.arange(1, rows) - 0.5, minor=True)
    axes.set_xticks(np.arange(1, columns) - 0.5 if wide > 5 else [], minor=True)
    axes.grid(which="minor", axis="both", color="white", linewidth=0.6)
    _legend(figure, width, [Patch(color=colour) for _, colour in shown], [name for name, _ in shown], outside=False)
    return figure


def _figure(title: str, width: int, height: float, labels: Sequence[str] = ()) -> tuple[Figure, Axes]:
    """A figure whose one chart is ``height`` tall, above a legend with ``labels``."""
    height += LEGEND_ROW * _legend_shape(labels, width)[1]
    figure = Figure(figsize=(width / 96, height / 96), layout="constrained", label=title)
    return figure, figure.add_subplot()


def _rule(axes: Axes, x: Axis, y: Axis, width: int) -> None:
    """Give ``axes`` their ranges, labels and round ticks."""
    axes.set(xlim=(x.low, x.high), ylim=(y.low, y.high), xlabel=x.label, ylabel=y.label)
    rulers: list[tuple[Ruler, Axis, int]] = [(axes.xaxis, x, min(9, width // 70)), (axes.yaxis, y, 6)]
    for ruler, axis, most in rulers:
        ruler.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10], integer=axis.whole))
        ruler.set_major_formatter(FuncFormatter(lambda at, _: f"{at:.6g}"))


def _styles(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The style of each line. Lines that coincide take turns in dashes, or are rings around each other."""
    groups = [[index for index, other in enumerate(lines) if list(other.points) == list(line.points)] for line in lines]
    styles: list[dict[str, Any]] = []
    for index, (line, group) in enumerate(zip(lines, groups, strict=True)):
        turn, turns = group.index(index), len(group)
        colour = COLOURS[index % len(COLOURS)]
        if not line.joined:
            rest = {"linestyle": "none", "marker": MARKERS[index % len(MARKERS)], "fillstyle": "none", "markeredgewidth": 1.5}
            styles.append({"color": colour, **rest, "markersize": 6 + 4 * (turns - 1 - turn)})
        elif turns > 1:
            styles.append({"color": colour, "linestyle": (DASH * turn, (DASH, DASH * (turns - 1)))})
        else:
            styles.append({"color": colour, "linestyle": DASHES[index % len(DASHES)]})
    return styles


def _lone(values: np.ndarray) -> list[int]:
    """The indices of points without a neighbour, which a line alone would not show."""
    there = np.concatenate([[False], ~np.isnan(values), [False]])
    return [int(index) for index in np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])]


def _legend(figure: Figure, width: int, handles: Sequence[Artist], labels: Sequence[str], outside: bool = True) -> None:
    """Draw the legend in the lower left corner, ``outside`` the axes' area."""
    if labels:
        place: Literal["outside lower left", "lower left"] = "outside lower left" if outside else "lower left"
        names = [_short(label, int((width - 76) / LETTER)) for label in labels]
        figure.legend(handles, names, loc=place, ncols=_legend_shape(labels, width)[0], handlelength=3)


def _legend_shape(labels: Sequence[str], width: int) -> tuple[int, int]:
    """The legend's columns and rows: as many columns as fit the longest label."""
    if not labels:
        return 0, 0
    longest = max(len(_short(label)) for label in labels)
    columns = min(len(labels), max(1, int(width / (70 + LETTER * longest))))
    return columns, math.ceil(len(labels) / columns)


def _short(name: str, most: int = LONGEST_NAME) -> str:
    """``name`` as a picture shows it: printable, and at most ``most`` letters long. Tables show the whole name."""
    name, most = printable(name), min(most, LONGEST_NAME)
    return name if len(name) <= most else name[: most - 1] + "…"
