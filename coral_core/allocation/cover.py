"""Least cost of one demand unit's whole plan where no capacity binds: dynamic programs on units of demand.

Data: places k (regions whose service adds up), in each one or two rows that must be covered alike; items of price c that
  cover a fraction a of one row, or of all rows at once (`everywhere`), some of them (what runs) in limited number.
Objective: least cost with sum over places of min over the place's rows of coverage, plus that of `everywhere`, >= 1.

On N units of demand an item that covers a counts floor(a N) units in a plan and ceil(a N) in a bound. The plan found with
floors is a plan; the least cost with ceilings is a bound, for the sum of ceilings is at least N whenever the true coverage
is (to within `DEMAND_TOLERANCE_FRAC`, far less than a unit). Where the plan of the ceilings covers the demand in truth,
it is optimal.

Fixing by bound: with r the least cost per unit, a plan that uses an item costs at least r N + (c - r' a N), r' the part of r
that the item's row carries; above the cost of a known plan the item is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coral_core.allocation.coverage import Bools, Floats, Ints

Choices = NDArray[np.int32]
Rounding = Callable[[Floats], Floats]

_FIRST_UNITS = 2_048
_GROWTH = 4
_MAX_UNITS_ONE_PLACE = 131_072
_MAX_UNITS = 32_768
_COMPLETION_UNITS_ALONE = 8_192
_COMPLETION_UNITS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Columns (their numbers) that enter one row of one place: price, fraction covered (at most 1), most of each."""

    column: Ints
    price_usd_per_h: Floats
    covered_frac: Floats
    upper: Floats

    def __len__(self) -> int:
        return len(self.column)

    def take(self, chosen: Bools) -> Items:
        """The chosen items."""
        return Items(
            column=self.column[chosen],
            price_usd_per_h=self.price_usd_per_h[chosen],
            covered_frac=self.covered_frac[chosen],
            upper=self.upper[chosen],
        )


