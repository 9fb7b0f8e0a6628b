"""Charts: every value stands where its axes say, names are whole and apart, and no text becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree.ElementTree import tostring

import numpy as np
import pytest
from builders.charts import cells_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from sglang_uvm_offload.report.charts import Line, _styles, bar_chart, cell_map, column_chart, line_chart, picture
from sglang_uvm_offload.report.html import document, element, table
from sglang_uvm_offload.report.units import Axis

KINDS = [("in", "#111111"), ("out", "#222222")]


def shown(figure: Figure) -> dict[str, tuple[float, float, float, float]]:
    """The texts of a drawn figure with their left, bottom, right and top, as shares of the figure."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    width, height = renderer.get_canvas_width_height()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in _beyond(figure)]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    return {name: (box.x0 / width, box.y0 / height, box.x1 / width, box.y1 / height) for name, box in boxes}


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


def assert_readable(figure: Figure) -> None:
    """No text is cut off by the picture's edge or lies on another."""
    boxes = shown(figure)
    for name, (left, bottom, right, top) in boxes.items():
        assert left >= 0, name
        assert bottom >= 0, name
        assert right <= 1, name
        assert top <= 1, name
    pairs = [(a, b) for a in boxes for b in boxes if a < b]
    for a, b in pairs:
        one, other = boxes[a], boxes[b]
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, f"{a!r} lies on {b!r}"


@pytest.mark.parametrize("shape", [(1, 4), (3, 16), (26, 64), (75, 256)])
def test_a_map_shows_every_cell_in_its_colour(shape):
    cells = np.random.default_rng(0).integers(-1, 2, shape)
    figure = cell_map("map", "expert", "layer", [f"L{row}" for row in range(shape[0])], cells, KINDS)
    assert (cells_of(figure, KINDS) == cells).all()
    assert_readable(figure)


def test_a_map_of_nothing_is_a_picture():
    assert picture(cell_map("map", "expert", "layer", [], np.zeros((0, 0), dtype=int), KINDS)).find("svg") is not None


def test_a_large_map_is_a_small_file_with_names_of_many_rows():
    cells = np.random.default_rng(0).integers(0, 2, (75, 256))
    figure = cell_map("map", "expert", "layer", [f"L{row}" for row in range(75)], cells, KINDS)
    assert len(tostring(picture(figure))) < 100_000
    assert sum(name.startswith("L") for name in shown(figure)) > 10


def test_the_legend_of_a_map_names_what_is_there():
    names = set(shown(cell_map("map", "expert", "layer", ["0"], np.array([[1, 1]]), KINDS)))
    assert "out" in names
    assert "in" not in names


def test_a_line_is_interrupted_where_there_is_no_value_and_a_lone_point_is_a_dot():
    spots = [(0, 1), (1, 1), (2, None), (3, 1), (4, None)]
    figure = line_chart("t", Axis("x", 0, 4), Axis("y", 0, 2), [Line("a", spots)])
    (line,) = figure.axes[0].lines
    x, y = line.get_data()
    assert list(x) == [0, 1, 2, 3, 4]
    assert np.isnan(y).tolist() == [False, False, True, False, True]
    assert line.get_markevery() == [3]
    assert line.get_marker() == "o"
    assert figure.axes[0].get_xlim() == (0, 4)
    assert figure.axes[0].get_ylim() == (0, 2)


def test_the_legend_tells_lines_apart():
    names = [f"line {index}" for index in range(8)]
    lines = [Line(name, [(0, 0), (1, index / 8)], name == "line 7") for index, name in enumerate(names)]
    figure = line_chart("t", Axis("x", 0, 1), Axis("y", 0, 1), lines)
    looks = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert len(set(looks)) == 8
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert [(line.get_color(), line.get_linestyle()) for line in legend.get_lines()] == looks
    assert_readable(figure)


def test_a_name_like_those_that_matplotlib_hides_is_in_the_legend():
    assert "_a" in shown(line_chart("t", Axis("x", 0, 1), Axis("y", 0, 1), [Line("_a", [(0, 0), (1, 1)])]))


def test_long_names_have_room():
    names = [f"one ranking of all layers, DP rank {index}" for index in range(8)]
    figure = line_chart("t", Axis("x", 0, 1), Axis("y", 0, 1), [Line(name, [(0, 0), (1, 1)]) for name in names])
    assert set(names) <= set(shown(figure))
    assert_readable(figure)


@pytest.mark.parametrize("at", [0, 5, 10])
def test_a_mark_stands_at_its_place_with_its_name_inside(at):
    figure = line_chart("t", Axis("x", 0, 10), Axis("y", 0, 1), [], [(at, "now: 5")])
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [at, at]
    assert_readable(figure)
    left, _, right, _ = shown(figure)["now: 5"]
    axes = figure.axes[0].get_position()
    mark = axes.x0 + at / 10 * axes.width
    assert left > mark or right < mark, "the name lies on its line"


