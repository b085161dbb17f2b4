"""Options that many commands share, each spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def _file_or_dash(_type: object, path: Path) -> None:
    if str(path).startswith("-") and str(path) != "-":
        raise ValueError(f'unknown option "{path}"')


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
