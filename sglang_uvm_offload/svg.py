"""Tables and charts (SVG) of an HTML page, without a library for drawing: lines, columns, stacked bars, a map of cells.

Everything is a tree of elements that is written out at the end, so that no text can become markup. Lengths are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

import numpy as np

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 900px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .3em } p { max-width: 46em; margin: .4em 0 }
table { border-collapse: collapse; margin: .8em 0; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ddd; padding: .2em .8em .2em 0; text-align: right; overflow-wrap: anywhere }
th { font-weight: 600 } th:first-child, td:first-child { text-align: left }
.facts td { text-align: left } .advice li { margin: .3em 0; max-width: 46em }
figure { margin: .5em 0 } figure > svg { max-width: 100%; height: auto }
.key { margin-right: 1.4em; white-space: nowrap; font-size: .87em } .key svg { vertical-align: middle }
"""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#7f3c8d")
"""Of series, in order: apart for colour-blind eyes too."""
WIDTH = 880
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 42
GRID, INK = "#dddddd", "#444444"

Child = Element | str


def element(tag: str, *children: Child, **attributes: str | float) -> Element:
    """``element("text", "a < b", x=1, text_anchor="end")``: ``_`` in a name stands for ``-``, and at its end for nothing."""
    out = Element(tag, {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            out.append(child)
        elif len(out):
            out[-1].tail = (out[-1].tail or "") + child
        else:
            out.text = (out.text or "") + child
    return out


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):.10g}"


def page(title: str, *body: Element) -> str:
    """A whole document that loads nothing."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        element("meta", name="viewport", content="width=device-width"),
        element("title", title),
        element("style", STYLE),
    )
    html = element("html", head, element("body", element("h1", title), *body), lang="en")
    return "<!doctype html>\n" + tostring(html, encoding="unicode", method="html") + "\n"


def section(title: str, *body: Element) -> Element:
    return element("section", element("h2", title), *body)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return element("table", element("tr", *(element("th", cell) for cell in head)), *body)


def facts(pairs: Sequence[tuple[str, str]]) -> Element:
    """A table of names and values."""
    rows = [element("tr", element("td", name), element("td", value)) for name, value in pairs]
    return element("table", *rows, class_="facts")


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``, which must differ; ``label`` says the unit."""

    label: str
    low: float
    high: float
    whole: bool = False
    """Whether values between whole numbers make no sense."""

    def ticks(self, most: int) -> list[float]:
        """Round values in the range, at most about ``most``."""
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / most))
        step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= most)
        step = max(step, 1) if self.whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class Line:
    """A series: ``(x, y)`` in the units of the axes. Where ``y`` is None the line is interrupted."""

    label: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False


def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line], marks: Sequence[tuple[float, str]] = ()) -> Element:
    """Lines over a grid with their legend; each of ``marks`` is a vertical line at an x with its name."""
    height = 300
    frame = _Frame(x, y, height)
    drawing = frame.drawing(title, x.ticks(9))
    for at, name in marks:
        px = frame.x(at)
        right = px > WIDTH * 0.6
        drawing.append(element("line", x1=px, x2=px, y1=TOP, y2=height - BOTTOM, stroke="#888888", stroke_dasharray="2 3"))
        anchor = "end" if right else "start"
        drawing.append(element("text", name, x=px + (-5 if right else 5), y=height - BOTTOM - 6, text_anchor=anchor))
    for index, line in enumerate(lines):
        stroke = {"stroke": COLOURS[index % len(COLOURS)], **({"stroke-dasharray": "6 4"} if line.dashed else {})}
        path = _path((frame.x(px), None if py is None else frame.y(py)) for px, py in line.points)
        drawing.append(element("path", element("title", line.label), d=path, **LINE, **stroke))
    key = [_key(line.label, COLOURS[index % len(COLOURS)], line.dashed) for index, line in enumerate(lines)]
    return element("figure", drawing, element("figcaption", *key))