def test_columns_are_as_high_as_their_values_and_missing_without_one():
    axes = column_chart("t", "layer", ["3", "4", "5"], Axis("y", 0, 100), [50.0, None, 100.0]).axes[0]
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]
    assert bars == [(pytest.approx(0), 50), (pytest.approx(2), 100)]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["3", "4", "5"]


def test_the_names_of_many_columns_do_not_lie_on_each_other():
    names = [f"L{layer}" for layer in range(3, 78)]
    figure = column_chart("t", "layer", names, Axis("y", 0, 100), [50.0] * 75)
    assert sum(name in names for name in shown(figure)) >= 20
    assert_readable(figure)


def test_stacked_bars_lie_end_to_end():
    figure = bar_chart("t", Axis("MiB", 0, 10), [("a", [2.0, 3.0]), ("b", [0.0, 10.0])], ["read", "moved"])
    bars = [(bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in figure.axes[0].patches]
    assert bars == [(0, 2, pytest.approx(0)), (0, 0, pytest.approx(1)), (2, 3, pytest.approx(0)), (0, 10, pytest.approx(1))]
    boxes = shown(figure)
    assert boxes["a"][1] > boxes["b"][1], "the first row is not on top"
    assert {"read", "moved"} <= set(boxes)
    assert_readable(figure)


def test_an_axis_of_things_has_no_ticks_between_them():
    figure = line_chart("t", Axis("layer", 0, 2, whole=True), Axis("y", 0, 1), [])
    assert figure.axes[0].get_xticks().tolist() == [0, 1, 2]


def test_the_same_data_give_the_same_picture():
    one, other = (
        tostring(picture(bar_chart("t", Axis("MiB", 0, 10), [("a", [2.0, 3.0])], ["read", "moved"]))) for _ in range(2)
    )
    assert one == other


class Tags(HTMLParser):
    """What a browser takes for tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs


HOSTILE = "</title><script>alert(1)</script> & \"quoted\" 'x' $x_{$ 漢"
NAME = "<script>\x00\ud800</script>"


@pytest.mark.filterwarnings("error")
def test_no_text_becomes_markup():
    charts = [
        line_chart(HOSTILE, Axis(HOSTILE, 0, 1), Axis(HOSTILE, 0, 1), [Line(NAME, [(0, 1)])], [(0, HOSTILE)]),
        bar_chart(HOSTILE, Axis(HOSTILE, 0, 1), [(NAME, [1.0, 2.0])], [NAME, HOSTILE]),
        column_chart(HOSTILE, HOSTILE, [NAME], Axis(HOSTILE, 0, 1), [1.0]),
        cell_map(HOSTILE, HOSTILE, HOSTILE, [NAME], np.array([[0]]), [(NAME, "#000000")]),
    ]
    text = document(HOSTILE, *map(picture, charts), table([HOSTILE], [[HOSTILE]]), element("p", HOSTILE, id=HOSTILE))
    read = Tags()
    read.feed(text)
    assert "script" not in read.tags
    assert ("id", HOSTILE) in read.attributes
    assert text.count("&lt;script&gt;") > 10


def test_a_report_loads_nothing():
    pictures = [
        line_chart("t", Axis("x", 0, 1), Axis("y", 0, 1), [Line("a", [(0, 1)])]),
        cell_map("map", "expert", "layer", ["0"], np.array([[1, 1]]), KINDS),
    ]
    text = document("t", *map(picture, pictures))
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert not re.findall(r"https?://", text)
    assert "src=" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    assert {link[:5] for link in re.findall(r'href="([^"]*)"', text) if not link.startswith("#")} == {"data:"}


def test_lines_that_coincide_take_turns_and_points_that_coincide_are_rings():
    points, other = [(0, 1.0), (1, 2.0)], [(0, 2.0), (1, 1.0)]
    x, y = Axis("x", 0, 1), Axis("y", 0, 2)
    lines = [Line("a", points), Line("b", points), Line("c", other, dashed=True)]
    one, two, alone = (line["linestyle"] for line in _styles(lines))
    assert one == (0, (4, 4))
    assert two == (4, (4, 4)), "its dashes are in the gaps of the first"
    assert alone == "--"
    drawn = line_chart("t", x, y, [Line("a", points, joined=False), Line("b", points, joined=False)]).axes[0].lines
    assert drawn[0].get_markersize() > drawn[1].get_markersize()
    assert drawn[0].get_marker() != drawn[1].get_marker()
    assert {line.get_linestyle() for line in drawn} == {"None"}
