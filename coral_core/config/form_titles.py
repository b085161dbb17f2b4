"""Titles of fields in forms made from our models: words, and the unit apart."""

from __future__ import annotations

from typing import Final

from pydantic.fields import ComputedFieldInfo, FieldInfo

_UNITS: Final = {"_usd_per_h": "USD/h", "_gib": "GiB", "_s": "seconds"}


def form_title(name: str, _field: FieldInfo | ComputedFieldInfo) -> str:
    """`lease_s` is "Lease (seconds)": for `field_title_generator` of a model whose schema people fill in."""
    suffix = next((end for end in _UNITS if name.endswith(end)), "")
    words = name.removesuffix(suffix).replace("_", " ").capitalize()
    return f"{words} ({_UNITS[suffix]})" if suffix else words