LINE: dict[str, str | float] = {"fill": "none", "stroke_width": 2, "stroke_linejoin": "round", "stroke_linecap": "round"}


def column_chart(title: str, x_label: str, names: Sequence[str], y: Axis, values: Sequence[float | None]) -> Element:
    """One column a name; none where the value is None."""
    height = 220
    frame = _Frame(Axis(x_label, 0, max(len(names), 1)), y, height)
    step = max(1, math.ceil(len(names) * 26 / WIDTH))
    drawing = frame.drawing(title, [i + 0.5 for i in range(0, len(names), step)], lambda at: names[int(at)])
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if value is not None:
            top, left = frame.y(value), frame.x(index)
            size = {"x": left + 0.5, "y": top, "width": frame.x(index + 1) - left - 1, "height": height - BOTTOM - top}
            drawing.append(element("rect", element("title", f"{name}: {value:.4g}"), fill=COLOURS[0], **size))
    return element("figure", drawing)


def bar_chart(title: str, x: Axis, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str]) -> Element:
    """Horizontal bars, each the stack of its values, of which there is one for each of ``parts``."""
    height = TOP + 26 * len(rows) + BOTTOM
    left = 130
    frame = _Frame(x, Axis("", 0, max(len(rows), 1)), height, left)
    drawing = frame.drawing(title, x.ticks(9), bars=True)
    for index, (name, values) in enumerate(rows):
        top, start = TOP + 26 * index + 4, 0.0
        drawing.append(element("text", name, x=left - 8, y=top + 13, text_anchor="end"))
        for part, value, colour in zip(parts, values, COLOURS, strict=False):
            px = frame.x(start)
            size = {"x": px, "y": top, "width": frame.x(start + value) - px, "height": 18}
            drawing.append(element("rect", element("title", f"{name}, {part}: {value:.4g}"), fill=colour, **size))
            start += value
    key = [_key(part, colour) for part, colour in zip(parts, COLOURS, strict=False)] if len(parts) > 1 else []
    return element("figure", drawing, element("figcaption", *key))


def cell_map(
    title: str, x_label: str, y_label: str, row_names: Sequence[str], cells: np.ndarray, kinds: Sequence[tuple[str, str]]
) -> Element:
    """``cells`` int ``[rows, columns]``, each an index of ``kinds``, which are names and colours; -1 is left empty."""
    rows, columns = cells.shape
    cell = max(min(16.0, max(5.0, 460 / max(rows, 1))), 90 / max(rows, 1))  # below 90 pixels the label has no room
    height = TOP + cell * rows + BOTTOM
    across = min(16.0, (WIDTH - LEFT - RIGHT) / max(columns, 1))
    drawing = _canvas(title, height)
    gap = 0.6 if across > 5 else 0.0
    for kind, (name, colour) in enumerate(kinds):
        drawing.append(element("path", element("title", name), d=_runs(cells == kind, across, cell, gap), fill=colour))
    for row in range(0, rows, max(1, math.ceil(14 / cell))):
        drawing.append(element("text", row_names[row], x=LEFT - 6, y=TOP + cell * (row + 0.5) + 4, text_anchor="end"))
    bottom = TOP + cell * rows
    if columns:
        for at in Axis("", 0, columns).ticks(max(1, int(columns * across / 60))):
            if at == int(at) and at < columns:
                drawing.append(element("text", f"{at:g}", x=LEFT + (at + 0.5) * across, y=bottom + 15, text_anchor="middle"))
    drawing.append(element("text", x_label, x=LEFT + columns * across / 2, y=height - 6, text_anchor="middle"))
    drawing.append(_upright(y_label, TOP + cell * rows / 2))
    key = [_key(name, colour) for kind, (name, colour) in enumerate(kinds) if (cells == kind).any()]
    return element("figure", drawing, element("figcaption", *key))


