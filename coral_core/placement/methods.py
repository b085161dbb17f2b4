"""Placement methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Final

from coral_core.domain.ports import PlacementMethod
from coral_core.errors import InputError
from coral_core.placement.ilp import IlpPlacement
from coral_core.placement.lattice import LatticePlacement

PLACEMENT_METHODS: Final[Mapping[str, Callable[[], PlacementMethod]]] = {
    LatticePlacement.name: LatticePlacement,
    IlpPlacement.name: IlpPlacement,
}


def placement_method(name: str) -> PlacementMethod:
    """The method of that name with its default limits; raises InputError with suggestions for an unknown one."""
    try:
        return PLACEMENT_METHODS[name]()
    except KeyError:
        known = ", ".join(sorted(PLACEMENT_METHODS))
        close = get_close_matches(name, PLACEMENT_METHODS, n=1)
        fix = f"did you mean {close[0]}? known: {known}" if close else f"one of {known}"
        raise InputError(f"unknown placement method {name!r}", where="method", fix=fix) from None
