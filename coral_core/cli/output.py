"""What commands print: tables and notes for people on a terminal, one JSON document for machines."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coral_core.report.figures import figure

WIDTH: Final = 100
"""Tables are made to fit this many columns where they can."""

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Signs that a terminal obeys instead of showing; stored objects and names are anybody's."""

_FIGURE: Final = re.compile(r"-?|-?[\d,]*\.?\d+%?")


def print_json(document: Any) -> None:  # noqa: ANN401 - any JSON value
    """One JSON document on stdout; refuses NaN and infinities, which are not JSON."""
    is_utf8 = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=not is_utf8) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, note: str = "") -> None:
    """A table on stdout; columns of numbers (written out or not) are right-aligned, None shows as `-`."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    cells = [[shown(figure(cell)) for cell in row] for row in rows]
    widths = [max(map(len, (column, *_lines(cells, index)))) for index, column in enumerate(columns)]
    narrow = sum(widths) + 2 * len(widths) > WIDTH
    for index, column in enumerate(columns):
        numeric = all(_FIGURE.fullmatch(row[index]) for row in cells)
        table.add_column(
            Text(shown(_wrapped(column, _lines(cells, index)) if narrow else column)),
            justify="right" if numeric and rows else "left",
            overflow="fold",
        )
    for row in cells:
        table.add_row(*map(Text, row))  # as text: brackets are no markup
    out = console()
    out.print(shown(title), style="bold", highlight=False, soft_wrap=True, markup=False)
    out.print(table)
    if note:
        out.print(shown(note), style="dim", highlight=False, markup=False)


def _lines(cells: Sequence[Sequence[str]], index: int) -> list[str]:
    return [line for row in cells for line in row[index].splitlines()]


def _wrapped(column: str, lines: Sequence[str]) -> str:
    """A header on several lines where its cells are narrower."""
    return textwrap.fill(column, max(map(len, (*column.split(), *lines))))


def print_text(text: str) -> None:
    """A line for people on stdout."""
    console().print(shown(text), highlight=False, soft_wrap=True, markup=False)


def print_note(text: str) -> None:
    """A line for people on stderr, so that stdout stays what was asked for."""
    Console(stderr=True).print(shown(text), highlight=False, soft_wrap=True, style="dim", markup=False)


def shown(text: str) -> str:
    """The text with a replacement character for each sign that would steer the terminal."""
    return _CONTROL.sub("\ufffd", text)


def console() -> Console:
    """Stdout; as wide as its content needs when it is not a terminal (a pipe must not cut columns)."""
    return Console() if sys.stdout.isatty() else Console(width=200)
