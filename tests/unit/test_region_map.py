"""Regions lie where they are, unknown ones are said and not drawn."""

from __future__ import annotations

import csv
import math
from importlib.resources import files
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest

from coral_core.catalog import load_catalog
from coral_core.errors import InputError
from coral_core.report.region_map import HEIGHT, WIDTH, map_svg, map_words, region_places, spots


def circles(found):
    root = ET.fromstring(map_svg(found))
    return {
        group.find("text").text: tuple(float(group.find("circle").get(name)) for name in ("cx", "cy", "r"))
        for group in root.iter("g")
    }


@pytest.mark.parametrize("catalog", ["paper-core", "paper-extended", "aws-real"])
def test_every_region_of_the_catalogues_has_a_place(catalog):
    assert set(load_catalog(catalog).regions) <= set(region_places())


def test_the_table_is_sound_and_says_where_it_is_from():
    text = (files("coral_core.report") / "data" / "region_places.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == len(region_places())
    for row in rows:
        assert None not in row
        assert row["source"]
        assert row["as_of"]
        place = region_places()[row["region"]]
        assert -60 < place.latitude < 80
        assert -180 <= place.longitude <= 180


def test_the_dearest_region_is_first_and_largest():
    found = spots({"eu-west-1": 5.0, "us-east-2": 20.0, "ap-southeast-2": 5.0})
    assert [(spot.number, spot.region) for spot in found] == [(1, "us-east-2"), (2, "ap-southeast-2"), (3, "eu-west-1")]
    drawn = circles(found)
    (x1, y1, r1), (x2, y2, r2), (x3, y3, r3) = (drawn[str(i)] for i in (1, 2, 3))
    assert x1 < x3 < x2  # west to east: Ohio, Ireland, Sydney
    assert y3 < y1 < y2  # north to south
    assert r1 > r2 == r3
    assert "1: us-east-2 (Ohio), 20.00 USD/h" in map_words(found)


def test_neighbours_do_not_hide_each_other():
    drawn = circles(spots(dict.fromkeys(("us-east-1", "us-east-2", "ca-central-1", "us-east4"), 1.0)))
    assert len(drawn) == 4
    for (x1, y1, r1), (x2, y2, r2) in combinations(drawn.values(), 2):
        assert math.hypot(x1 - x2, y1 - y2) > 0.7 * (r1 + r2)
    for x, y, r in drawn.values():
        assert r <= x <= WIDTH - r
        assert r <= y <= HEIGHT - r


def test_a_region_of_unknown_place_is_said_and_not_drawn():
    found = spots({"mars-1": 3.0, "us-east-2": 0.0})
    assert list(circles(found)) == ["2"]
    assert "1: mars-1 (place unknown), 3.00 USD/h" in map_words(found)
    assert not circles(spots({}))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_costs_that_are_none_are_refused(value):
    with pytest.raises(InputError, match="mars-1"):
        spots({"mars-1": value})
