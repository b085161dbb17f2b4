"""A schematic map of the world: where nodes run, and what they cost there.

Regions lie where `data/region_places.csv` says; the land around them is a few corners drawn from memory, to orient by,
not to measure on. The projection is equirectangular.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Final

from coral_core.errors import InputError
from coral_core.report.figures import usd

WIDTH, HEIGHT = 380, 190
_NORTH, _SOUTH = 78.0, -56.0
_LEAST_R, _MOST_R = 8.0, 17.0

# (longitude, latitude) around North and Central America, Greenland, South America, Africa, Eurasia, Britain, Japan,
# Australia, Sumatra and Java, Borneo, New Guinea, New Zealand, Madagascar.
_LAND: Final = (
    (
        "-168,65 -156,71 -125,70 -95,70 -82,68 -94,60 -80,52 -78,60 -65,60 -56,52 -66,45 -70,42 -76,35 -81,31 -80,25 -84,30 "
        "-97,27 -97,20 -90,21 -87,16 -78,8 -83,9 -95,15 -105,20 -114,30 -121,35 -124,42 -124,48 -135,58 -150,60 -162,57"
    ),
    "-45,60 -22,70 -20,78 -60,78 -70,77 -54,68 -51,61",
    "-78,8 -60,10 -50,1 -35,-6 -39,-15 -48,-26 -58,-38 -66,-45 -69,-54 -75,-50 -72,-35 -70,-18 -80,-6 -80,2",
    "-6,35 10,37 20,32 33,31 43,12 51,12 40,-5 40,-16 33,-27 27,-34 18,-34 12,-18 9,0 8,4 -8,4 -17,14 -17,21 -10,30",
    (
        "-9,43 -9,37 -2,37 3,43 9,44 16,38 12,45 20,40 24,36 28,41 36,36 35,31 43,13 55,17 60,22 50,29 56,26 66,25 72,20 "
        "77,8 80,15 88,22 94,17 98,8 104,1 101,13 109,11 106,20 115,22 122,31 118,39 125,35 128,35 128,41 140,54 155,59 "
        "156,51 163,58 180,65 178,70 140,73 105,77 70,73 60,69 40,67 28,71 14,67 5,60 12,56 17,58 22,65 22,58 10,54 4,52 "
        "-4,48 -2,44"
    ),
    "-5,50 1,51 -2,57 -5,58 -4,54",
    "130,32 136,34 141,36 141,41 145,43 141,45 139,38 132,35",
    "114,-22 122,-18 131,-12 136,-12 140,-17 143,-11 146,-19 153,-26 150,-37 140,-38 131,-32 116,-35",
    "95,5 104,-3 106,-6 115,-8 105,-7 99,0",
    "109,1 117,6 118,1 114,-4 110,-2",
    "131,-1 141,-3 150,-10 142,-9 137,-6",
    "173,-35 178,-38 173,-42 168,-47 167,-45 172,-40",
    "44,-25 50,-15 47,-25",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a region lies, to a degree."""

    name: str
    latitude: float
    longitude: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """What is spent in a region; `number` is how the map names it."""

    number: int
    region: str
    usd_per_h: float
    place: Place | None


@cache
def region_places() -> Mapping[str, Place]:
    """The regions whose place is known."""
    table = files("coral_core.report") / "data" / "region_places.csv"
    return {
        row["region"]: Place(name=row["place"], latitude=float(row["latitude"]), longitude=float(row["longitude"]))
        for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    }


def spots(usd_per_h: Mapping[str, float]) -> list[Spot]:
    """The regions, dearest first, numbered from 1. Raises InputError for a cost that is negative or no number."""
    for region, value in usd_per_h.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{value!r} USD/h cannot be drawn", where=f"map: {region}")
    ordered = sorted(usd_per_h.items(), key=lambda item: (-item[1], item[0]))
    places = region_places()
    return [
        Spot(number=i, region=region, usd_per_h=value, place=places.get(region))
        for i, (region, value) in enumerate(ordered, 1)
    ]


def map_words(found: list[Spot]) -> str:
    """The map in words."""
    texts = [
        f"{spot.number}: {spot.region} ({spot.place.name if spot.place else 'place unknown'}), "
        f"{usd(spot.usd_per_h)} USD/h"
        for spot in found
    ]
    return f"World map of regions. {'; '.join(texts)}."


def map_svg(found: list[Spot]) -> str:
    """The map as an element of a page that has the style sheet; regions of unknown place are not on it."""
    drawn = [spot for spot in found if spot.place]
    most = max((spot.usd_per_h for spot in drawn), default=0.0) or 1.0
    parts = [f'<path class="land" d="{_outline(corners)}"/>' for corners in _LAND]
    circles = _apart(
        [
            (*_at(spot.place.longitude, spot.place.latitude), max(_LEAST_R, _MOST_R * math.sqrt(spot.usd_per_h / most)))
            for spot in drawn
            if spot.place
        ]
    )
    for spot, (x, y, r) in zip(drawn, circles, strict=True):
        tooltip = escape(f"{spot.region}: {usd(spot.usd_per_h)} USD/h")
        parts.append(
            f'<g class="s0"><circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="currentColor" stroke="var(--paper)">'
            f'<title>{tooltip}</title></circle><text class="on" text-anchor="middle" x="{x:.1f}" y="{y + 4:.1f}">'
            f"{spot.number}</text></g>"
        )
    words = escape(map_words(found), quote=True)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{"".join(parts)}</svg>'


def _at(longitude: float, latitude: float) -> tuple[float, float]:
    return (longitude + 180.0) / 360.0 * WIDTH, (_NORTH - latitude) / (_NORTH - _SOUTH) * HEIGHT


def _outline(corners: str) -> str:
    points = (tuple(map(float, corner.split(","))) for corner in corners.split())
    return "M" + "L".join("{:.1f} {:.1f}".format(*_at(longitude, latitude)) for longitude, latitude in points) + "z"


def _apart(circles: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """The circles pushed off each other, by a fixed number of small steps, and kept on the map."""
    moved = [list(circle) for circle in circles]
    for _ in range(60):
        for i, a in enumerate(moved):
            for b in moved[i + 1 :]:
                dx, dy = b[0] - a[0], b[1] - a[1]
                distance = math.hypot(dx, dy) or 1e-6
                lap = (a[2] + b[2]) * 0.95 - distance
                if lap > 0:
                    ux, uy = (dx / distance, dy / distance) if distance > 1e-3 else (1.0, 0.0)
                    for one, sign in ((a, -0.5), (b, 0.5)):
                        one[0] += sign * lap * ux
                        one[1] += sign * lap * uy
    return [(min(max(x, r), WIDTH - r), min(max(y, r), HEIGHT - r), r) for x, y, r in moved]
