"""Charts: every value stands where its axes say, everything stays inside its picture, and no text becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree.ElementTree import Element, tostring

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_uvm_offload.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    bar_chart,
    cell_map,
    column_chart,
    element,
    line_chart,
    page,
    table,
)

KINDS = [("in", "#111111"), ("out", "#222222")]


def drawing(figure: Element) -> Element:
    (svg,) = figure.findall("svg")
    return svg


def height(figure: Element) -> float:
    return float(drawing(figure).get("viewBox").split()[3])


def texts(figure: Element) -> list[str]:
    return [text.text for text in drawing(figure).iter("text")]


def points(path: Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d"))]


def assert_inside(figure: Element) -> None:
    for text in drawing(figure).iter("text"):
        if text.get("x") is not None:
            assert 0 <= float(text.get("x")) <= WIDTH
            assert 0 <= float(text.get("y")) <= height(figure)


def cells_of(figure: Element, shape: tuple[int, int], kinds) -> np.ndarray:
    """What a map shows: the kind of each cell, read back from its rectangles."""
    out = np.full(shape, -1)
    colours = [colour for _, colour in kinds]
    rects = [
        (colours.index(path.get("fill")), *map(float, found))
        for path in drawing(figure).iter("path")
        for found in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", path.get("d"))
    ]
    tall = min(y for _, _, y, _, _ in rects if y > TOP) - TOP if shape[0] > 1 else 90
    # In a wide map rectangles touch; in a narrow one each cell is a rectangle.
    across = min(16.0, (WIDTH - LEFT - RIGHT) / shape[1])
    for kind, x, y, width, _ in rects:
        row, first = round((y - TOP) / tall), round((x - LEFT) / across)
        last = round((x - LEFT + width) / across)
        assert (out[row, first:last] == -1).all(), "a cell is drawn twice"
        out[row, first:last] = kind
    return out


@pytest.mark.parametrize("shape", [(1, 4), (3, 16), (26, 64), (75, 256)])
def test_a_map_shows_every_cell_once_and_in_its_colour(shape):
    cells = np.random.default_rng(0).integers(-1, 2, shape)
    cells[:, 0] = 0
    figure = cell_map("map", "expert", "layer", [f"L{row}" for row in range(shape[0])], cells, KINDS)
    assert (cells_of(figure, shape, KINDS) == cells).all()
    assert_inside(figure)


def test_a_large_map_is_a_small_file_with_readable_names():
    cells = np.random.default_rng(0).integers(0, 2, (75, 256))
    figure = cell_map("map", "expert", "layer", [str(row) for row in range(75)], cells, KINDS)
    assert len(tostring(figure)) < 300_000
    at = [float(text.get("y")) for text in drawing(figure).iter("text") if text.get("text-anchor") == "end"]
    assert len(at) > 10
    assert np.diff(at).min() >= 12, "names of rows lie on each other"


def test_the_legend_of_a_map_names_what_is_there():
    figure = cell_map("map", "expert", "layer", ["0"], np.array([[1, 1]]), KINDS)
    assert "out" in "".join(figure.itertext())
    assert all(key.find("svg").tail != " in" for key in figure.iter("span"))


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
def test_ticks_are_evenly_spread_round_numbers_inside_the_range(low, span, most):
    axis = Axis("", low, low + span)
    if axis.high <= axis.low or span < 1e-6 * abs(low):
        return
    ticks = axis.ticks(most)
    assert 1 <= len(ticks) <= most + 1
    assert axis.low - 1e-6 * span <= ticks[0]
    assert ticks[-1] <= axis.high + 1e-6 * span
    steps = np.diff(ticks)
    if len(steps):
        assert steps == pytest.approx(steps[0])
        assert f"{steps[0]:.6e}"[0] in "125"


def test_an_axis_of_things_has_no_ticks_between_them():
    assert Axis("layer", 0, 2, whole=True).ticks(9) == [0, 1, 2]


def test_a_line_goes_through_its_points():
    figure = line_chart("t", Axis("x", 10, 20), Axis("y", 0, 50), [Line("a", [(10, 0), (15, 25), (20, 50)])])
    (path,) = drawing(figure).findall("path")
    right, bottom = WIDTH - RIGHT, height(figure) - BOTTOM
    assert points(path) == [(LEFT, bottom), ((LEFT + right) / 2, (TOP + bottom) / 2), (right, TOP)]
    assert {"x", "y", "10", "20", "0", "50"} <= set(texts(figure))
    assert_inside(figure)


def test_a_line_is_interrupted_where_there_is_no_value_and_a_lone_point_is_a_dot():
    spots = [(0, 1), (1, 1), (2, None), (3, 1), (4, None)]
    (path,) = drawing(line_chart("t", Axis("x", 0, 4), Axis("y", 0, 2), [Line("a", spots)])).findall("path")
    assert path.get("d").count("M") == 2
    assert len(points(path)) == 3
    assert path.get("d").endswith("h0")
    assert path.get("stroke-linecap") == "round"


def test_the_legend_tells_lines_apart():
    names = [f"line {index}" for index in range(8)]
    figure = line_chart("t", Axis("x", 0, 1), Axis("y", 0, 1), [Line(name, [(0, 0)], name == "line 7") for name in names])
    drawn = [(path.get("stroke"), path.get("stroke-dasharray")) for path in drawing(figure).findall("path")]
    assert len(set(drawn)) == 8
    shown = [(line.get("stroke"), line.get("stroke-dasharray")) for key in figure.iter("span") for line in key.iter("line")]
    assert shown == drawn
    assert ["".join(key.itertext()).strip() for key in figure.iter("span")] == names


@pytest.mark.parametrize("at", [0, 5, 10])
def test_a_mark_stands_at_its_place_with_its_name_inside(at):
    figure = line_chart("t", Axis("x", 0, 10), Axis("y", 0, 1), [], [(at, "now: 5")])
    (line,) = [line for line in drawing(figure).iter("line") if line.get("stroke-dasharray")]
    assert float(line.get("x1")) == pytest.approx(LEFT + at / 10 * (WIDTH - RIGHT - LEFT))
    (name,) = [text for text in drawing(figure).iter("text") if text.text == "now: 5"]
    x, width, mark = float(name.get("x")), 7 * len("now: 5"), float(line.get("x1"))
    assert x < mark if name.get("text-anchor") == "end" else x > mark, "the name lies on its line"
    assert (x - width if name.get("text-anchor") == "end" else x) >= LEFT
    assert (x if name.get("text-anchor") == "end" else x + width) <= WIDTH


def test_columns_are_as_high_as_their_values_and_missing_without_one():
    figure = column_chart("t", "layer", ["3", "4", "5"], Axis("y", 0, 100), [50.0, None, 100.0])
    bottom = height(figure) - BOTTOM
    rects = drawing(figure).findall("rect")
    assert [float(rect.get("height")) for rect in rects] == [(bottom - TOP) / 2, bottom - TOP]
    assert [float(rect.get("y")) for rect in rects] == [(bottom + TOP) / 2, TOP]
    assert [rect.find("title").text for rect in rects] == ["3: 50", "5: 100"]


def test_the_names_of_many_columns_do_not_lie_on_each_other():
    names = [str(layer) for layer in range(3, 78)]
    figure = column_chart("t", "layer", names, Axis("y", 0, 100), [50.0] * 75)
    at = [float(text.get("x")) for text in drawing(figure).iter("text") if text.text in names and text.get("y") == "193"]
    assert len(at) >= 20
    assert np.diff(at).min() >= 20


def test_stacked_bars_lie_end_to_end():
    figure = bar_chart("t", Axis("MiB", 0, 10), [("a", [2.0, 3.0]), ("b", [0.0, 10.0])], ["read", "moved"])
    rects = drawing(figure).findall("rect")
    placed = [(float(rect.get("x")), float(rect.get("width")), float(rect.get("y"))) for rect in rects]
    begin, scale = 130, (WIDTH - RIGHT - 130) / 10
    assert placed[0] == pytest.approx((begin, 2 * scale, TOP + 4))
    assert placed[1] == pytest.approx((begin + 2 * scale, 3 * scale, TOP + 4))
    assert placed[3] == pytest.approx((begin, 10 * scale, TOP + 30))
    assert texts(figure)[-2:] == ["a", "b"]
    assert_inside(figure)


class Tags(HTMLParser):
    """What a browser takes for tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs


