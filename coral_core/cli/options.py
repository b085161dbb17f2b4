"""Options that many commands share, each spelled and explained once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token


def _file_or_dash(_type: object, path: Path) -> None:
    if str(path).startswith("-") and str(path) != "-":
        raise ValueError(f'unknown option "{path}"')


def _whole(_type: object, tokens: Sequence[Token]) -> int:
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is not a whole number") from None


WholeNumber = Annotated[int, Parameter(converter=_whole)]
"""Refuses 1.5, which the command line's own conversion rounds."""
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document instead of tables.")]
ScenarioName = Annotated[
    str, Parameter(name="--scenario", help="A shipped scenario's name (`coral scenario list`) or a YAML file.")
]
StoreUrl = Annotated[
    str | None,
    Parameter(name="--store", help="Object store URL (file://, s3://); default: CORAL_STORE, else .coral/store here."),
]
InputFile = Annotated[
    Path,
    # Without the validator, a misspelt option would be taken for a file.
    Parameter(allow_leading_hyphen=True, validator=_file_or_dash, help="A JSON file; `-` reads standard input."),
]
