"""Smooth weighted round robin: over instances with weight T(tau), then over the nodes of a stage by their throughput.

Every turn each open member gains its weight in credit, the richest is picked and pays what all gained together. In any
window a member is picked in proportion to its weight and its picks are spread as evenly as the weights allow; credits
of a fixed set of open members sum to zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_core.errors import InputError, ServingError

Floats = NDArray[np.float64]


def pick_weighted(credit: Floats, weight: Floats, is_open: Floats) -> int:
    """The index of the next member, -1 where none is open; updates `credit`. Ties go to the lowest index.

    All three are (n,). A member with `is_open` 0 (draining, failed, full) or weight 0 gets nothing and keeps its credit.
    """
    gained = 0.0
    best = -1
    for member in range(weight.shape[0]):
        if is_open[member] != 0 and weight[member] > 0:
            credit[member] += weight[member]
            gained += weight[member]
            if best < 0 or credit[member] > credit[best]:
                best = member
    if best >= 0:
        credit[best] -= gained
    return best


@dataclass(slots=True, kw_only=True)
class Rotation:
    """Named members of one round robin, as the gateway holds them; `is_open` 0 takes a member out of turn."""

    names: tuple[str, ...]
    weight: Floats
    credit: Floats
    is_open: Floats

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Rotation:
        """All members open, no credit yet. Raises InputError for a weight that is not positive and finite."""
        for name, weight in weights.items():
            if not np.isfinite(weight) or weight <= 0:
                raise InputError(f"weight {weight!r} is not positive and finite", where=f"rotation[{name}]")
        values = np.array(list(weights.values()), dtype=np.float64)
        return cls(names=tuple(weights), weight=values, credit=np.zeros_like(values), is_open=np.ones_like(values))

    def set_open(self, name: str, *, is_open: bool) -> None:
        """Let `name` take part, or not (draining, failed, full)."""
        if name not in self.names:
            raise InputError(f"no member {name!r} in this rotation", fix=f"known: {', '.join(self.names) or 'none'}")
        self.is_open[self.names.index(name)] = float(is_open)

    def pick(self, *, excluding: Collection[str] = ()) -> str:
        """The next member; raises ServingError where none is open. `excluding`: those that just failed this request."""
        allowed = self.is_open
        if excluding:
            allowed = self.is_open * np.array([float(name not in excluding) for name in self.names])
        member = pick_weighted(self.credit, self.weight, allowed)
        if member < 0:
            raise ServingError("no instance accepts requests", fix="wait for one to become ready, or start one")
        return self.names[member]