HOSTILE = "</title><script>alert(1)</script> & \"quoted\" 'x'"


def test_no_text_becomes_markup():
    charts = [
        line_chart(HOSTILE, Axis(HOSTILE, 0, 1), Axis(HOSTILE, 0, 1), [Line(HOSTILE, [(0, 1)])], [(0, HOSTILE)]),
        bar_chart(HOSTILE, Axis(HOSTILE, 0, 1), [(HOSTILE, [1.0, 2.0])], [HOSTILE, HOSTILE]),
        column_chart(HOSTILE, HOSTILE, [HOSTILE], Axis(HOSTILE, 0, 1), [1.0]),
        cell_map(HOSTILE, HOSTILE, HOSTILE, [HOSTILE], np.array([[0]]), [(HOSTILE, "#000000")]),
        table([HOSTILE], [[HOSTILE]]),
    ]
    text = page(HOSTILE, *charts, element("p", HOSTILE, id=HOSTILE))
    read = Tags()
    read.feed(text)
    assert "script" not in read.tags
    assert ("id", HOSTILE) in read.attributes
    assert text.count("&lt;script&gt;") > 10


def test_a_page_loads_nothing():
    text = page("t", line_chart("t", Axis("x", 0, 1), Axis("y", 0, 1), [Line("a", [(0, 1)])]))
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "src=" not in text
    assert "@import" not in text
    assert "url(" not in text
