"""Whether one plan is cheaper than another, or the error bars of their capacities leave that open.

Data: of each plan USD/h by what is served on what (model, variant, phase, node configurations), and the 90th percentile e of
the relative error of its capacities, None where it is not known.

A capacity that is off by a share makes its instances serve a demand at a cost that is off by that share, |share| <= e in nine of
ten comparisons. What both plans spend on the same is off by the same share, so with a_k and b_k spent on k the difference

    b - a  lies within  sum_k (b_k - a_k)  +-  sum_k |b_k - a_k| e_k

for all errors within their bars; where that holds 0, they decide which plan is cheaper. To first order: whole instances, and
what another plan would be chosen at other capacities, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SAME_FRAC: Final = 1e-9
"""Relative difference of costs that are the same but for rounding."""

Spent = tuple[str, ...]


class CostVerdict(StrEnum):
    """What can be said of another plan's cost beside ours."""

    DEARER = "dearer"
    CHEAPER = "cheaper"
    SAME = "same"
    WITHIN_ERROR = "within error"
    ERROR_UNKNOWN = "error not known"
    OTHER_DEMAND = "serves other demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPart:
    """USD/h spent on `what` (model, variant, phase, node configurations)."""

    what: Spent
    cost_usd_per_h: float
    error_frac: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostComparison:
    """Another plan's cost over ours, a pure number; the bounds are None where an error that matters is not known or other demand is served, all three where ours is 0."""

    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    verdict: CostVerdict


def compare_costs(ours: Iterable[CostPart], theirs: Iterable[CostPart], *, same_demand: bool) -> CostComparison:
    """Their cost beside ours. `same_demand`: both plans serve the same share of it; costs do not compare otherwise."""
    own, other = _by_what(ours), _by_what(theirs)
    own_usd, other_usd = (sum(cost for cost, _ in side.values()) for side in (own, other))
    difference_usd, slack_usd = other_usd - own_usd, _slack_usd(own, other, SAME_FRAC * max(own_usd, other_usd))
    bounds: tuple[float | None, float | None] = (None, None)
    if same_demand and own_usd > 0 and slack_usd is not None:
        bounds = ((other_usd - slack_usd) / own_usd, (other_usd + slack_usd) / own_usd)
    return CostComparison(
        ratio=other_usd / own_usd if own_usd > 0 else None,
        ratio_low=bounds[0],
        ratio_high=bounds[1],
        verdict=_verdict(difference_usd, slack_usd, SAME_FRAC * max(own_usd, other_usd))
        if same_demand
        else CostVerdict.OTHER_DEMAND,
    )


def _by_what(parts: Iterable[CostPart]) -> dict[Spent, tuple[float, float | None]]:
    """Cost and error by what it is spent on; of several errors the largest, none where one is not known."""
    found: dict[Spent, tuple[float, float | None]] = {}
    for part in parts:
        cost, error = found.get(part.what, (0.0, 0.0))
        known = None if error is None or part.error_frac is None else max(error, part.error_frac)
        found[part.what] = (cost + part.cost_usd_per_h, known)
    return found


def _slack_usd(
    ours: Mapping[Spent, tuple[float, float | None]],
    theirs: Mapping[Spent, tuple[float, float | None]],
    same_usd: float,
) -> float | None:
    """By how much errors within their bars move the difference; None where a part that differs has no known error."""
    total = 0.0
    for what in dict.fromkeys([*ours, *theirs]):
        sides = [side[what] for side in (ours, theirs) if what in side]
        moved = abs(ours.get(what, (0.0, None))[0] - theirs.get(what, (0.0, None))[0])
        if moved <= same_usd:
            continue
        errors = [error for _, error in sides if error is not None]
        if len(errors) < len(sides):
            return None
        total += moved * max(errors)
    return total


def _verdict(difference_usd: float, slack_usd: float | None, same_usd: float) -> CostVerdict:
    if slack_usd is None:
        return CostVerdict.ERROR_UNKNOWN
    if abs(difference_usd) <= same_usd and slack_usd == 0:
        return CostVerdict.SAME
    if abs(difference_usd) <= slack_usd:
        return CostVerdict.WITHIN_ERROR
    return CostVerdict.DEARER if difference_usd > 0 else CostVerdict.CHEAPER
