"""Branching on what a unit uses of a region's nodes, every branch priced anew (`plan_tolls`).

A branch allows each unit, for some (region, configuration), at most or at least so many nodes: its plans are those of the
book that keep to that, so pricing stays exact. A branch is closed where its bound is no better than the cutoff, or where
what its master mixes is one plan per unit; else the use that the mix spreads over most is split at its mean (of plans that use
the same nodes, what they serve). Plans that cannot be part of anything better than the cutoff leave a branch's book before it is split.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.coverage import Bools, Floats, Ints
from coral_core.allocation.plan_tolls import (
    SERVED_TOLERANCE_FRAC,
    Aim,
    Generated,
    PlanBook,
    UnitColumn,
    bounds_if_used,
    find_plan_prices,
)
from coral_core.allocation.stages import SHORTFALL_TOLERANCE
from coral_core.allocation.unit_plans import UnitPlans
from coral_core.allocation.wide import Effort
from coral_core.solver.program import Solver

Room = Callable[[float], float]
Improve = Callable[[list[UnitColumn]], float]

_WHOLE = 1e-6
_FIRST_IMPROVED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """`bound` for every plan; `origins` (units, R, 2) of the plans found that are better than the one known, the best last.

    `pool`: whole plans of units that were generated on the way.
    """

    bound: float
    origins: list[Ints]
    pool: list[UnitColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """A part of all plans: the book of those that it allows, and what their prices prove."""

    book: PlanBook
    generated: Generated


def branch(
    book: PlanBook,
    aim: Aim,
    root: Generated,
    solver: Solver,
    effort: Effort,
    *,
    value: float,
    room: Room,
    improve: Improve,
) -> Branched:
    """Raise the bound towards `value`, that of the best plan known, less the `room` for that value; whatever beats it lowers it.

    `improve` is asked now and then, ever less often, what it can make of the plans generated so far; it returns the best value.
    """
    number, found, closed, pool, asking = 0, [], [], list(root.pool), _FIRST_IMPROVED
    queue = [(root.prices.bound, number, _Branch(book=book, generated=root))]
    while queue and queue[0][0] < value - room(value) and time.perf_counter() < effort.deadline_s:
        if number >= asking:
            value, asking = min(value, improve(pool)), 2 * asking
        bound, _, top = heapq.heappop(queue)
        mix = _mix(top)
        whole = _whole(top, mix)
        if whole is not None:
            reached = _value(top.book, aim, whole)
            if reached < value:
                value = reached
                found.append(np.stack([column.origin for column in whole]))
        cut = None if whole is not None and top.generated.complete else _widest(mix, top)
        if cut is None:
            closed.append(bound)  # nothing to split: its bound stays
            continue
        top = _pruned(top, aim, value - room(value))
        for above in (False, True):
            part = _restricted(top, aim, cut, above=above)
            if part is None:
                continue
            generated = find_plan_prices(
                part.book, aim, solver, effort, before=part.generated, enough=value - room(value)
            )
            pool += generated.pool[len(part.generated.pool) :]
            own = max(generated.prices.bound, bound)
            if own < value - room(value):
                number += 1
                heapq.heappush(queue, (own, number, replace(part, generated=generated)))
    return Branched(bound=min([value - room(value), *closed, *(item[0] for item in queue)]), origins=found, pool=pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """What a unit uses in a region (`UnitColumn.use`): no more than `split`, or more."""

    unit: int
    region: int
    use: int
    split: float

    def allows(self, use: Floats | Ints, *, above: bool) -> Bools:
        """Which of the uses lie on one side."""
        return use > self.split if above else use <= self.split


def _mix(top: _Branch) -> list[tuple[Floats, Floats, list[UnitColumn]]]:
    """By unit: the weights, the uses (k, R, C + 1) and the plans that the master mixes."""
    pool, weight = top.generated.pool, top.generated.weight
    regions, configs = top.book.available.shape
    found = []
    for u in range(len(top.book.plans)):
        own = [j for j, column in enumerate(pool) if column.unit == u and weight[j] > _WHOLE]
        use = np.stack([pool[j].use for j in own]) if own else np.zeros((0, regions, configs + 1))
        found.append((weight[own], use, [pool[j] for j in own]))
    return found


def _whole(top: _Branch, mix: list[tuple[Floats, Floats, list[UnitColumn]]]) -> list[UnitColumn] | None:
    """The plan of every unit where none is mixed and they fit together."""
    chosen = [
        min(own, key=lambda column: column.price_usd_per_h) for _, use, own in mix if own and (use == use[0]).all()
    ]
    if len(chosen) < len(mix):
        return None
    used = np.sum([column.nodes for column in chosen], axis=0)
    return chosen if (used <= top.book.available).all() else None


def _value(book: PlanBook, aim: Aim, chosen: list[UnitColumn]) -> float:
    missing = np.array([column.missing_frac for column in chosen])
    shortfall = math.fsum(book.weight * np.where(missing > SERVED_TOLERANCE_FRAC, missing, 0.0))
    if aim.shortfall is None:
        return shortfall
    within = shortfall <= aim.shortfall + SERVED_TOLERANCE_FRAC
    return math.fsum(column.price_usd_per_h for column in chosen) if within else math.inf


def _widest(mix: list[tuple[Floats, Floats, list[UnitColumn]]], top: _Branch) -> _Cut | None:
    """The use that is spread over most, dear nodes first."""
    toll = top.generated.prices.toll
    worth = np.column_stack((toll + _WHOLE, np.full(len(toll), _WHOLE**2)))
    best, found = 0.0, None
    for u, (weight, use, own) in enumerate(mix):
        if len(own) < 2:
            continue
        share = weight / weight.sum()
        mean = np.tensordot(share, use, axes=1)
        spread = np.tensordot(share, (use - mean) ** 2, axes=1)
        score = np.where(np.ptp(use, axis=0) > _WHOLE, spread, 0.0) * worth
        r, c = np.unravel_index(int(np.argmax(score)), score.shape)
        if score[r, c] > best:
            best = float(score[r, c])
            split = float(mean[r, c]) if c == toll.shape[1] else math.floor(mean[r, c] + _WHOLE)
            found = _Cut(unit=u, region=int(r), use=int(c), split=split)
    return found


def _restricted(top: _Branch, aim: Aim, cut: _Cut, *, above: bool) -> _Branch | None:
    """The branch on one side of a cut; None where it has no plan then, or serves less than is asked for."""
    plans = top.book.plans[cut.unit][cut.region]
    use = plans.served_frac if cut.use == plans.nodes.shape[1] else plans.nodes[:, cut.use]
    kept = cut.allows(use, above=above)
    if not kept.any():
        return None
    own = [*top.book.plans[cut.unit]]
    own[cut.region] = _taken(plans, kept)
    units = [*top.book.plans]
    units[cut.unit] = own
    pool = [
        column
        for column in top.generated.pool
        if column.unit != cut.unit or cut.allows(column.use[cut.region, cut.use], above=above)
    ]
    book = replace(top.book, plans=units)
    if aim.shortfall is not None and book.least_shortfall > aim.shortfall + SHORTFALL_TOLERANCE:
        return None
    return _Branch(book=book, generated=replace(top.generated, pool=pool, weight=np.zeros(len(pool))))


def _pruned(top: _Branch, aim: Aim, cutoff: float) -> _Branch:
    """The branch without the plans whose use costs at least the cutoff."""
    least = bounds_if_used(top.book, aim, top.generated.prices)
    plans = [
        [_taken(plans, bound < cutoff) for plans, bound in zip(own, bounds, strict=True)]
        for own, bounds in zip(top.book.plans, least, strict=True)
    ]
    if not all(len(part) for own in plans for part in own):
        return top  # nothing in it beats the cutoff but for the solver's tolerance
    left = [[set(zip(part.kept.tolist(), part.state.tolist(), strict=True)) for part in own] for own in plans]
    pool = [
        column
        for column in top.generated.pool
        if all(tuple(at) in known for at, known in zip(column.origin.tolist(), left[column.unit], strict=True))
    ]
    book = replace(top.book, plans=plans)
    return _Branch(book=book, generated=replace(top.generated, pool=pool, weight=np.zeros(len(pool))))


def _taken(plans: UnitPlans, kept: Bools) -> UnitPlans:
    return replace(
        plans,
        nodes=plans.nodes[kept],
        served_frac=plans.served_frac[kept],
        price_usd_per_h=plans.price_usd_per_h[kept],
        kept=plans.kept[kept],
        state=plans.state[kept],
    )
