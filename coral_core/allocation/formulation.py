"""The allocation integer program (DESIGN 3.6) as sparse columns, shared by every stage of the lexicographic solve.

Data: A_rc nodes we may hold; U_tc nodes, T_t throughput, p_tr price of a template; nu'_tr what runs; K churn factor;
  D_i demand, w_i weight, f_i floor, g_i cap of a row; a_ti = min(T_t / D_i, 1).
Variables: x_tr integer >= 0 (new, at p(1+K)) and o_tr integer in [0, nu'_tr] (running, at p) where K > 0; s_u in [0, 1]
  missing fraction of unit u (a row, or the two rows of a same-region pair); d_ur in [0, 1] fraction of a pair served in
  place r (a region, and one variant of the model where there are several); e_i in [0, f_i] instances missing from a floor.
Constraints, by family:
  capacity  sum_t U_tc (x + o)_tr <= A_rc                       for each r, c
  demand    sum_tr a_ti (x + o)_tr + s_u >= 1                   for each active row i alone in its unit u
  region    sum_t a_ti (x + o)_tr - d_ur >= 0                   for each row i of a pair u, each r
  pair      sum_r d_ur + s_u >= 1                               for each pair u
  on_demand sum over t without spot nodes of a_ti (x + o)_tr + h_i s_u >= h_i     for each active row i with a floor h_i
  floor     sum_tr (x + o)_tr + e_i >= f_i ;  cap  sum_tr (x + o)_tr <= g_i
  budget    sum_tr p_tr (x + o)_tr <= B                         where there is one
  stage     sum_i e_i <= E ;  sum_u w_u s_u <= W                what earlier stages proved
Objective, by stage: sum e, then sum w s, then cost + churn. A running instance beside a newcomer is never skipped,
since it is cheaper, so o + x = nu and the churn is (nu - nu')+ p K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from coral_core.allocation.assess import Assessment
from coral_core.allocation.columns import Columns
from coral_core.allocation.coverage import Coverage, Floats, Ints, fraction, weight_unit
from coral_core.allocation.wide import WideProgram
from coral_core.domain.allocation import AllocationProblem

_ROW_SCALE_MAX = 1e3


class Family(StrEnum):
    """The named families of constraints."""

    CAPACITY = "capacity"
    DEMAND = "demand"
    REGION = "region"
    PAIR = "pair"
    FLOOR = "floor"
    CAP = "cap"
    BUDGET = "budget"
    ON_DEMAND = "on_demand"
    STAGE = "stage"


RowKey = tuple[Family, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulation:
    """A program with its meaning: `program` has the columns, then s, d, e; `row_scale` turns demand rows into fractions.

    `row_key` names each row: (family, index a, index b): capacity (r, c), demand (i, 0), region (i, place), pair (u, 0),
    floor (i, 0), cap (i, 0), on_demand (i, 0), budget (0, 0).
    """

    columns: Columns
    program: WideProgram
    cost_usd_per_h: Floats
    weight: Floats
    shortfall: slice
    deficit: slice
    row_key: tuple[RowKey, ...]
    row_scale: Floats
    units: tuple[tuple[int, ...], ...]
    floors: tuple[int, ...]

    def full(self) -> WideProgram:
        """Least cost with every weighted demand and every floor met."""
        upper = self.program.upper.copy()
        upper[self.shortfall] = np.where(self.weight[self.shortfall] > 0, 0.0, 1.0)
        upper[self.deficit] = 0.0
        return replace(self.program, objective=self.cost_usd_per_h, upper=upper)

    def least_deficit(self) -> WideProgram:
        """Fewest instances missing from floors."""
        objective = np.zeros_like(self.cost_usd_per_h)
        objective[self.deficit] = 1.0
        return replace(self.program, objective=objective)

    def least_shortfall(self, deficit: int) -> WideProgram:
        """Least weighted missing fraction at no more than `deficit` instances missing from floors."""
        return replace(self.program, objective=self.weight, row_upper=self._stage(deficit, math.inf))

    def least_cost(self, deficit: int, shortfall: float) -> WideProgram:
        """Least cost at no more than the deficit and the weighted shortfall given."""
        return replace(self.program, objective=self.cost_usd_per_h, row_upper=self._stage(deficit, shortfall))

    def _stage(self, deficit: int, shortfall: float) -> Floats:
        row_upper = self.program.row_upper.copy()
        row_upper[-2:] = (deficit, shortfall)
        return row_upper

    def point(self, counts: Ints, assessment: Assessment) -> Floats:
        """The solution that `counts` stand for: running before new, and the least s, d and e that go with them."""
        x = np.zeros(len(self.cost_usd_per_h))
        rest = counts.copy()
        for old in (True, False):
            index = np.flatnonzero(self.columns.old == old)
            at = (self.columns.template[index], self.columns.region[index])
            number = np.minimum(rest[at], self.columns.upper[index]) if old else rest[at]
            x[index] = number
            rest[at] -= number.astype(np.int64)
        x[self.shortfall] = [assessment.missing_frac[unit[0]] for unit in self.units]
        x[self.shortfall.stop : self.deficit.start] = [
            min(float(frac), 1.0)
            for unit in self.units
            if len(unit) > 1
            for frac in assessment.covered_frac[list(unit)].min(axis=0)
        ]
        x[self.deficit] = [assessment.deficit[i] for i in self.floors]
        return x

    def counts(self, x: Floats, shape: tuple[int, int]) -> Ints:
        """Instances per (template, region) in a solution, rounded to whole numbers."""
        counts = np.zeros(shape, dtype=np.int64)
        number = np.rint(x[: len(self.columns)]).astype(np.int64)
        np.add.at(counts, (self.columns.template, self.columns.region), number)
        return counts


class _Rows:
    """Rows of the program under construction, as coordinates."""

    def __init__(self) -> None:
        self.row: list[Ints] = []
        self.column: list[Ints] = []
        self.value: list[Floats] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.key: list[RowKey] = []
        self.scale: list[float] = []

    def add(
        self,
        key: RowKey,
        *terms: tuple[Ints, Floats],
        lower: float = -math.inf,
        upper: float = math.inf,
        scale: float = 1.0,
    ) -> None:
        """A row of (columns, values) terms, all of it times `scale`."""
        columns = np.concatenate([term[0] for term in terms])
        self.row.append(np.full(len(columns), len(self.lower), dtype=np.int64))
        self.column.append(columns)
        self.value.append(np.concatenate([term[1] for term in terms]) * scale)
        self.lower.append(lower * scale)
        self.upper.append(upper * scale)
        self.key.append(key)
        self.scale.append(scale)


def formulate(
    problem: AllocationProblem,
    coverage: Coverage,
    columns: Columns,
    *,
    rows: tuple[int, ...] | None = None,
    capacity: bool = True,
    capped: bool = True,
) -> Formulation:
    """Build the program over `columns`, for the demand `rows` (default all), with or without capacity rows.

    `capped=False` keeps true throughputs (for prices of the linear relaxation; equal for whole instances).
    """
    chosen = tuple(range(len(problem.demand))) if rows is None else rows
    units = tuple(unit for unit in coverage.units() if unit[0] in chosen)
    floors = tuple(i for i in chosen if problem.demand[i].min_instances > 0)
    n_places = len(problem.regions) * coverage.n_variants
    n_served = sum(n_places for unit in units if len(unit) > 1)
    n_s, n_d, n_e = len(units), n_served, len(floors)
    s, d, e = np.split(len(columns) + np.arange(n_s + n_d + n_e), (n_s, n_s + n_d))
    n = len(columns) + n_s + n_d + n_e
    entered = _entered(problem, coverage, columns, capped=capped)
    built = _Rows()
    if capacity:
        _add_capacity(built, problem, columns)
        _add_budget(built, problem, columns)
    place = coverage.place(columns.template, columns.region)
    _add_demand(built, units, entered, place, s, d.reshape(-1, n_places) if n_d else d)
    steady = ~coverage.spot_of[columns.template]
    for u, unit in enumerate(units):
        for i in unit:
            floor = problem.demand[i].on_demand_frac
            if floor > 0:
                kept = steady[entered[i][0]]
                index, frac = entered[i][0][kept], entered[i][1][kept]
                let_off = (s[[u]], np.full(1, floor))
                scale = _scale(np.append(frac, floor))
                built.add((Family.ON_DEMAND, i, 0), (index, frac), let_off, lower=floor, scale=scale)
    for i in chosen:
        row, index = problem.demand[i], entered[i][0]
        if i in floors:
            missing = e[[floors.index(i)]]
            terms = ((index, np.ones(len(index))), (missing, np.ones(1)))
            built.add((Family.FLOOR, i, 0), *terms, lower=row.min_instances)
        if row.max_instances is not None:
            built.add((Family.CAP, i, 0), (index, np.ones(len(index))), upper=row.max_instances)
    weight_of_one = weight_unit(problem)
    weight = np.zeros(n)
    weight[s] = [math.fsum(problem.demand[i].weight for i in unit) / weight_of_one for unit in units]
    built.add((Family.STAGE, 0, 0), (e, np.ones(n_e)))
    built.add((Family.STAGE, 1, 0), (s, weight[s]))
    cost = np.concatenate((columns.price_usd_per_h, np.zeros(n_s + n_d + n_e)))
    program = WideProgram.from_entries(
        objective=cost,
        upper=np.concatenate(
            (columns.upper, np.ones(n_s + n_d), np.array([problem.demand[i].min_instances for i in floors]))
        ),
        integer=np.arange(n) < len(columns),
        n_wide=len(columns),
        row=np.concatenate(built.row),
        column=np.concatenate(built.column),
        value=np.concatenate(built.value),
        row_lower=np.array(built.lower),
        row_upper=np.array(built.upper),
    )
    return Formulation(
        columns=columns,
        program=program,
        cost_usd_per_h=cost,
        weight=weight,
        shortfall=slice(len(columns), len(columns) + n_s),
        deficit=slice(n - n_e, n),
        row_key=tuple(built.key),
        row_scale=np.array(built.scale),
        units=units,
        floors=floors,
    )


def _add_capacity(built: _Rows, problem: AllocationProblem, columns: Columns) -> None:
    for r in range(len(problem.regions)):
        here = np.flatnonzero(columns.region == r)
        used = problem.templates.nodes[columns.template[here]]
        for c in np.flatnonzero((used > 0).any(axis=0)):
            some = used[:, c] > 0
            term = (here[some], used[some, c].astype(np.float64))
            built.add((Family.CAPACITY, r, int(c)), term, upper=float(problem.available[r, c]))


def _add_budget(built: _Rows, problem: AllocationProblem, columns: Columns) -> None:
    budget = problem.options.budget_usd_per_h
    if budget is None:
        return
    rent = np.where(columns.old, columns.price_usd_per_h, columns.price_usd_per_h / (1 + problem.churn_k))
    scale = 1 / budget if budget > 0 else 1.0
    built.add((Family.BUDGET, 0, 0), (np.arange(len(columns)), rent), upper=budget, scale=scale)


def _add_demand(
    built: _Rows,
    units: tuple[tuple[int, ...], ...],
    entered: dict[int, tuple[Ints, Floats]],
    place: Ints,
    *variables: Ints,
) -> None:
    """Demand rows, or region and pair rows; a row's largest coefficient is brought to 1, beside which solvers' tolerances are small."""
    s, d = variables
    pair = 0
    for u, unit in enumerate(units):
        missing = (s[[u]], np.ones(1))
        if len(unit) == 1:
            index, frac = entered[unit[0]]
            built.add((Family.DEMAND, unit[0], 0), (index, frac), missing, lower=1.0, scale=_scale(frac))
            continue
        for i in unit:
            index, frac = entered[i]
            for r in range(d.shape[1]):
                here = place[index] == r
                served = (d[pair, [r]], -np.ones(1))
                built.add((Family.REGION, i, r), (index[here], frac[here]), served, lower=0.0, scale=_scale(frac[here]))
        built.add((Family.PAIR, u, 0), (d[pair], np.ones(d.shape[1])), missing, lower=1.0)
        pair += 1


def _scale(frac: Floats) -> float:
    largest = float(frac.max(initial=0.0))
    return min(1.0 / largest, _ROW_SCALE_MAX) if largest > 0 else 1.0


def _entered(
    problem: AllocationProblem, coverage: Coverage, columns: Columns, *, capped: bool
) -> dict[int, tuple[Ints, Floats]]:
    """Per row: the columns that enter it and the fraction that one instance covers."""
    empty = (np.zeros(0, dtype=np.int64), np.zeros(0))
    found = {i: [empty] for i in range(len(problem.demand))}
    group_of_column = coverage.group_of[columns.template]
    for g, group in enumerate(coverage.groups):
        index = np.flatnonzero(group_of_column == g)
        throughput = problem.templates.throughput[columns.template[index]]
        for i, amount in zip(group.rows, group.amounts, strict=True):
            frac = fraction(throughput, amount, capped=capped) if coverage.active[i] else np.zeros(len(index))
            found[i].append((index, frac))
    return {
        i: (np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))
        for i, parts in found.items()
    }
