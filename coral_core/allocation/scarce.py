"""The joint program where each region's nodes are few: exact over whole plans of units in regions.

`unit_plans` lists every plan of a unit in a region that may matter, `plan_tolls` bounds what a plan that uses one costs.
The program of `plan_tolls` on the plans of the least bounds proves min(its own bound, the least bound left out); it grows
until that is within the gap of the best found. First all that can be served at all is asked for; where that is not found,
the least shortfall, then the least cost at that.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from coral_core.allocation.assess import assess
from coral_core.allocation.branch import branch
from coral_core.allocation.columns import with_templates
from coral_core.allocation.coverage import Bools, Coverage, Floats, Ints, coverage_of, weight_unit
from coral_core.allocation.decompose import asking_blocks
from coral_core.allocation.duals import priced_block
from coral_core.allocation.fronts import Fronts
from coral_core.allocation.lattice import NodeLattice
from coral_core.allocation.plan_program import plan_program
from coral_core.allocation.plan_tolls import (
    SERVED_TOLERANCE_FRAC,
    Aim,
    Generated,
    PlanBook,
    PlanPrices,
    UnitColumn,
    bounds_if_used,
    find_plan_prices,
)
from coral_core.allocation.stages import SHORTFALL_TOLERANCE, Plan, Staged, plan_of
from coral_core.allocation.start import running_that_fits
from coral_core.allocation.unit_plans import RegionNodes, UnitPlans, unit_plans
from coral_core.allocation.wide import Effort
from coral_core.domain.allocation import AllocationProblem
from coral_core.solver.program import Solver, SolveStatus

FROM_COLUMNS = 200
"""Below this an integer program is as fast as loading the compiled tables."""
_FIRST_PLANS = 500
_GROWTH = 4
_SHARE = 0.3
_BOOK_SHARE = 0.5
_IMPROVE_SHARE = 0.1
_MARGINS_FRAC = (0.0, 1e-8, 1e-7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scarce:
    """A plan over the given problem's templates, and how many plans of units the last program had."""

    staged: Staged
    columns: int


def solve_scarce(
    problem: AllocationProblem, fronts: Fronts, solver: Solver, effort: Effort, start: Plan
) -> Scarce | None:
    """The best plan found, no worse than `start`, with its bounds; None where this way is not open.

    It is open where every region's nodes are few, and every unit asks for throughput alone, of templates of its own.
    """
    fits = np.isfinite(fronts.rent_usd_per_h)
    if int(fits.sum()) < FROM_COLUMNS:
        return None
    kept = np.flatnonzero(fits.any(axis=1))
    small = with_templates(problem, kept)
    coverage = coverage_of(small)
    units = coverage.units()
    if not _plain(small, coverage, units):
        return None
    book = _book(small, coverage, units, fits[kept], effort.within(_BOOK_SHARE))
    if book is None:
        return None
    found = _Search(book=book, solver=solver, choice=_closest(small, coverage, units, book, start.counts[kept])).run(
        effort
    )
    counts = np.zeros_like(start.counts)
    for own, chosen in zip(book.plans, found.choice.tolist(), strict=True):
        for r, (plans, plan) in enumerate(zip(own, chosen, strict=True)):
            for template, number in plans.instances(plan).items():
                counts[kept[template], r] += number
    plan = plan_of(problem, fronts.coverage, counts, tuple(range(len(problem.demand))))
    staged = Staged(
        plan=plan if plan.beats(start) else start,
        cost_bound_usd_per_h=found.cost_bound_usd_per_h,
        shortfall_bound=found.shortfall_bound,
    )
    return Scarce(staged=staged, columns=found.columns)


def _plain(problem: AllocationProblem, coverage: Coverage, units: list[tuple[int, ...]]) -> bool:
    fronts = Fronts.of(problem, coverage)
    blocks = [priced_block(fronts, rows) for rows in asking_blocks(problem, coverage)]
    own = {row: set(unit) for unit in units for row in unit}
    apart = all(set(group.rows) <= own.get(group.rows[0], set()) for group in coverage.groups)
    return bool(blocks) and apart and all(block.coverable for block in blocks)


