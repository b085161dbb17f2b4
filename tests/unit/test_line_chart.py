"""Charts are whole SVG documents that say in words what they show, and put every point where it belongs."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import pytest

from coral_core.errors import InputError
from coral_core.report.line_chart import Panel, Series, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def panel(*points, name="a", **changes):
    values = {"title": "t", "x_label": "x", "y_label": "y", "series": (Series(name=name, points=points),)}
    return Panel(**values | changes)


def drawn(*panels, columns=2, title="Worth & cost", description="Worth <grows>."):
    return ET.fromstring(line_chart(title, panels, columns=columns, description=description))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def centres(root, kind=None):
    return [
        (float(item.get("cx")), float(item.get("cy")))
        for item in root.iter(f"{SVG}circle")
        if item.get("class") == kind
    ]


def test_the_chart_can_be_read_without_sight():
    root = drawn(panel((1, 2), (2, 4), x_label="nodes", y_label="USD/h"))
    assert root.get("role") == "img"
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert (title.text, description.text) == ("Worth & cost", "Worth <grows>.")
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert {"Worth & cost", "t", "nodes", "USD/h", "a"} <= set(texts(root))
    tooltips = [circle.find(f"{SVG}title").text for circle in root.iter(f"{SVG}circle")]
    assert tooltips == ["a, nodes 1: 2 USD/h", "a, nodes 2: 4 USD/h"]


def test_it_holds_all_it_needs_and_follows_the_readers_light():
    text = line_chart("t", [panel((1, 2))], columns=1, description="d")
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text
    assert "<script" not in text
    assert text.count("http") == 1  # the namespace


def test_points_lie_in_proportion():
    (x1, y1), (x2, y2), (x3, y3) = centres(drawn(panel((0, 0), (5, 10), (10, 40))))
    assert x2 - x1 == pytest.approx(x3 - x2)
    assert y1 - y2 == pytest.approx((y1 - y3) / 4, abs=0.2)
    (_, y1), (_, y2), (_, y3) = centres(drawn(panel((0, 1), (5, 10), (10, 1000), is_log=True)))
    assert y1 - y2 == pytest.approx((y1 - y3) / 3, abs=0.2)


def test_ticks_are_round_and_cover_all_values():
    root = drawn(panel((1, 37.0), (3, 81.0)))
    assert {"0", "25", "50", "75", "100", "1", "3"} <= set(texts(root))
    root = drawn(panel((1, 0.02), (3, 4500.0), is_log=True))
    assert {"0.01", "0.1", "1", "10", "100", "1,000", "10,000"} <= set(texts(root))
    assert {"1", "10"} <= set(texts(drawn(panel((2, 1.0), is_log=True))))
    assert "0" in texts(drawn(panel((2, 0.0))))


def test_panels_stand_in_rows_and_lines_darken_in_order():
    root = drawn(*[panel((1, 1), title=f"p{i}") for i in range(3)], columns=2)
    places = [group.get("transform") for group in root.iter(f"{SVG}g")]
    assert places == ["translate(0 56)", "translate(460 56)", "translate(0 356)"]
    assert root.get("viewBox") == "0 0 920 656"
    series = tuple(Series(name=f"s{i}", points=((1, i), (2, 3 * i))) for i in range(1, 4))
    lines = list(drawn(panel(series=series)).iter(f"{SVG}polyline"))
    assert [line.get("style") for line in lines] == [f"stroke: var(--s{shade})" for shade in (4, 2, 0)]


def test_lines_that_end_together_share_a_name_and_the_mark_is_ringed():
    series = tuple(Series(name=f"s{i}", points=((1, 1), (2, 9))) for i in range(2))
    root = drawn(panel(series=series, marked=(2, 9), mark_label="published"))
    assert "s1" in texts(root)
    assert "s0" not in texts(root)
    assert "published" in texts(root)
    assert centres(root, "mark") == [centres(root)[1]]


@pytest.mark.parametrize(
    "panels",
    [
        [],
        [panel()],
        [panel((1, math.nan))],
        [panel((math.inf, 1))],
        [panel((1, -1.0))],
        [panel((1, 0.0), is_log=True)],
        [Panel(title="t", x_label="x", y_label="y", series=())],
    ],
)
def test_what_cannot_be_drawn_is_refused(panels):
    with pytest.raises(InputError, match="draw"):
        line_chart("t", panels, columns=1, description="d")
