"""Charts are whole SVG documents that say in words what they show, and put every point where it belongs."""

from __future__ import annotations

import math
from datetime import date
from xml.etree import ElementTree as ET

import pytest

from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.perf.profile import Profile, ProfileKey, ProfilePoint
from coral_core.report.line_chart import Guide, Panel, Series, line_chart, panel_svg, panel_words
from coral_core.report.palette import DASHES
from coral_core.report.scales import linear_ticks, shortened
from tasks.profile_chart import profile_chart

SVG = "{http://www.w3.org/2000/svg}"


def panel(*points, name="a", **changes):
    values = {"title": "t", "x_label": "x", "y_label": "y", "series": (Series(name=name, points=points),)}
    return Panel(**values | changes)


def drawn(*panels, columns=2, title="Worth & cost", description="Worth <grows>."):
    return ET.fromstring(line_chart(title, panels, columns=columns, description=description))


def texts(root):
    return [element.text for element in root.iter() if element.tag.endswith("text")]


def told(root):
    """The circles that carry a figure: those of points, not those of the legend."""
    return [item for item in root.iter() if item.tag.endswith("circle") and len(item)]


def centres(root, kind=None):
    found = told(root) if kind is None else [item for item in root.iter(f"{SVG}circle") if item.get("class") == kind]
    return [(float(item.get("cx")), float(item.get("cy"))) for item in found]


def test_the_chart_can_be_read_without_sight():
    root = drawn(panel((1, 2), (2, 4), x_label="nodes", y_label="USD/h"))
    assert root.get("role") == "img"
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert (title.text, description.text) == ("Worth & cost", "Worth <grows>.")
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert {"Worth & cost", "t", "nodes", "USD/h", "a"} <= set(texts(root))
    assert [item[0].text for item in told(root)] == ["a, nodes 1: 2 USD/h", "a, nodes 2: 4 USD/h"]


def test_a_panel_of_a_page_says_itself_in_words():
    one = panel(
        (1, 2), (2, 9), (3, 4), name='<b>"&', x_label="epoch", y_label="USD/h", guides=(Guide(value=5, label="g"),)
    )
    root = ET.fromstring(panel_svg(one))
    assert root.get("role") == "img"
    assert root.get("aria-label") == 't. USD/h over epoch. <b>"&: 2 to 4 (between 2 and 9). g: 5.'
    assert panel_words(panel((1, None), (2, 3))) == "y over x. a: 3."
    assert panel_words(panel((1, None))) == "y over x. a: unknown."


def test_it_holds_all_it_needs_and_follows_the_readers_light():
    text = line_chart("t", [panel((1, 2))], columns=1, description="d")
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text
    assert "<script" not in text
    assert text.count("http") == 1  # the namespace
    assert "http" not in panel_svg(panel((1, 2)))


def test_points_lie_in_proportion():
    (x1, y1), (x2, y2), (x3, y3) = centres(drawn(panel((0, 0), (5, 10), (10, 40))))
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
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
    many = texts(drawn(panel(*((float(i), 1.0) for i in range(100)))))
    assert {"0", "13", "91"} <= set(many)
    assert "7" not in many
    assert linear_ticks(0.0) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_an_axis_goes_as_far_as_it_is_told():
    root = drawn(panel((0.2, 10.0), (0.4, 50.0), x_end=2.0, y_end=100.0))
    assert {"0", "0.5", "2", "100"} <= set(texts(root))


def test_panels_stand_in_rows_and_lines_differ_by_dashes():
    root = drawn(*[panel((1, 1), title=f"p{i}") for i in range(3)], columns=2)
    places = [group.get("transform") for group in root.iter(f"{SVG}g")]
    assert [place for place in places if place and " 46" not in place] == [
        "translate(0 64)",
        "translate(404 64)",
        "translate(0 348)",
    ]
    series = tuple(Series(name=f"s{i}", points=((1, i), (2, 3 * i))) for i in range(1, 4))
    one = panel(series=series)
    lines = [item for item in ET.fromstring(panel_svg(one)).iter("path") if item.get("class") == "line"]
    assert [line.get("stroke-dasharray") for line in lines] == [DASHES[2], DASHES[1], DASHES[0]]
    named = [item for item in drawn(one).iter(f"{SVG}text") if item.text in {"s1", "s2", "s3"}]
    assert len(named) == 3


def test_what_is_unknown_interrupts_the_line():
    root = ET.fromstring(panel_svg(panel((0, 1), (1, None), (2, 3), (3, 4))))
    [line] = [item for item in root.iter("path") if item.get("class") == "line"]
    assert line.get("d").count("M") == 2
    assert line.get("d").count("L") == 1
    assert len(told(root)) == 3


def test_markers_stay_few_on_long_lines():
    root = ET.fromstring(panel_svg(panel(*((float(i), float(i)) for i in range(500)))))
    assert 8 <= len(told(root)) <= 14


def test_brief_panels_have_few_markers_and_no_tooltips():
    line = [(float(i), float(i)) for i in range(45)]
    root = ET.fromstring(panel_svg(panel(*line, is_brief=True)))
    circles = list(root.iter("circle"))
    assert 3 <= len(circles) <= 5
    assert not told(root)


def test_the_mark_is_ringed_and_guides_are_named():
    root = drawn(panel((1, 1), (2, 9), marked=(2, 9), mark_label="published"))
    assert "published" in texts(root)
    assert centres(root, "mark") == [centres(root)[1]]
    guides = (
        Guide(value=3, label="low", axis="x"),
        Guide(value=19, label="SLO", axis="x"),
        Guide(value=40, label="demand"),
    )
    root = ET.fromstring(panel_svg(panel((1, 1), (20, 9), guides=guides, x_end=20.0)))
    assert {"low", "SLO", "demand", "40"} <= set(texts(root))
    assert len([item for item in root.iter("path") if item.get("class") == "guide"]) == 3


def test_long_names_keep_both_ends():
    assert shortened("abc", 3) == "abc"
    assert shortened("a" * 30 + "b" * 30, 11) == "a" * 5 + "…" + "b" * 5
    root = drawn(panel((1, 1), name="n" * 200, title="t" * 200))
    assert all(len(text) < 60 for text in texts(root))


@pytest.mark.parametrize(
    "panels",
    [
        [],
        [panel()],
        [panel((1, None))],
        [panel((1, math.nan))],
        [panel((math.inf, 1))],
        [panel((1, -1.0))],
        [panel((1, 0.0), is_log=True)],
        [panel((1, 1.0), guides=(Guide(value=math.nan, label="x"),))],
        [Panel(title="t", x_label="x", y_label="y", series=())],
    ],
)
def test_what_cannot_be_drawn_is_refused(panels):
    with pytest.raises(InputError, match="draw"):
        line_chart("t", panels, columns=1, description="d")


def test_a_profiles_chart_has_no_two_lines_of_one_look():
    points = [
        ProfilePoint(phase=phase, tp=tp, requests=requests, tokens=128.0 * requests, layer_s=1e-3)
        for phase in (Phase.PREFILL, Phase.DECODE)
        for tp in (1, 2)
        for requests in (1.0, 2.0, 4.0, 8.0, 16.0)
    ]
    key = ProfileKey(model="m", variant="bf16", config="c", engine="vllm", version="1")
    profile = Profile(key=key, points=tuple(points), source="s", as_of=date(2026, 11, 1))
    root = ET.fromstring(profile_chart(profile))
    legend = [
        ET.tostring(item.find(f"{SVG}svg")) for item in root.iter(f"{SVG}g") if item.find(f"{SVG}svg") is not None
    ]
    assert len(set(legend)) == len(legend) == 20
