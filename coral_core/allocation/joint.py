"""The joint program where capacity binds and the templates are many: on the columns that can still matter.

1. Templates that fit nowhere are left out; a toll on nodes and the bound LB come from `duals`.
2. A plan that serves all in full and uses a column costs at least LB - z + c + f, with z the bound of the column's block, c the
   column's price with toll and f the least cost of the rest of the block beside it (`completions`).
3. The program on the columns of the least such bounds proves min(its own bound, the least bound left out). It grows until
   that is within the gap of the best plan found.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.columns import Columns, columns_of, with_templates
from coral_core.allocation.cover import completions
from coral_core.allocation.coverage import Coverage, Floats, Ints, coverage_of, fraction, weight_unit
from coral_core.allocation.decompose import asking_blocks
from coral_core.allocation.duals import Tolls, find_tolls, priced_block
from coral_core.allocation.formulation import formulate
from coral_core.allocation.fronts import Fronts
from coral_core.allocation.reduce import dominated
from coral_core.allocation.stages import Plan, Staged, StagedSolve, plan_of
from coral_core.allocation.start import fitting, running_that_fits
from coral_core.allocation.wide import Effort
from coral_core.domain.allocation import AllocationProblem
from coral_core.solver.program import Solver

WIDE_FROM_COLUMNS = 4_000
"""Up to this many columns that fit, the whole program goes to the solver at once."""
_FIRST_COLUMNS = 400
_GROWTH = 4
_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A plan over the given problem's templates, and how many columns the last program had."""

    staged: Staged
    columns: int


