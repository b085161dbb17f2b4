"""Whatever is drawn is well-formed, lies inside its frame and says itself in words; money shares add up."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.report import bar_chart, line_chart, region_map
from coral_core.report.evaluation_charts import price_shares
from coral_core.report.scales import linear_ticks, log_ticks, shortened

amounts = st.one_of(st.just(0.0), st.floats(1e-9, 1e12, allow_subnormal=False))
names = st.text(
    st.characters(min_codepoint=32, exclude_categories=["Cs", "Cn"], exclude_characters="\x7f"), max_size=60
)
points = st.lists(st.tuples(st.integers(0, 500).map(float), st.one_of(st.none(), amounts)), min_size=1, max_size=30)


def coordinates(root):
    """All places that an SVG names, of its own frame: (x, y)."""
    for item in root.iter():
        for x, y in (("x", "y"), ("cx", "cy")):
            if item.get(x) and item.tag in {"text", "circle", "rect"} and not item.get("transform"):
                yield float(item.get(x)), float(item.get(y))
        for pair in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", item.get("d") or ""):
            yield tuple(map(float, pair))


def inside(root):
    left, top, width, height = map(float, root.get("viewBox").split())
    return all(-1 <= x - left <= width + 1 and -1 <= y - top <= height + 1 for x, y in coordinates(root))


@settings(deadline=None, max_examples=60)
@given(
    series=st.lists(st.tuples(names, points), min_size=1, max_size=4), title=names, is_log=st.booleans(), end=amounts
)
def test_every_line_chart_is_whole(series, title, is_log, end):
    drawn = tuple(
        line_chart.Series(
            name=name, points=tuple((x, None if is_log and y == 0 else y) for x, y in sorted(found, key=lambda p: p[0]))
        )
        for name, found in series
    )
    panel = line_chart.Panel(title=title, x_label="x", y_label="y", series=drawn, is_log=is_log, y_end=end)
    if all(y is None for one in drawn for _, y in one.points):
        with pytest.raises(line_chart.InputError):
            line_chart.panel_svg(panel)
        return
    root = ET.fromstring(line_chart.panel_svg(panel))
    assert inside(root)
    assert root.get("aria-label").startswith(title)
    assert all(name in root.get("aria-label") for name, _ in series)


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.tuples(names, st.lists(amounts, max_size=10)), min_size=1, max_size=8), title=names)
def test_every_bar_chart_is_whole(values, title):
    keys = tuple(f"part {i}" for i in range(10))
    bars = tuple(bar_chart.Bar(name=name, parts=dict(zip(keys, parts, strict=False))) for name, parts in values)
    root = ET.fromstring(bar_chart.bar_svg(bar_chart.BarChart(title=title, unit="u", keys=keys, bars=bars)))
    assert inside(root)
    assert len(list(root.iter("rect"))) == sum(value > 0 for _, parts in values for value in parts)


@settings(deadline=None, max_examples=40)
@given(costs=st.dictionaries(st.sampled_from([*region_map.region_places(), "mars-1"]), amounts, max_size=41))
def test_every_region_that_is_known_is_on_the_map(costs):
    found = region_map.spots(costs)
    root = ET.fromstring(region_map.map_svg(found))
    assert inside(root)
    assert len(list(root.iter("circle"))) == len(costs.keys() & region_map.region_places().keys())
    assert [spot.number for spot in found] == list(range(1, len(costs) + 1))


@settings(deadline=None)
@given(value=st.floats(1e-9, 1e15), low=st.floats(1e-9, 1e15))
def test_ticks_cover_and_ascend(value, low):
    ticks = linear_ticks(value)
    assert ticks[0] == 0
    assert ticks == sorted(set(ticks))
    assert ticks[-1] >= value * (1 - 1e-6)
    assert len(ticks) <= 6
    powers = log_ticks([value, low])
    assert powers[0] <= min(value, low) * (1 + 1e-6)
    assert powers[-1] >= max(value, low) * (1 - 1e-6)


@given(text=st.text(max_size=80), most=st.integers(3, 60))
def test_shortened_names_fit(text, most):
    short = shortened(text, most)
    assert len(short) == min(len(text), most)
    assert (short == text) == (len(text) <= most) or "…" in text


@given(prices=st.lists(st.one_of(st.none(), st.floats(0.01, 100)), min_size=1, max_size=8))
def test_shares_of_a_price_add_up(prices):
    facts = [{"price_usd_per_h": {} if p is None else {"r": p}, "gpu_count": 1 + i} for i, p in enumerate(prices)]
    shares = price_shares(facts, "r")
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0
