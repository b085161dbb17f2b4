"""Placement methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from coral_core.domain.ports import PlacementMethod
from coral_core.errors import unknown_name
from coral_core.placement.free import FreePlacement
from coral_core.placement.ilp import IlpPlacement
from coral_core.placement.lattice import LatticePlacement
from coral_core.solver.choose import Preference

PLACEMENT_METHODS: Final[Mapping[str, Callable[[float, Preference], PlacementMethod]]] = {
    LatticePlacement.name: lambda _time_limit_s, _solver: LatticePlacement(),
    FreePlacement.name: lambda _time_limit_s, _solver: FreePlacement(),
    IlpPlacement.name: lambda time_limit_s, solver: IlpPlacement(preference=solver, time_limit_s=time_limit_s),
}


def placement_method(name: str, *, time_limit_s: float = 60.0, solver: Preference = "auto") -> PlacementMethod:
    """The method of that name; `time_limit_s` (per combination and number of stages) and `solver` matter to `ilp` only.

    Raises InputError with suggestions for an unknown name.
    """
    if name not in PLACEMENT_METHODS:
        raise unknown_name("placement method", name, PLACEMENT_METHODS, where="method")
    return PLACEMENT_METHODS[name](time_limit_s, solver)
