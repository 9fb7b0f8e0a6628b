"""Charts: every value stands where its axes say, names are whole and apart, and no text becomes markup."""

from __future__ import annotations

import re
from functools import partial
from html.parser import HTMLParser
from itertools import combinations
from xml.etree.ElementTree import tostring

import numpy as np
import pytest
from builders.charts import cells_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from sglang_uvm_offload.report.charts import (
    NARROW,
    WIDE,
    Chart,
    Line,
    _styles,
    bar_chart,
    cell_map,
    column_chart,
    line_chart,
    picture,
)
from sglang_uvm_offload.report.html import document, element, table
from sglang_uvm_offload.report.units import Axis

KINDS = [("in", "#111111"), ("out", "#222222")]
UNIT = Axis("x", 0, 1)


def shown(figure: Figure) -> dict[str, tuple[float, float, float, float]]:
    """The texts of a drawn figure with their left, bottom, right and top, as shares of the figure. None is cut off by the
    picture's edge or lies on another."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    width, height = renderer.get_canvas_width_height()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in _beyond(figure)]
    extents = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    boxes = {name: (box.x0 / width, box.y0 / height, box.x1 / width, box.y1 / height) for name, box in extents}
    for name, box in boxes.items():
        assert min(box) >= 0, name
        assert max(box) <= 1, name
    for (a, one), (b, other) in combinations(boxes.items(), 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, f"{a!r} lies on {b!r}"
    return boxes


@pytest.fixture(params=[WIDE, NARROW])
def width(request) -> int:
    """Each of the two widths at which a page has its charts."""
    return request.param


def _beyond(figure: Figure) -> set[Text]:
    """The names of ticks beyond the ends of their axis, which are not drawn."""
    rulers = [ruler for axes in figure.axes for ruler in (axes.xaxis, axes.yaxis)]
    ends = [sorted(ruler.get_view_interval()) for ruler in rulers]
    return {
        tick.label1
        for ruler, (low, high) in zip(rulers, ends, strict=True)
        for tick in ruler.get_major_ticks()
        if not low <= tick.get_loc() <= high
    }


@pytest.mark.parametrize("shape", [(1, 4), (26, 64), (75, 256)])
def test_a_map_shows_every_cell_in_its_colour_in_a_small_file(shape, width):
    cells = np.random.default_rng(0).integers(-1, 2, shape)
    chart = partial(cell_map, "map", "expert", "layer", [f"L{row}" for row in range(shape[0])], cells, KINDS)
    assert all((found == cells).all() for found in cells_of(chart, KINDS))
    assert sum(name.startswith("L") for name in shown(chart(width=width))) >= min(10, shape[0])
    assert len(tostring(picture(chart))) < 200_000


def test_the_legend_of_a_map_names_what_is_there():
    names = set(shown(cell_map("map", "expert", "layer", ["0"], np.array([[1, 1]]), KINDS)))
    assert "out" in names
    assert "in" not in names
    assert len(picture(partial(cell_map, "map", "expert", "layer", [], np.zeros((0, 0), dtype=int), KINDS)).findall("svg")) == 2


def test_a_line_is_interrupted_where_there_is_no_value_and_a_lone_point_is_a_dot():
    spots = [(0, 1), (1, 1), (2, None), (3, 1), (4, None)]
    axes = line_chart("t", Axis("x", 0, 4, whole=True), Axis("y", 0, 2), [Line("a", spots)]).axes[0]
    (line,) = axes.lines
    x, y = line.get_data()
    assert list(x) == [0, 1, 2, 3, 4]
    assert np.isnan(y).tolist() == [False, False, True, False, True]
    assert (line.get_markevery(), line.get_marker()) == ([3], "o")
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 4), (0, 2))
    assert axes.get_xticks().tolist() == [0, 1, 2, 3, 4], "no ticks between whole numbers"


def test_the_legend_tells_lines_apart_and_has_room_for_long_names(width):
    names = [f"_best fixed, over all layers, {index}" for index in range(9)]  # matplotlib hides names with a _
    lines = [Line(name, [(0, 0), (1, index / 8)]) for index, name in enumerate(names)]
    figure = line_chart("t", UNIT, UNIT, lines, width=width)
    looks = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert len({colour for colour, _ in looks}) == 9
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert [(line.get_color(), line.get_linestyle()) for line in legend.get_lines()] == looks
    assert set(names) <= set(shown(figure))


def test_names_without_room_are_cut(width):
    names = [letter * 60 for letter in "ab"]
    for figure in (
        line_chart("t", UNIT, UNIT, [Line(name, [(0, 0)]) for name in names], width=width),
        bar_chart("t", UNIT, [(name, [1.0]) for name in names], ["read"], width=width),
    ):
        whole = set(names) <= set(shown(figure))
        assert whole == (width == WIDE and bool(figure.legends))


RED_GREEN_BLIND = {
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
"""Machado, Oliveira and Fernandes, 2009, for linear RGB."""


@pytest.mark.parametrize("sight", ["full", *RED_GREEN_BLIND])
def test_nine_colours_differ_for_colour_blind_readers_and_so_do_many_lines(sight):
    lines = [Line(str(index), [(0, index), (1, index)]) for index in range(36)]
    styles = [(style["color"], str(style["linestyle"])) for style in _styles(lines)]
    assert len(set(styles)) == 36
    colours = np.array([to_rgb(colour) for colour, _ in styles[:9]])
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(RED_GREEN_BLIND.get(sight, np.eye(3))).T, 0, 1)
    for (a, one), (b, other) in combinations(enumerate(map(cielab, seen)), 2):
        assert np.linalg.norm(one - other) > 12, f"{styles[a]} looks like {styles[b]}"


def cielab(linear: np.ndarray) -> np.ndarray:
    """Linear RGB as CIELAB, in which distances are what an eye sees: 2 can just be told apart side by side."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("at", [0, 5, 10])
