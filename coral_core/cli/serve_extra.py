"""What commands of the serving part say where its libraries are missing, and how they tell what happens."""

from __future__ import annotations

import contextlib
import importlib.util
import json

from coral_core.cli.output import shown
from coral_core.errors import InputError


def refuse_without(what: str, *needed: str) -> None:
    """Raise InputError naming the extra where one of the libraries is not installed."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{what} need {', '.join(missing)}", fix="install the extra: pip install 'coral-serve[serve]'")


class Teller:
    """Tells events: one JSON line each, or a line of text. Where nobody can be told any more (a full disk, a closed pipe) all goes on."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, event: str, text: str, **facts: object) -> None:
        """Say it, at once."""
        with contextlib.suppress(OSError, ValueError):  # full, closed, or without such letters
            print(json.dumps({"event": event, **facts}) if self._as_json else shown(text), flush=True)