def _runs(mask: np.ndarray, across: float, cell: float, gap: float) -> str:
    """A path over the true cells; neighbours in a row that touch are one rectangle."""
    out = []
    for row, line in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(np.int8), [0]])))
        for first, end in edges.reshape(-1, 2).tolist():
            spans = [(first, end)] if not gap else [(at, at + 1) for at in range(first, end)]
            for a, b in spans:
                x, y, width, high = LEFT + a * across, TOP + row * cell, (b - a) * across - gap, cell - 0.6
                out.append(f"M{_text(x)} {_text(y)}h{_text(width)}v{_text(high)}h{_text(-width)}z")
    return "".join(out)


@dataclass(frozen=True)
class _Frame:
    """Where the values of two axes lie in a drawing of ``height``."""

    x_axis: Axis
    y_axis: Axis
    height: float
    left: float = LEFT

    def x(self, value: float) -> float:
        return self.left + _share(self.x_axis, value) * (WIDTH - RIGHT - self.left)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - _share(self.y_axis, value) * (self.height - BOTTOM - TOP)

    def drawing(
        self, title: str, x_ticks: Sequence[float], x_name: Callable[[float], str] = lambda at: f"{at:.6g}", bars: bool = False
    ) -> Element:
        """The canvas with axes, ticks and labels; with ``bars`` the grid is that of the x axis."""
        out = _canvas(title, self.height)
        bottom, right = self.height - BOTTOM, WIDTH - RIGHT
        for at in [] if bars else self.y_axis.ticks(6):
            py = self.y(at)
            out.append(element("line", x1=self.left, x2=right, y1=py, y2=py, stroke=GRID))
            out.append(element("text", f"{at:.6g}", x=self.left - 6, y=py + 4, text_anchor="end"))
        for at in x_ticks:
            px = self.x(at)
            if bars:
                out.append(element("line", x1=px, x2=px, y1=TOP, y2=bottom, stroke=GRID))
            out.append(element("text", x_name(at), x=px, y=bottom + 15, text_anchor="middle"))
        out.append(element("line", x1=self.left, x2=right, y1=bottom, y2=bottom, stroke=INK))
        out.append(element("text", self.x_axis.label, x=(self.left + right) / 2, y=self.height - 6, text_anchor="middle"))
        out.append(_upright(self.y_axis.label, (TOP + bottom) / 2))
        return out


def _share(axis: Axis, value: float) -> float:
    return (value - axis.low) / (axis.high - axis.low)


def _canvas(title: str, height: float) -> Element:
    box = {"viewBox": f"0 0 {WIDTH} {_text(height)}", "xmlns": "http://www.w3.org/2000/svg"}
    text: dict[str, str | float] = {"font-size": 12, "font-family": "system-ui, sans-serif", "fill": INK}
    return element("svg", element("title", title), role="img", width=WIDTH, height=height, **box, **text)


def _upright(label: str, middle: float) -> Element:
    return element("text", label, transform=f"translate(13 {_text(middle)}) rotate(-90)", text_anchor="middle")


def _path(points: Iterable[tuple[float, float | None]]) -> str:
    """A path through the points; it starts anew after one without a y. A lone point is a dot."""
    out, drawn = [], False
    for x, y in points:
        if y is not None:
            out.append(f"{'L' if drawn else 'M'}{_text(x)} {_text(y)}" + ("" if drawn else "h0"))
        drawn = y is not None
    return "".join(out)


def _key(label: str, colour: str, dashed: bool | None = None) -> Element:
    """An entry of a legend: a box, or a line where ``dashed`` says which."""
    if dashed is None:
        swatch = element("rect", width=14, height=10, y=1, fill=colour)
    else:
        dash = {"stroke-dasharray": "6 4"} if dashed else {}
        swatch = element("line", x1=0, x2=22, y1=6, y2=6, stroke=colour, stroke_width=2.5, **dash)
    return element("span", element("svg", swatch, width=24, height=12), " " + label, class_="key")