def _book(
    problem: AllocationProblem, coverage: Coverage, units: list[tuple[int, ...]], fits: Bools, effort: Effort
) -> PlanBook | None:
    """All plans; None where they are too many, for the tables or for the time."""
    unit_of_weight = weight_unit(problem)
    by_region: list[list[UnitPlans]] = []
    for r, held in enumerate(problem.available):
        lattice = NodeLattice.of(held)
        if lattice is None:
            return None
        here = RegionNodes(problem=problem, coverage=coverage, region=r, lattice=lattice, fits=fits[:, r])
        by_region.append([])
        for unit in units:
            plans = unit_plans(here, unit)
            if plans is None or time.perf_counter() > effort.deadline_s:
                return None
            by_region[-1].append(plans)
    return PlanBook(
        weight=np.array([math.fsum(problem.demand[i].weight for i in unit) / unit_of_weight for unit in units]),
        available=problem.available,
        plans=[list(own) for own in zip(*by_region, strict=True)],
    )


def _start(
    problem: AllocationProblem,
    coverage: Coverage,
    units: list[tuple[int, ...]],
    book: PlanBook,
    known: tuple[Ints, Bools],
) -> Ints:
    """The better choice of plans: close to counts that are known, or to what runs as far as it fits."""
    counts, fits = known
    running = running_that_fits(problem, fits)
    choices = [_closest(problem, coverage, units, book, some) for some in (counts, running)]
    return min(choices, key=lambda choice: (round(book.shortfall(choice), 7), book.price_usd_per_h(choice)))


def _closest(
    problem: AllocationProblem, coverage: Coverage, units: list[tuple[int, ...]], book: PlanBook, counts: Ints
) -> Ints:
    """The plans (units, regions) that serve at least what `counts` do, on no more nodes, for the least price."""
    choice = np.zeros((len(units), len(book.available)), dtype=np.int64)
    unit_of_row = {row: u for u, unit in enumerate(units) for row in unit}
    unit_of_group = [unit_of_row[group.rows[0]] for group in coverage.groups] + [-1]
    unit_of = np.array([unit_of_group[g] for g in coverage.group_of.tolist()])
    covered = assess(problem, coverage, counts).covered_frac
    for u, unit in enumerate(units):
        by_region = covered[list(unit)].min(axis=0).reshape(len(book.available), -1).sum(axis=1)
        for r, served in enumerate(np.minimum(by_region, 1.0) - SERVED_TOLERANCE_FRAC):
            own = np.where(unit_of == u, counts[:, r], 0)
            plans, nodes = book.plans[u][r], own @ problem.templates.nodes
            fit = np.flatnonzero((plans.nodes <= nodes).all(axis=1) & (plans.served_frac >= served))
            if len(fit):
                choice[u, r] = fit[np.argmin(plans.price_usd_per_h[fit])]
    return choice


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    choice: Ints
    columns: int
    cost_bound_usd_per_h: float
    shortfall_bound: float