def solve_joint(
    problem: AllocationProblem, fronts: Fronts, solver: Solver, effort: Effort, start: Plan
) -> Joint | None:
    """The best plan found, no worse than `start`, with its bounds; None where this way is not open.

    It is open where many columns fit, every block asks for throughput alone, and something that fits serves it.
    """
    fits = np.isfinite(fronts.rent_usd_per_h)
    if int(fits.sum()) <= WIDE_FROM_COLUMNS:
        return None
    kept = np.flatnonzero(fits.any(axis=1))
    small = with_templates(problem, kept)
    coverage = coverage_of(small)
    fronts = Fronts.of(small, coverage)
    blocks = [priced_block(fronts, rows) for rows in asking_blocks(small, coverage)]
    if not all(block.coverable for block in blocks):
        return None
    idle = [block for block in blocks if not block.cover_problem().servable]
    if any(len(block.rows) > 1 and not block.by_region for block in idle):
        return None  # one of its rows may be served without the other
    lost = {i for block in idle for i in block.rows}
    if lost:
        # what nothing that fits can serve is lost whatever the rest does; the rest may still be served in full
        small = replace(small, demand=tuple(row for i, row in enumerate(small.demand) if i not in lost))
        coverage = coverage_of(small)
        fronts = Fronts.of(small, coverage)
    if len(lost) == sum(len(block.rows) for block in blocks):
        return None
    tolls = find_tolls(fronts, solver, effort.within(_SHARE))
    if tolls is None:
        return None
    growing = _Growing(problem=small, coverage=coverage, tolls=tolls, solver=solver)
    found = growing.run(effort, start.counts[kept])
    counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
    counts[kept] = found.staged.plan.counts
    whole = plan_of(problem, coverage_of(problem), counts, tuple(range(len(problem.demand))))
    lost_weight = math.fsum(problem.demand[i].weight for i in lost)
    short = (found.staged.shortfall_bound * weight_unit(small) + lost_weight) / weight_unit(problem)
    return replace(found, staged=replace(found.staged, plan=whole, shortfall_bound=short))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growing:
    """Programs on more and more columns."""

    problem: AllocationProblem
    coverage: Coverage
    tolls: Tolls
    solver: Solver

    def run(self, effort: Effort, start: Ints) -> Joint:
        """From the counts `start` (templates, regions), or better ones."""
        least = bound_if_used(self.tolls)
        template, region = np.nonzero(np.isfinite(self.tolls.fronts.rent_usd_per_h))
        bounds = least[template, region]
        order = np.argsort(bounds, kind="stable")
        template, region, bounds = template[order], region[order], bounds[order]
        size, best, proven = min(_FIRST_COLUMNS, len(order)), self._start(start), self.tolls.bound_usd_per_h
        last = False
        while True:
            columns = self._columns(template[:size], region[:size], best)
            solve, everything = self._solve_on(columns), size == len(order)
            last = last or everything
            best, own = solve.serve_all(effort.within(0.5) if last and not best.full else effort.within(_SHARE), best)
            if not best.full:
                staged = solve.serve_most(effort if last else effort.within(_SHARE), best)
                best = staged.plan
            late = last or time.perf_counter() > effort.deadline_s
            if not best.full:
                if late:
                    return Joint(staged=self._short(staged, everything=everything), columns=len(columns))
                size = min(size * _GROWTH, len(order))
                continue
            left_out = math.inf if everything else float(bounds[size])
            proven = max(proven, min(own, left_out, best.cost_usd_per_h))
            if late or best.cost_usd_per_h - proven <= effort.gap_frac * best.cost_usd_per_h:
                return Joint(staged=Staged(plan=best, cost_bound_usd_per_h=proven), columns=len(columns))
            if left_out < min(own, best.cost_usd_per_h):
                useful = int(np.searchsorted(bounds, best.cost_usd_per_h * (1 - effort.gap_frac), side="right"))
                size = min(size * _GROWTH, max(useful, size + 1), len(order))
            else:
                last = True  # what was left out cannot help: all the time left goes to these

    def _short(self, staged: Staged, *, everything: bool) -> Staged:
        """With the bounds that hold for all columns, where the program had only some."""
        least_usd_per_h = partial_bound(self.tolls, staged.plan.shortfall)
        least = min(shortfall_bound(self.tolls), staged.plan.shortfall)
        if everything:
            return replace(
                staged,
                cost_bound_usd_per_h=max(staged.cost_bound_usd_per_h, least_usd_per_h),
                shortfall_bound=max(staged.shortfall_bound, least),
            )
        return Staged(plan=staged.plan, cost_bound_usd_per_h=least_usd_per_h, shortfall_bound=least)

    def _start(self, start: Ints) -> Plan:
        """The best of `start`, what runs and the blocks' plans under the toll, the latter as far as they fit."""
        wished = [
            (int(block.columns.template[j]), int(block.columns.region[j]), count)
            for block, plan in zip(self.tolls.blocks, self.tolls.plans, strict=True)
            for j, count in plan.items()
        ]
        none = np.zeros(0, dtype=np.int64)
        solve, fits = self._solve_on(self._columns(none, none, None)), np.isfinite(self.tolls.fronts.rent_usd_per_h)
        plan = solve.judge(start)
        for other in (running_that_fits(self.problem, fits), fitting(self.problem, fits, wished)):
            judged = solve.judge(other)
            plan = plan if plan.beats(judged) else judged
        return plan

    def _solve_on(self, columns: Columns) -> StagedSolve:
        return StagedSolve(
            problem=self.problem,
            coverage=self.coverage,
            formulation=formulate(self.problem, self.coverage, columns),
            rows=tuple(range(len(self.problem.demand))),
            solver=self.solver,
        )

    def _columns(self, template: Ints, region: Ints, best: Plan | None) -> Columns:
        """The chosen columns less the dominated ones, what the best plan uses, and all that runs."""
        chosen = np.zeros((len(self.problem.templates), len(self.problem.regions)), dtype=bool)
        capped = self.problem.templates.throughput
        for g, group in enumerate(self.coverage.groups):
            for r in range(len(self.problem.regions)):
                own = template[(self.coverage.group_of[template] == g) & (region == r)]
                worse = dominated(np.minimum(capped[own], max(group.amounts)), self.problem.templates.nodes[own])
                chosen[own[~worse], r] = True
        if best is not None:
            chosen |= best.counts > 0
        return columns_of(self.problem, self.coverage, chosen)


