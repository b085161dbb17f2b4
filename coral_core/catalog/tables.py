"""Strict reading of the catalogue's CSV tables: every fault is an InputError that names file and line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, TypeVar

from coral_core.errors import InputError, unknown_name

Value = TypeVar("Value")
Key = TypeVar("Key")

MOST_DIGITS: Final = 300
"""Whole numbers that a float can still hold."""


def package_table(name: str) -> Traversable:
    """A table that ships with the package."""
    return files("coral_core.catalog") / "data" / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table; `where` is file:line. Getters raise InputError that names the column too."""

    where: str
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell that must not be empty."""
        value = self.cells[column].strip()
        if not value:
            raise InputError(f"{column} is empty", where=self.where)
        return value

    def positive(self, column: str) -> float:
        """A finite number above zero."""
        value = self.optional_positive(column)
        if value is None:
            raise InputError(f"{column} is empty, must be a number above 0", where=self.where)
        return value

    def filled(self, column: str) -> bool:
        """Whether the cell holds anything."""
        return bool(self.cells[column].strip())

    def optional_positive(self, column: str) -> float | None:
        """A finite number above zero, or None for an empty cell."""
        text = self.cells[column].strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{column} is {text!r}, must be a number above 0", where=self.where)
        return value

    def count(self, column: str) -> int:
        """A whole number above zero."""
        return self._whole(column, least=1)

    def count_or_zero(self, column: str) -> int:
        """A whole number, zero or above."""
        return self._whole(column, least=0)

    def _whole(self, column: str, *, least: int) -> int:
        text = self.text(column)
        if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < least:
            raise InputError(f"{column} is {text[:60]!r}, must be a whole number of at least {least}", where=self.where)
        return int(text)

    def day(self, column: str) -> date:
        """An ISO date."""
        text = self.text(column)
        try:
            return date.fromisoformat(text)
        except ValueError:
            raise InputError(f"{column} is {text!r}, must be a date such as 2026-01-31", where=self.where) from None

    def flag(self, column: str) -> bool:
        """`yes` or `no`."""
        return self.member(column, {"yes": True, "no": False})

    def member(self, column: str, known: Mapping[str, Value]) -> Value:
        """The entry of `known` that the cell names."""
        return self._known(column, self.text(column), known)

    def members(self, column: str, known: Mapping[str, Value]) -> list[Value]:
        """The entries of `known` that the cell names, separated by spaces."""
        return [self._known(column, name, known) for name in self.text(column).split()]

    def _known(self, column: str, name: str, known: Mapping[str, Value]) -> Value:
        if name not in known:
            raise unknown_name(column, name, known, where=self.where)
        return known[name]


def read_table(file: Traversable, columns: Sequence[str]) -> Iterator[Row]:
    """The table's rows; the header must be exactly `columns`, every row as long, and there must be one at least."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=file.name) from error
    lines = _lines(text, file.name)
    _, header = next(lines, (1, []))
    if header != list(columns):
        raise InputError(f"columns are {','.join(header)}", where=f"{file.name}:1", fix=f"due: {','.join(columns)}")
    empty = True
    for line, cells in lines:
        where = f"{file.name}:{line}"
        if len(cells) != len(columns):
            raise InputError(f"{len(cells)} cells, {len(columns)} are due", where=where)
        empty = False
        yield Row(where=where, cells=dict(zip(columns, cells, strict=True)))
    if empty:
        raise InputError("holds no rows", where=file.name)


def _lines(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and cells."""
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise InputError(f"not valid CSV: {error}", where=f"{name}:{reader.line_num}") from None


def add_once(table: dict[Key, Value], key: Key, value: Value, row: Row) -> None:
    """Put `value` into `table`; a key that is there already is a duplicate line."""
    if key in table:
        raise InputError(f"{key!r} is there twice", where=row.where)
    table[key] = value
