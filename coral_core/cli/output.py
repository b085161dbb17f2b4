"""What commands print: tables and notes for people on a terminal, one JSON document for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_json(document: Any) -> None:  # noqa: ANN401 - any JSON value
    """One JSON document on stdout; refuses NaN and infinities, which are not JSON."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, note: str = "") -> None:
    """A table on stdout; numbers are right-aligned, None shows as `-`."""
    table = Table(header_style="bold")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(column, justify="right" if numeric and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*(format_cell(cell) for cell in row))
    out = console()
    out.print(title, style="bold", highlight=False, soft_wrap=True)
    out.print(table)
    if note:
        out.print(note, style="dim", highlight=False)


def print_text(text: str) -> None:
    """A line for people on stdout."""
    console().print(text, highlight=False, soft_wrap=True)


def print_note(text: str) -> None:
    """A line for people on stderr, so that stdout stays what was asked for."""
    Console(stderr=True).print(text, highlight=False, soft_wrap=True, style="dim")


def console() -> Console:
    """Stdout; as wide as its content needs when it is not a terminal (a pipe must not cut columns)."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def format_cell(value: object) -> str:
    """Numbers with up to four significant digits after a thousands separator, None as `-`."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
