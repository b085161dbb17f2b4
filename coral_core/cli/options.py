"""Options that many commands share, each spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document instead of tables.")]
ScenarioName = Annotated[
    str, Parameter(name="--scenario", help="A shipped scenario's name (`coral scenario list`) or a YAML file.")
]
StoreUrl = Annotated[
    str | None,
    Parameter(name="--store", help="Object store URL (file://, s3://); default: CORAL_STORE, else .coral/store here."),
]
InputFile = Annotated[Path, Parameter(help="A JSON file; `-` reads standard input.")]