def joined(parts: list[Items]) -> Items:
    """All items of the parts."""
    none = [np.zeros(0)]
    return Items(
        column=np.concatenate([*none, *(part.column for part in parts)]).astype(np.int64),
        price_usd_per_h=np.concatenate([*none, *(part.price_usd_per_h for part in parts)]),
        covered_frac=np.concatenate([*none, *(part.covered_frac for part in parts)]),
        upper=np.concatenate([*none, *(part.upper for part in parts)]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverProblem:
    """`places[k]` holds the items of each row in place k; `everywhere` those that cover all rows of any place."""

    places: tuple[tuple[Items, ...], ...]
    everywhere: Items

    @property
    def servable(self) -> bool:
        """Whether anything serves at all; then enough of it serves everything."""
        return bool(self.places) or len(self.everywhere) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """Instances by column, their cost, and what is proven; `plan` is None where nothing covers the demand."""

    plan: dict[int, int] | None
    cost_usd_per_h: float
    bound_usd_per_h: float
    units: int = 0


def cover(problem: CoverProblem, *, gap_frac: float, deadline_s: float = math.inf) -> Cover:
    """A plan and a bound, on finer units until they are within the gap, the finest are reached, or it is `deadline_s`."""
    best = Cover(plan=None, cost_usd_per_h=math.inf, bound_usd_per_h=0.0)
    units = _FIRST_UNITS
    last = _MAX_UNITS_ONE_PLACE if len(problem.places) == 1 else _MAX_UNITS
    while True:
        upward = _Grid.of(problem, units, np.ceil, limit=best.cost_usd_per_h)
        bound = max(best.bound_usd_per_h, min(upward.least_usd_per_h, best.cost_usd_per_h))
        found = [best]
        if math.isfinite(upward.least_usd_per_h):
            plan = upward.plan()
            if covers(problem, plan):
                found.append(_priced(problem, plan))
            else:
                downward = _Grid.of(problem, units, np.floor, limit=best.cost_usd_per_h)
                if math.isfinite(downward.least_usd_per_h):
                    found.append(_priced(problem, downward.plan()))
        elif best.plan is None:
            return replace(best, units=units)  # the ceilings cover nothing, so nothing does
        best = min(found, key=lambda cover: cover.cost_usd_per_h)
        best = replace(best, bound_usd_per_h=min(bound, best.cost_usd_per_h), units=units)
        near = best.plan is not None and best.cost_usd_per_h - best.bound_usd_per_h <= gap_frac * best.cost_usd_per_h
        if near or units >= last or time.perf_counter() > deadline_s:
            return best
        if best.plan is not None:
            problem = _without_useless(problem, best.cost_usd_per_h)
        units *= _GROWTH


def covers(problem: CoverProblem, plan: dict[int, int]) -> bool:
    """Whether a plan covers the demand in truth, without any tolerance."""
    return _served(problem, plan) >= 1.0


def _served(problem: CoverProblem, plan: dict[int, int]) -> float:
    def amount(items: Items) -> float:
        number = [plan.get(int(j), 0) for j in items.column]
        return math.fsum(n * a for n, a in zip(number, items.covered_frac.tolist(), strict=True) if n)

    places = [min(amount(items) for items in rows) for rows in problem.places]
    return math.fsum([*places, amount(problem.everywhere)])


def _priced(problem: CoverProblem, plan: dict[int, int]) -> Cover:
    kinds = [*(items for rows in problem.places for items in rows), problem.everywhere]
    price = {int(j): float(p) for items in kinds for j, p in zip(items.column, items.price_usd_per_h, strict=True)}
    cost = math.fsum(number * price[j] for j, number in plan.items())
    return Cover(plan=plan, cost_usd_per_h=cost, bound_usd_per_h=0.0)


def _without_useless(problem: CoverProblem, limit: float) -> CoverProblem:
    """Without the items that no plan of at most `limit` uses."""
    rates = [[_rate(items) for items in rows] for rows in problem.places]
    rate = min([*(sum(row) for row in rates), _rate(problem.everywhere)], default=0.0)
    if not math.isfinite(rate):
        return problem
    room = limit * (1 + 1e-12) - rate

    def useful(items: Items, own: float) -> Items:
        return items.take(items.price_usd_per_h - own * items.covered_frac <= room)

    places = []
    for rows, row_rates in zip(problem.places, rates, strict=True):
        whole = sum(row_rates)
        shares = [own * rate / whole if 0 < whole < math.inf else 0.0 for own in row_rates]
        places.append(tuple(useful(items, own) for items, own in zip(rows, shares, strict=True)))
    kept = tuple(rows for rows in places if all(len(items) for items in rows))
    return CoverProblem(places=kept, everywhere=useful(problem.everywhere, rate))


def _rate(items: Items) -> float:
    """Least price per whole demand."""
    return float((items.price_usd_per_h / items.covered_frac).min(initial=math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Bounds on what the rest of a plan costs beside one instance, by the units (rounded up) that this one covers.

    `rows[k][i]` (N+1,) for an instance in row i of place k, `everywhere` (N+1,) for one that covers all rows.
    """

    units: int
    rows: list[list[Floats]]
    everywhere: Floats


def completions(problem: CoverProblem) -> Completion:
    """The bounds on a grid that is fine where one table answers, coarse where every pair of tables is joined."""
    alone = len(problem.places) == 1 and len(problem.places[0]) == 1 and not len(problem.everywhere)
    units = _COMPLETION_UNITS_ALONE if alone else _COMPLETION_UNITS
    tables = [[_table(items, units, np.ceil).values for items in place] for place in problem.places]
    free = _table(problem.everywhere, units, np.ceil).values
    served = [np.sum(place, axis=0) for place in tables]
    before, after = [free], [_nothing(units)]
    for values in served:
        before.append(_join(before[-1], values, 0.0, math.inf))
    for values in reversed(served):
        after.append(_join(after[-1], values, 0.0, math.inf))
    rows = []
    for k, place in enumerate(tables):
        rest = _join(before[k], after[len(served) - 1 - k], 0.0, math.inf)
        partners = [sum((other for other in place if other is not row), np.zeros(units + 1)) for row in place]
        rows.append([_beside(row, partner, rest) for row, partner in zip(place, partners, strict=True)])
    return Completion(units=units, rows=rows, everywhere=before[-1][::-1].copy())


def _beside(row: Floats, partner: Floats, rest: Floats) -> Floats:
    """By units t: the least, over y units served here, of row(y - t) + partner(y) + rest(N - y)."""
    other = partner + rest[::-1]
    some = np.flatnonzero(np.isfinite(other))
    found = np.full(len(row), np.inf)
    if len(some) == 1:  # all is served here
        y = int(some[0])
        found[: y + 1], found[y:] = row[y::-1] + other[y], row[0] + other[y]
        return found
    for t in range(len(row)):
        found[t] = (row[np.maximum(some - t, 0)] + other[some]).min(initial=np.inf)
    return found


def _nothing(units: int) -> Floats:
    """The table of no items: 0 units at no cost."""
    values = np.full(units + 1, np.inf)
    values[0] = 0.0
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A covering table in stages: any number of the unlimited items, then the limited ones part by part."""

    units: Ints
    column: Ints
    choice: Choices
    stages: list[Floats]
    parts: list[tuple[int, int, int]]
    usd_per_h_per_unit: float

    @property
    def values(self) -> Floats:
        """(N+1,): least cost by units covered."""
        return self.stages[-1]

    def take(self, y: int, plan: dict[int, int]) -> int:
        """Add the instances that cover `y` units to `plan`; returns the units left to what the table began with."""
        for stage in range(len(self.parts), 0, -1):
            column, number, units = self.parts[stage - 1]
            if self.stages[stage][y] < self.stages[stage - 1][y]:
                plan[column] = plan.get(column, 0) + number
                y = max(y - units, 0)
        while (item := int(self.choice[y])) >= 0:
            column = int(self.column[item])
            plan[column] = plan.get(column, 0) + 1
            y = max(y - int(self.units[item]), 0)
        return y


def _table(items: Items, units: int, rounded: Rounding, start: Floats | None = None) -> _Table:
    """The table of items on a grid, extending `start` (default: nothing is covered)."""
    from coral_core.allocation.cover_kernel import extend, extend_once  # noqa: PLC0415 - numba loads only when it pays

    covered = np.minimum(rounded(items.covered_frac * units), units).astype(np.int64)
    some = covered > 0
    unlimited = some & np.isinf(items.upper)
    first = _nothing(units) if start is None else start.copy()
    choice = np.full(units + 1, -1, dtype=np.int32)
    price = items.price_usd_per_h
    extend(covered[unlimited], price[unlimited], first, choice)
    stages, parts = [first], []
    for i in np.flatnonzero(some & ~unlimited):
        left, size = int(min(items.upper[i], -(-units // covered[i]))), 1
        while left > 0:  # 1, 2, 4, ... of them, and the rest: every number is a sum of these
            number = min(size, left)
            parts.append((int(items.column[i]), number, int(min(number * covered[i], units))))
            out = np.empty(units + 1)
            extend_once(parts[-1][2], float(number * price[i]), stages[-1], out)
            stages.append(out)
            left, size = left - number, size * 2
    return _Table(
        units=covered[unlimited],
        column=items.column[unlimited],
        choice=choice,
        stages=stages,
        parts=parts,
        usd_per_h_per_unit=float((price[some] / covered[some]).min(initial=np.inf)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """All tables of a problem on one grid: rows by place, places joined one after the other, then `everywhere`."""

    rows: list[list[_Table]]
    joined: list[Floats]
    everywhere: _Table

    @classmethod
    def of(cls, problem: CoverProblem, units: int, rounded: Rounding, *, limit: float) -> _Grid:
        """Compute the tables; what costs more than `limit` in the end may be left out."""
        rows = [[_table(items, units, rounded) for items in place] for place in problem.places]
        alone = _table(problem.everywhere, units, rounded)
        rate = min([*(sum(row.usd_per_h_per_unit for row in place) for place in rows), alone.usd_per_h_per_unit])
        served = [_together(place) for place in rows]
        limit = min([limit, float(alone.values[-1]), *(float(values[-1]) for values in served)]) * (1 + 1e-12)
        joined = [served[0] if served else _nothing(units)]
        for values in served[1:]:
            joined.append(_join(joined[-1], values, rate, limit))
        return cls(rows=rows, joined=joined, everywhere=_table(problem.everywhere, units, rounded, joined[-1]))

    @property
    def least_usd_per_h(self) -> float:
        """The least cost that covers the whole demand on this grid."""
        return float(self.everywhere.values[-1])

    def plan(self) -> dict[int, int]:
        """Instances by column of a plan of that cost."""
        plan: dict[int, int] = {}
        y = self.everywhere.take(len(self.everywhere.values) - 1, plan)
        for k in range(len(self.rows) - 1, -1, -1):
            own = y
            if k > 0:
                before, values = _steps(self.joined[k - 1]), _together(self.rows[k])
                own_cost = values[np.maximum(y - before[0], 0)]
                best = int(np.argmin(before[1] + own_cost))
                own, y = max(y - int(before[0][best]), 0), int(before[0][best])
            for row in self.rows[k]:
                row.take(own, plan)
        return plan


def _together(place: list[_Table]) -> Floats:
    total = place[0].values.copy()
    for row in place[1:]:
        total += row.values
    return total


def _steps(values: Floats) -> tuple[Ints, Floats]:
    """The most units covered at each cost, ascending."""
    at = np.flatnonzero(np.isfinite(values) & (values < np.append(values[1:], np.inf)))
    return at, values[at]


def _join(left: Floats, right: Floats, rate: float, limit: float) -> Floats:
    from coral_core.allocation.cover_kernel import join  # noqa: PLC0415 - numba loads only when it pays

    out = np.empty(len(left))
    join(*_steps(left), *_steps(right), rate, limit, out)
    return out
