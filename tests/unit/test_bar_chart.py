"""Bars are as long as their values, their parts have letters, and what is unknown has no bar."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import pytest

from coral_core.errors import InputError
from coral_core.report.bar_chart import Bar, BarChart, bar_svg, bar_words, letter


def chart(*bars, keys=("rent", "start-up"), **changes):
    return BarChart(**{"title": "Cost", "unit": "USD/h", "keys": keys, "bars": bars} | changes)


def rects(root):
    return [(float(item.get("x")), float(item.get("width")), item[0].text) for item in root.iter("rect")]


def test_parts_lie_end_to_end_in_proportion():
    root = ET.fromstring(
        bar_svg(chart(Bar(name="a", parts={"rent": 30.0, "start-up": 10.0}), Bar(name="b", parts={"rent": 20.0})))
    )
    (x1, w1, text), (x2, w2, _), (x3, w3, _) = rects(root)
    assert text == "a, rent: 30 USD/h"
    assert x2 == pytest.approx(x1 + w1 + 1, abs=0.2)
    assert x3 == x1
    assert (w1 + 1) / (w2 + 1) == pytest.approx(3, rel=0.02)
    assert (w1 + 1) / (w3 + 1) == pytest.approx(1.5, rel=0.02)
    assert {"A", "B", "a", "b", "40", "20", "USD/h"} <= {item.text for item in root.iter("text")}


def test_the_chart_in_words():
    one = chart(
        Bar(name="a", parts={"rent": 30.0, "start-up": 10.0}),
        Bar(name="b", parts={}),
        Bar(name="c", parts={"rent": 0.0}),
        guide=(50.0, "budget"),
    )
    assert bar_words(one) == "a: 40 USD/h (rent 30, start-up 10). b: unknown. c: 0 USD/h. budget: 50 USD/h."
    root = ET.fromstring(bar_svg(one))
    assert root.get("aria-label") == f"Cost. {bar_words(one)}"
    assert root.get("role") == "img"
    assert {"unknown", "0", "budget"} <= {item.text for item in root.iter("text")}


def test_a_single_part_needs_no_letter_and_whiskers_span_the_interval():
    root = ET.fromstring(
        bar_svg(chart(Bar(name="a", parts={"x": 100.0}, low=-5.0, high=120.0), keys=("x",), guide=(10.0, "low")))
    )
    assert "A" not in {item.text for item in root.iter("text")}
    [whisker] = [item for item in root.iter("path") if item.get("class") == "whisker"]
    assert whisker.get("d").count("M") == 3
    assert "-5" not in whisker.get("d")


def test_all_zero_is_drawn_and_letters_go_round():
    assert not rects(ET.fromstring(bar_svg(chart(Bar(name="a", parts={"rent": 0.0})))))
    assert [letter(i) for i in (0, 25, 26)] == ["A", "Z", "A"]


def test_hostile_and_long_names_stay_text():
    root = ET.fromstring(bar_svg(chart(Bar(name="<script>" + "x" * 300, parts={"rent": 1.0}))))
    assert not list(root.iter("script"))
    assert all(len(item.text) < 60 for item in root.iter("text"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_cannot_be_drawn_is_refused(value):
    with pytest.raises(InputError, match="draw"):
        bar_svg(chart(Bar(name="a", parts={"rent": value})))
    with pytest.raises(InputError, match="nothing to draw"):
        bar_svg(chart())