def partial_bound(tolls: Tolls, shortfall: float) -> float:
    """USD/h that every plan of at most this weighted shortfall costs at least.

    For any price m >= 0 of the shortfall: sum over blocks of the least, over fractions y served, of cost with toll + m w (1-y),
    less the tolls of all nodes, less m times the shortfall. w is the least weight of the block's units.
    """
    tables = [completions(block.cover_problem()).everywhere for block in tolls.blocks]
    weights = _least_weights(tolls)
    paid = float((tolls.fronts.problem.available * tolls.toll_usd_per_h).sum())
    most = 10 * max(float(table[0]) / weight for table, weight in zip(tables, weights, strict=True))
    best = 0.0
    for price in [0.0, *np.geomspace(most / 1e5, most, 200)]:
        best = max(best, _least_partly(tables, [price * weight for weight in weights]) - paid - price * shortfall)
    return float(best) * (1 - 1e-12)


def shortfall_bound(tolls: Tolls) -> float:
    """The weighted shortfall that every plan leaves at least.

    For any k >= 0: sum over blocks of the least, over fractions y served, of w (1-y) + k times the toll of what serves y, less k
    times the tolls of all nodes. w is the least weight of the block's units.
    """
    fronts = tolls.fronts
    toll = fronts.problem.templates.nodes @ tolls.toll_usd_per_h.T
    toll = np.where(np.isfinite(fronts.rent_usd_per_h), toll, np.inf)
    priced = replace(fronts, new_usd_per_h=toll, old_usd_per_h=toll)
    tables = [completions(priced_block(priced, block.rows).cover_problem()).everywhere for block in tolls.blocks]
    weights = _least_weights(tolls)
    paid = float((fronts.problem.available * tolls.toll_usd_per_h).sum())
    if not paid > 0:
        return 0.0
    scale = sum(weights) / paid
    best = max(
        _least_partly([factor * table for table in tables], weights) - factor * paid
        for factor in np.geomspace(scale / 1e3, scale * 1e3, 200)
    )
    return float(max(best, 0.0)) * (1 - 1e-12)


def _least_weights(tolls: Tolls) -> list[float]:
    """By block: the least weight of its units, in `weight_unit`."""
    problem = tolls.fronts.problem
    units = tolls.fronts.coverage.units()
    return [
        min(math.fsum(problem.demand[i].weight for i in unit) for unit in units if unit[0] in block.rows)
        / weight_unit(problem)
        for block in tolls.blocks
    ]


def _least_partly(tables: list[Floats], missing: list[float]) -> float:
    """Sum over blocks of the least of what serves a part, and of `missing` times what is missing then."""
    return math.fsum(
        float((table + whole * np.linspace(0.0, 1.0, len(table))).min())
        for table, whole in zip(tables, missing, strict=True)
    )


def bound_if_used(tolls: Tolls) -> Floats:
    """(templates, regions): no plan that serves all in full and starts one of this costs less; infinite where it cannot."""
    fronts = tolls.fronts
    least = np.full(fronts.rent_usd_per_h.shape, np.inf)
    for block, block_least in zip(tolls.blocks, tolls.least_usd_per_h, strict=True):
        base = tolls.bound_usd_per_h - block_least
        table = completions(block.cover_problem())
        places = [place for place, _ in block.places()]
        for group in block.groups:
            members = group.members
            frac = fraction(fronts.problem.templates.throughput[members], group.amounts[0])
            units = np.minimum(np.ceil(frac * table.units), table.units).astype(np.int64)
            rest = np.full((len(members), len(fronts.problem.regions)), np.inf)
            if len(group.rows) > 1:
                rest[:] = table.everywhere[units][:, None]
            variant = int(fronts.coverage.variant_of[members[0]])
            for k, place in enumerate(places if len(group.rows) == 1 else ()):
                region, of_variant = (None, variant) if place is None else divmod(place, fronts.coverage.n_variants)
                if of_variant == variant:
                    beside = table.rows[k][block.rows.index(group.rows[0])][units]
                    rest[:, slice(None) if region is None else slice(region, region + 1)] = beside[:, None]
            own = np.maximum(fronts.new_usd_per_h[members] + rest, block_least)
            least[members] = np.where(frac[:, None] > 0, base + own, np.inf)
    return least