def test_a_mark_stands_at_its_place_with_its_name_inside(at, width):
    figure = line_chart("t", Axis("x", 0, 10), UNIT, [], [(at, "now: 5")], width=width)
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [at, at]
    left, _, right, _ = shown(figure)["now: 5"]
    axes = figure.axes[0].get_position()
    mark = axes.x0 + at / 10 * axes.width
    assert left > mark or right < mark, "the name lies on its line"


def test_columns_are_as_high_as_their_values_and_missing_without_one(width):
    axes = column_chart("t", "layer", ["3", "4", "5"], Axis("y", 0, 100), [50.0, None, 100.0]).axes[0]
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]
    assert bars == [(pytest.approx(0), 50), (pytest.approx(2), 100)]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["3", "4", "5"]
    many = [f"L{layer}" for layer in range(75)]
    figure = column_chart("t", "layer", many, Axis("y", 0, 100), [50.0] * 75, width=width)
    assert sum(name in many for name in shown(figure)) >= width // 45


def test_stacked_bars_lie_end_to_end_and_the_same_data_give_the_same_picture(width):
    chart = partial(bar_chart, "t", Axis("MiB", 0, 10), [("a", [2.0, 3.0]), ("b", [0.0, 10.0])], ["read", "moved"])
    one = chart(width=width)
    bars = [(bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in one.axes[0].patches]
    assert bars == [(0, 2, pytest.approx(0)), (0, 0, pytest.approx(1)), (2, 3, pytest.approx(0)), (0, 10, pytest.approx(1))]
    boxes = shown(one)
    assert boxes["a"][1] > boxes["b"][1], "the first row is not on top"
    assert {"read", "moved"} <= set(boxes)
    assert tostring(picture(chart)) == tostring(picture(chart))


def test_lines_that_coincide_take_turns_and_points_that_coincide_are_rings():
    points, other = [(0, 1.0), (1, 2.0)], [(0, 2.0), (1, 1.0)]
    lines = [Line("a", points), Line("b", points), Line("c", other)]
    assert [line["linestyle"] for line in _styles(lines)] == [(0, (4, 4)), (4, (4, 4)), "-."], "dashes in the gaps of others"
    drawn = (
        line_chart("t", UNIT, Axis("y", 0, 2), [Line("a", points, joined=False), Line("b", points, joined=False)]).axes[0].lines
    )
    assert drawn[0].get_markersize() > drawn[1].get_markersize()
    assert drawn[0].get_marker() != drawn[1].get_marker()
    assert {line.get_linestyle() for line in drawn} == {"None"}


HOSTILE = "</title><script>alert(1)</script> & \"quoted\" 'x' $x_{$ 漢"
NAME = "<script>\x00\ud800</script>"


def charts(text: str, name: str) -> list[Chart]:
    """One of each kind."""
    axis, line = Axis(text, 0, 1), Line(name, [(0, 1)])
    return [
        partial(line_chart, text, axis, axis, [line, line], [(0, text)]),
        partial(bar_chart, text, axis, [(name, [1.0, 2.0])], [name, text]),
        partial(column_chart, text, text, [name], axis, [1.0]),
        partial(cell_map, text, text, text, [name], np.array([[0]]), [(name, "#000000")]),
    ]


@pytest.mark.filterwarnings("error")
def test_no_text_becomes_markup():
    page = [*map(picture, charts(HOSTILE, NAME)), table([HOSTILE], [[HOSTILE]]), element("p", HOSTILE, id=HOSTILE)]
    text, tags, attributes = document(HOSTILE, *page), set(), []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: (tags.add(tag), attributes.extend(attrs))
    parser.feed(text)
    assert "script" not in tags
    assert ("id", HOSTILE) in attributes
    assert text.count("&lt;script&gt;") > 10


def test_a_report_loads_nothing():
    text = document("t", *map(picture, charts("t", "n")))
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert not re.findall(r"https?://|src=|@import", text)
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert {link[:5] for link in re.findall(r'href="([^"]*)"', text) if not link.startswith("#")} == {"data:"}
