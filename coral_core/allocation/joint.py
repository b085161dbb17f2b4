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

from coral_core.allocation.assess import running_instances
from coral_core.allocation.columns import Columns, columns_of, with_templates
from coral_core.allocation.cover import completions
from coral_core.allocation.coverage import Coverage, Floats, Ints, coverage_of, fraction, weight_unit
from coral_core.allocation.decompose import asking_blocks
from coral_core.allocation.duals import Tolls, find_tolls, priced_block
from coral_core.allocation.formulation import formulate
from coral_core.allocation.fronts import Fronts
from coral_core.allocation.reduce import dominated
from coral_core.allocation.stages import Plan, Staged, StagedSolve, plan_of
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


def solve_joint(problem: AllocationProblem, fronts: Fronts, solver: Solver, effort: Effort) -> Joint | None:
    """The best plan found, with its bounds; None where this way is not open.

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
    found = _Growing(problem=small, coverage=coverage, tolls=tolls, solver=solver).run(effort)
    counts = np.zeros((len(problem.templates), len(problem.regions)), dtype=np.int64)
    counts[kept] = found.staged.plan.counts
    whole = plan_of(problem, coverage_of(problem), counts, tuple(range(len(problem.demand))))
    lost_weight = math.fsum(problem.demand[i].weight for i in lost)
    shortfall_bound = (found.staged.shortfall_bound * weight_unit(small) + lost_weight) / weight_unit(problem)
    return replace(found, staged=replace(found.staged, plan=whole, shortfall_bound=shortfall_bound))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growing:
    """Programs on more and more columns."""

    problem: AllocationProblem
    coverage: Coverage
    tolls: Tolls
    solver: Solver

    def run(self, effort: Effort) -> Joint:
        least = bound_if_used(self.tolls)
        template, region = np.nonzero(np.isfinite(self.tolls.fronts.rent_usd_per_h))
        bounds = least[template, region]
        order = np.argsort(bounds, kind="stable")
        template, region, bounds = template[order], region[order], bounds[order]
        size, best, proven = min(_FIRST_COLUMNS, len(order)), self._start(), self.tolls.bound_usd_per_h
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
        if everything:
            return replace(staged, cost_bound_usd_per_h=max(staged.cost_bound_usd_per_h, least_usd_per_h))
        return Staged(plan=staged.plan, cost_bound_usd_per_h=least_usd_per_h)

    def _start(self) -> Plan:
        """The better of what runs and the blocks' plans under the toll, as far as either fits."""
        columns = [block.columns for block in self.tolls.blocks]
        wished = [
            (int(own.template[j]), int(own.region[j]), count)
            for own, plan in zip(columns, self.tolls.plans, strict=True)
            for j, count in plan.items()
        ]
        running = list(zip(*(part.tolist() for part in running_instances(self.problem)), strict=True))
        none = np.zeros(0, dtype=np.int64)
        solve = self._solve_on(self._columns(none, none, None))
        first, second = solve.judge(self._fitting(running)), solve.judge(self._fitting(wished))
        return first if first.beats(second) else second

    def _fitting(self, instances: list[tuple[int, int, int]]) -> Ints:
        """As many of the instances as fit, in the order given."""
        counts = np.zeros((len(self.problem.templates), len(self.problem.regions)), dtype=np.int64)
        left = self.problem.available.copy()
        for t, r, count in instances:
            nodes = self.problem.templates.nodes[t]
            fits = np.isfinite(self.tolls.fronts.rent_usd_per_h[t, r])
            fit = min(count, int((left[r][nodes > 0] // nodes[nodes > 0]).min(initial=count))) if fits else 0
            counts[t, r] += fit
            left[r] -= fit * nodes
        return counts

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
    problem = tolls.fronts.problem
    unit_of_weight = weight_unit(problem)
    tables = [completions(block.cover_problem()).everywhere for block in tolls.blocks]
    weights = []
    for block in tolls.blocks:
        units = [unit for unit in tolls.fronts.coverage.units() if unit[0] in block.rows]
        weights.append(min(sum(problem.demand[i].weight for i in unit) for unit in units) / unit_of_weight)
    paid = float((problem.available * tolls.toll_usd_per_h).sum())
    most = 10 * max(float(table[0]) / weight for table, weight in zip(tables, weights, strict=True))
    best = 0.0
    for price in [0.0, *np.geomspace(most / 1e5, most, 200)]:
        least = sum(
            float((table + price * weight * np.linspace(0.0, 1.0, len(table))).min())
            for table, weight in zip(tables, weights, strict=True)
        )
        best = max(best, least - paid - price * shortfall)
    return float(best) * (1 - 1e-12)


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
