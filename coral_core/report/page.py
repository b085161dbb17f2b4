"""A report as one HTML file that needs nothing else: no script, no font, no address outside itself.

The only file that uses jinja2, which the extra `report` brings. Text is escaped by the template; what is markup already
are the charts, which escape what they write.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from coral_core.errors import InputError
from coral_core.report.figures import figure
from coral_core.report.palette import CHART_CSS, STYLES, line_sample, theme_css
from coral_core.report.plan_report import PlanTable

_LOG: Final = logging.getLogger(__name__)
_NUMBER: Final = re.compile(r"-?|-?[\d,]*\.?\d+%?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a legend: the sample of a line (of a `style`), or the `letter` of a part of a bar."""

    name: str
    style: int
    letter: str = ""

    @property
    def sample(self) -> str:
        """The sample as SVG."""
        return line_sample(self.style)

    @property
    def colour(self) -> str:
        """The class that has the style's colour."""
        return f"s{self.style % STYLES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Charts (title, markup) under one legend, two by two where `in_pairs`. `kind`: predicted, simulated or measured."""

    title: str
    kind: str
    charts: tuple[tuple[str, str], ...]
    keys: tuple[Key, ...] = ()
    caption: str = ""
    in_pairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A template as its stages: layers, and how many of which nodes hold them; `facts` stand beside its name."""

    name: str
    facts: tuple[str, ...]
    stages: tuple[tuple[int, Mapping[str, int]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """Templates of one policy, shown at once where `is_open`."""

    title: str
    kind: str
    pipelines: tuple[Pipeline, ...]
    is_open: bool = True
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A table that opens on demand."""

    table: PlanTable


Block = Figure | Pipelines | PlanTable | Details


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page under a heading that the contents link to."""

    ident: str
    title: str
    text: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One figure that stands for the whole, with its kind."""

    label: str
    value: str
    kind: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The whole report. `warnings` are shown before all figures, `notes` after the tiles."""

    title: str
    subtitle: str
    tiles: tuple[Tile, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]
    footer: str


def can_render() -> bool:
    """Whether the library that makes pages is installed."""
    return importlib.util.find_spec("jinja2") is not None


def page_or_none(make: Callable[[], str]) -> str | None:
    """The page that `make` makes; None where jinja2 is missing or, with a warning logged, where it fails.

    A report must never cost what it reports on: a plan about to be applied, an evaluation that took hours.
    """
    if not can_render():
        return None
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - see above; what it is, is logged
        _LOG.warning("no HTML report was made: %s: %s", type(error).__name__, error)
        return None


def render_page(page: Page) -> str:
    """The page as HTML. Raises InputError where jinja2 is not installed."""
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError as error:
        raise InputError(
            "jinja2 is not installed", where="HTML report", fix="pip install 'coral-serve[report]'"
        ) from error
    source = (files("coral_core.report") / "templates" / "page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = figure
    environment.tests["numeric"] = _is_numeric
    environment.tests["of"] = lambda block, name: type(block).__name__ == name
    style = theme_css(":root") + CHART_CSS
    text: str = environment.from_string(source).render(page=page, style=style, columns=numeric_columns)
    return text


def numeric_columns(table: PlanTable) -> list[bool]:
    """Which columns hold nothing but figures, written out or not; they stand right."""
    return [
        bool(table.rows) and all(_is_numeric(row[index]) for row in table.rows) for index in range(len(table.columns))
    ]


def _is_numeric(cell: Any) -> bool:  # noqa: ANN401 - any value that a table shows
    return _NUMBER.fullmatch(figure(cell)) is not None


def ident_of(words: Sequence[str]) -> str:
    """A fragment that names a section, from words that may hold anything."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-") or "section"