@dataclass(slots=True, kw_only=True)
class _Search:
    """Programs on more and more plans; `choice` (units, regions) is the best so far, `columns` the last one's size."""

    book: PlanBook
    solver: Solver
    choice: Ints
    columns: int = 0

    def run(self, effort: Effort) -> _Found:
        """The least shortfall, then the least cost."""
        least, most = self.book.least_shortfall, Aim(shortfall=None)
        generated = find_plan_prices(self.book, most, self.solver, effort.within(0.1))
        bound = max(generated.prices.bound, least)
        if bound <= least + SHORTFALL_TOLERANCE:
            # perhaps all that can be served at all is served: then that and its cost take one program
            cost_bound = self._reach(Aim(shortfall=least), effort.within(0.25))
            if self.shortfall <= least + SHORTFALL_TOLERANCE:
                if self._open(Aim(shortfall=least), cost_bound, effort):
                    cost_bound = max(cost_bound, self._reach(Aim(shortfall=least), effort))
                return self._found(cost_bound, bound)
        if self._open(most, bound, effort):
            bound = max(bound, self._reach(most, effort.within(0.7), generated))
        cost_bound = self._reach(Aim(shortfall=self.shortfall + SHORTFALL_TOLERANCE / 2), effort)
        return self._found(cost_bound, bound)

    def _reach(self, aim: Aim, effort: Effort, generated: Generated | None = None) -> float:
        """Better the choice as far as the effort goes; returns the bound.

        By programs on some plans, by branching, and by a program on the plans that branching came upon.
        """
        generated = generated or find_plan_prices(self.book, aim, self.solver, effort.within(0.3))
        bound = max(generated.prices.bound, self._grow(aim, effort.within(0.3), generated.prices))
        value = self._value(aim)
        if not (self._open(aim, bound, effort) and math.isfinite(value)):
            return bound

        def improve(pool: list[UnitColumn]) -> float:
            self._solve(aim, effort.within(_IMPROVE_SHARE), self._used(pool))
            return self._value(aim)

        branched = branch(
            self.book,
            aim,
            generated,
            self.solver,
            effort.within(0.9),
            value=value,
            room=partial(self._room, aim, effort),
            improve=improve,
        )
        for origin in branched.origins:
            choice = self._choice_of(origin)
            self.choice = choice if self._better(choice) else self.choice
        bound = max(bound, branched.bound)
        if self._open(aim, bound, effort):
            self._solve(aim, effort, self._used(branched.pool))
        return bound

    def _used(self, pool: list[UnitColumn]) -> Ints:
        """(n, 3): unit, region and number of the plans that columns are made of."""
        found = {
            (column.unit, r, kept, state) for column in pool for r, (kept, state) in enumerate(column.origin.tolist())
        }
        return np.array([(u, r, self._number(u, r, kept, state)) for u, r, kept, state in sorted(found)])

    def _number(self, unit: int, region: int, kept: int, state: int) -> int:
        plans = self.book.plans[unit][region]
        return int(np.flatnonzero((plans.kept == kept) & (plans.state == state))[0])

    def _choice_of(self, origin: Ints) -> Ints:
        """The plans (units, regions) that come from `origin` (units, regions, 2)."""
        choice = np.zeros_like(self.choice)
        for u, r in np.ndindex(choice.shape):
            choice[u, r] = self._number(u, r, *origin[u, r].tolist())
        return choice

    @property
    def shortfall(self) -> float:
        """That of the best choice."""
        return self.book.shortfall(self.choice)

    def _found(self, cost_bound_usd_per_h: float, shortfall_bound: float) -> _Found:
        return _Found(
            choice=self.choice,
            columns=self.columns,
            cost_bound_usd_per_h=max(cost_bound_usd_per_h, 0.0),
            shortfall_bound=max(min(shortfall_bound, self.shortfall), 0.0),
        )

    def _value(self, aim: Aim) -> float:
        """Of the best choice; infinite where it misses what the aim asks for."""
        if aim.shortfall is None:
            return self.shortfall
        served = self.shortfall <= aim.shortfall + SERVED_TOLERANCE_FRAC
        return self.book.price_usd_per_h(self.choice) if served else math.inf

    def _open(self, aim: Aim, bound: float, effort: Effort) -> bool:
        """Whether the bound is further from the best choice than wished."""
        value = self._value(aim)
        return value - bound > self._room(aim, effort, value)

    def _room(self, aim: Aim, effort: Effort, value: float) -> float:
        """How far a bound may be from a value."""
        share = effort.gap_frac * abs(value) if math.isfinite(value) else 0.0
        return 0.999 * share + (0.0 if aim.by_cost else SHORTFALL_TOLERANCE / 2)

    def _grow(self, aim: Aim, effort: Effort, prices: PlanPrices) -> float:
        """Better the choice by programs on more and more plans until there is one for the aim; returns the bound proven."""
        unit, region, plan, bounds = self._by_bound(aim, prices)
        size, proven, last = min(_FIRST_PLANS, len(plan)), prices.bound, False
        while self._open(aim, proven, effort):
            everything = size == len(plan)
            last = last or everything
            share = effort if last else effort.within(_SHARE)
            own = self._solve(aim, share, np.stack((unit[:size], region[:size], plan[:size]), axis=1))
            left_out = math.inf if everything else float(bounds[size])
            value = self._value(aim)
            proven = max(proven, min(own, left_out, value))
            if last or math.isfinite(value) or time.perf_counter() > effort.deadline_s:
                break
            if left_out < min(own, value):
                useful = int(np.searchsorted(bounds, value, side="right"))
                size = min(size * _GROWTH, max(useful, size + 1), len(plan))
            else:
                last = True  # what was left out cannot help: all the time left goes to these
        return proven

    def _by_bound(self, aim: Aim, prices: PlanPrices) -> tuple[Ints, Ints, Ints, Floats]:
        """Unit, region and number of every plan that may be used, by rising bound, cheap ones first, and the bounds."""
        found = bounds_if_used(self.book, aim, prices)
        parts = [
            (np.full(len(own), u), np.full(len(own), r), np.arange(len(own)), own, plans.price_usd_per_h)
            for u, by_region in enumerate(found)
            for r, (own, plans) in enumerate(zip(by_region, self.book.plans[u], strict=True))
        ]
        unit, region, plan, bounds, price = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        some = np.flatnonzero((plan > 0) & np.isfinite(bounds))
        step = 1e-9 * max(abs(prices.bound), 1e-9)
        some = some[np.lexsort((price[some], np.floor(bounds[some] / step)))]
        return unit[some], region[some], plan[some], np.maximum.accumulate(bounds[some])

    def _solve(self, aim: Aim, effort: Effort, used: Ints) -> float:
        """Better the choice among `used` (n, 3: unit, region, plan) and what is chosen; returns the program's bound."""
        chosen = [(u, r, int(self.choice[u, r])) for u, r in np.ndindex(self.choice.shape) if self.choice[u, r]]
        used = np.unique(np.concatenate((used, np.array(chosen, dtype=np.int64).reshape(-1, 3))), axis=0)
        self.columns = len(used)
        bound, start = -math.inf, self._start(used) if math.isfinite(self._value(aim)) else None
        for margin in _MARGINS_FRAC:
            program, scale = plan_program(self.book, aim, used, margin)
            answer = self.solver.solve(program, effort.options(start))
            if margin == 0.0:
                bound = -math.inf if answer.bound is None else answer.bound / scale
                if answer.status is SolveStatus.INFEASIBLE:
                    return math.inf if start is None else -math.inf
            if answer.x is None:
                break
            choice = np.zeros_like(self.choice)
            taken = used[np.flatnonzero(answer.x[: len(used)] > 0.5)]
            choice[taken[:, 0], taken[:, 1]] = taken[:, 2]
            if self._better(choice):
                self.choice = choice
            if aim.shortfall is None or self.book.shortfall(choice) <= aim.shortfall + SERVED_TOLERANCE_FRAC:
                break
            start = None  # it satisfied the rows only within the solver's tolerance
        return bound

    def _better(self, choice: Ints) -> bool:
        change = self.book.shortfall(choice) - self.shortfall
        if abs(change) > SHORTFALL_TOLERANCE:
            return change < 0
        return self.book.price_usd_per_h(choice) < self.book.price_usd_per_h(self.choice)

    def _start(self, used: Ints) -> Floats:
        picked = self.choice[used[:, 0], used[:, 1]] == used[:, 2]
        served = [
            math.fsum(float(plans.served_frac[g]) for plans, g in zip(own, chosen, strict=True))
            for own, chosen in zip(self.book.plans, self.choice.tolist(), strict=True)
        ]
        return np.concatenate((picked.astype(np.float64), np.maximum(1.0 - np.array(served), 0.0)))
