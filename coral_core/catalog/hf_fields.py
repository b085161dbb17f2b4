"""Typed access to the fields of a parsed config.json: every fault is an InputError with file and key path."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coral_core.catalog.shape_check import LARGEST_OTHER
from coral_core.errors import InputError

_SHORT: Final = reprlib.Repr()
_SHORT.maxlong = _SHORT.maxstring = 60


def shown(value: object) -> str:
    """How an error shows a value: cut where it is long."""
    return _SHORT.repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """One JSON object; `path` is the key path that leads to it (`text_config.` or empty), `where` the file.

    `defaults` are the values that the architecture's configuration class gives to fields left out.
    """

    values: Mapping[str, Any]
    where: str
    path: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:  # noqa: ANN401 - JSON values are of any type until a getter has checked them
        """The raw value; None where the field is left out or null."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def count(self, key: str, *, least: int = 1, most: int = LARGEST_OTHER) -> int:
        """A whole number from `least` to `most`."""
        value = self.optional_count(key, least=least, most=most)
        if value is None:
            raise self.fault(key, "is missing")
        return value

    def optional_count(self, key: str, *, least: int = 1, most: int = LARGEST_OTHER) -> int | None:
        """A whole number from `least` to `most`, or None where the field is left out or null."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(key, f"is {shown(value)}, must be a whole number")
        if value > most:
            raise self.fault(key, f"is {shown(value)}, must be at most {most}")
        if not value >= least or value != int(value):
            raise self.fault(key, f"is {shown(value)}, must be a whole number of at least {least}")
        return int(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A truth value; `default` where the field is left out or null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(key, f"is {shown(value)}, must be true or false")
        return value

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.get(key)
        if value is None:
            raise self.fault(key, "is missing")
        if not isinstance(value, str) or not value:
            raise self.fault(key, f"is {shown(value)}, must be a text")
        return value

    def array(self, key: str) -> list[Any]:
        """A list; empty where the field is left out or null."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fault(key, f"is {shown(value)}, must be a list")
        return value

    def section(self, key: str) -> Fields:
        """The object under `key`."""
        value = self.get(key)
        if value is None:
            raise self.fault(key, "is missing")
        if not isinstance(value, Mapping):
            raise self.fault(key, f"is {shown(value)}, must be an object")
        return Fields(values=value, where=self.where, path=f"{self.path}{key}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same object, with an architecture's defaults."""
        return Fields(values=self.values, where=self.where, path=self.path, defaults=defaults)

    def fault(self, key: str, what: str, *, fix: str = "") -> InputError:
        """The error that says `what` of the field `key`."""
        return InputError(f"{self.path}{key} {what}", where=self.where, fix=fix)
