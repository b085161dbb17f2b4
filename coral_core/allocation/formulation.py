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
  region_demand, redundancy                                     see `guarantees`; v_u in [0, 1]: served, but not after a loss
  on_demand sum over t without spot nodes of a_ti (x + o)_tr + h_i s_u >= h_i     for each active row i with a floor h_i
  floor     sum_tr (x + o)_tr + e_i >= f_i ;  cap  sum_tr (x + o)_tr <= g_i
  budget    sum_tr p_tr (x + o)_tr <= B                         where there is one
  quota     sum_tc u_kc U_tc (x + o)_tr <= Q_k                  for each pool k of region r: u units a node
  stage     sum_i e_i <= E ;  sum_u w_u (s_u + q v_u) <= W      what earlier stages proved; q = SPARE_WEIGHT
Objective, by stage: sum e, then sum w (s + q v), then cost + churn + preference. A running instance beside a newcomer is
never skipped, since it is cheaper, so o + x = nu and the churn is (nu - nu')+ p K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.assess import Assessment, pool_units
from coral_core.allocation.columns import Columns, useful_instances
from coral_core.allocation.coverage import Bools, Coverage, Floats, Ints, fraction, weight_unit
from coral_core.allocation.guarantees import Guarantees, Loss, Zone
from coral_core.allocation.preferences import real_prices
from coral_core.allocation.rows import Family, RowKey, Rows, Term, row_scale
from coral_core.allocation.wide import WideProgram
from coral_core.domain.allocation import SPARE_WEIGHT, AllocationProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulation:
    """A program with its meaning: columns, then s, v, d, e, then those of `guarantees`; `row_scale` turns rows into fractions.

    `row_key` names each row: (family, index a, index b): capacity (r, c), demand (i, 0), region (i, place), pair (u, 0),
    floor (i, 0), cap (i, 0), on_demand (i, 0), budget (0, 0), quota (k, 0), region_demand (first row of the unit, r),
    redundancy (first row of the unit, zone), left (i, the variable that says what is left), link (variable, 1)
    where more of a size than that are of no use. `shortfall` is the slice of s and v; `exposed` are the units that have a v.
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
    exposed: tuple[int, ...]
    floors: tuple[int, ...]
    guarantees: Guarantees

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

    def least_shortfall(self, deficit: float) -> WideProgram:
        """Least weighted missing fraction at no more than `deficit` instances missing from floors."""
        return replace(self.program, objective=self.weight, row_upper=self._stage(deficit, math.inf))

    def least_cost(self, deficit: float, shortfall: float) -> WideProgram:
        """Least cost at no more than the deficit and the weighted shortfall given."""
        return replace(self.program, objective=self.cost_usd_per_h, row_upper=self._stage(deficit, shortfall))

    def _stage(self, deficit: float, shortfall: float) -> Floats:
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
        x[self.shortfall] = self.shortfalls(assessment)
        x[self.shortfall.stop : self.deficit.start] = [
            min(float(frac), 1.0)
            for unit in self.units
            if len(unit) > 1
            for frac in assessment.covered_frac[list(unit)].min(axis=0)
        ]
        x[self.deficit] = [assessment.deficit[i] for i in self.floors]
        self.guarantees.fill(x)
        return x

    def served(self, x: Floats) -> Floats:
        """(pairs, places): d of every pair in a solution."""
        pairs = sum(len(unit) > 1 for unit in self.units)
        return x[self.shortfall.stop : self.deficit.start].reshape(pairs, -1 if pairs else 0)

    def shortfalls(self, assessment: Assessment) -> list[float]:
        """The s of every unit and v of those that have one, in a plan."""
        short = [assessment.unserved_frac[unit[0]] for unit in self.units]
        return short + [assessment.exposed_frac[self.units[u][0]] for u in self.exposed]

    def counts(self, x: Floats, shape: tuple[int, int]) -> Ints:
        """Instances per (template, region) in a solution, rounded to whole numbers."""
        counts = np.zeros(shape, dtype=np.int64)
        number = np.rint(x[: len(self.columns)]).astype(np.int64)
        np.add.at(counts, (self.columns.template, self.columns.region), number)
        return counts


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
    exposed = tuple(u for u, unit in enumerate(units) if coverage.spare[list(unit)].any())
    floors = tuple(i for i in chosen if problem.demand[i].min_instances > 0)
    n_places = len(problem.regions) * coverage.n_variants
    n_pairs = sum(len(unit) > 1 for unit in units)
    sizes = (len(columns), len(units), len(exposed), n_pairs * n_places, len(floors))
    starts = np.cumsum((0, *sizes))
    _, s, v, d, e = (np.arange(start, start + size) for start, size in zip(starts, sizes, strict=False))
    entered = _entered(problem, coverage, columns, capped=capped)
    built = Rows(n=int(starts[-1]))
    guarantees = Guarantees(rows=built)
    if capacity:
        _add_capacity(built, problem, columns)
        _add_budget(built, problem, columns)
        _add_pools(built, problem, columns)
    place = coverage.place(columns.template, columns.region)
    served = dict(zip((unit for unit in units if len(unit) > 1), d.reshape(n_pairs, n_places), strict=True))
    _add_demand(built, units=units, entered=entered, place=place, s=s, served=served)
    steady = ~coverage.spot_of[columns.template]
    _add_on_demand(built, problem, units=units, entered=entered, steady=steady, s=s)
    useful = useful_instances(problem, coverage)[columns.template].astype(np.float64) if exposed else np.zeros(0)
    for u, unit in enumerate(units):
        fracs = dict(coverage.region_fracs[unit[0]])
        if fracs or u in exposed:
            split = bool(fracs) or len(unit) > 1
            zones = _zones(
                coverage, columns, unit, entered=entered, served=served.get(unit), useful=useful, split=split
            )
            guarantees.add(unit, zones, fracs, int(s[u]), int(v[exposed.index(u)]) if u in exposed else None)
    _add_floors_and_caps(built, problem, chosen=chosen, floors=floors, entered=entered, e=e)
    weight = np.zeros(built.n)
    weight[s] = [math.fsum(problem.demand[i].weight for i in unit) / weight_unit(problem) for unit in units]
    weight[v] = weight[s[list(exposed)]] * SPARE_WEIGHT
    built.add((Family.STAGE, 0, 0), Term.of(e))
    short = np.concatenate((s, v))
    built.add((Family.STAGE, 1, 0), Term(column=short, value=weight[short]))
    cost = np.zeros(built.n)
    cost[: len(columns)] = columns.price_usd_per_h
    most_missing = np.array([float(problem.demand[i].min_instances) for i in floors])
    program = WideProgram.from_entries(
        objective=cost,
        upper=np.concatenate((columns.upper, np.ones(sum(sizes[1:4])), most_missing, *built.added_upper)),
        integer=np.concatenate((np.arange(starts[-1]) < len(columns), np.array(built.added_integer, dtype=bool))),
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
        shortfall=slice(int(starts[1]), int(starts[3])),
        deficit=slice(int(starts[4]), int(starts[5])),
        row_key=tuple(built.key),
        row_scale=np.array(built.scale),
        units=units,
        exposed=exposed,
        floors=floors,
        guarantees=guarantees,
    )


def _add_capacity(built: Rows, problem: AllocationProblem, columns: Columns) -> None:
    for r in range(len(problem.regions)):
        here = np.flatnonzero(columns.region == r)
        used = problem.templates.nodes[columns.template[here]]
        for c in np.flatnonzero((used > 0).any(axis=0)):
            some = used[:, c] > 0
            term = Term(column=here[some], value=used[some, c].astype(np.float64))
            built.add((Family.CAPACITY, r, int(c)), term, upper=float(problem.available[r, c]))


def _add_budget(built: Rows, problem: AllocationProblem, columns: Columns) -> None:
    budget = problem.options.budget_usd_per_h
    if budget is None:
        return
    rent = (problem.templates.nodes[columns.template] * real_prices(problem)[columns.region]).sum(axis=1)
    scale = 1 / budget if budget > 0 else 1.0
    built.add((Family.BUDGET, 0, 0), Term(column=np.arange(len(columns)), value=rent), upper=budget, scale=scale)


def _add_pools(built: Rows, problem: AllocationProblem, columns: Columns) -> None:
    for k, units in enumerate(pool_units(problem)):
        taken = (problem.templates.nodes[columns.template] * units[columns.region]).sum(axis=1)
        index = np.flatnonzero(taken)
        if len(index):
            term = Term(column=index, value=taken[index])
            built.add((Family.QUOTA, k, 0), term, upper=problem.pools[k].limit, scale=1 / float(taken[index].min()))


def _add_demand(
    built: Rows,
    *,
    units: tuple[tuple[int, ...], ...],
    entered: dict[int, tuple[Ints, Floats]],
    place: Ints,
    s: Ints,
    served: dict[tuple[int, ...], Ints],
) -> None:
    """Demand rows, or region and pair rows."""
    for u, unit in enumerate(units):
        missing = Term.of(s[[u]])
        if len(unit) == 1:
            index, frac = entered[unit[0]]
            row = Term(column=index, value=frac).plus(missing)
            built.add((Family.DEMAND, unit[0], 0), row, lower=1.0, scale=row_scale(frac))
            continue
        d = served[unit]
        for i in unit:
            index, frac = entered[i]
            for r in range(len(d)):
                here = place[index] == r
                row = Term(column=index[here], value=frac[here]).plus(Term.of(d[[r]], -1.0))
                built.add((Family.REGION, i, r), row, lower=0.0, scale=row_scale(frac[here]))
        built.add((Family.PAIR, u, 0), Term.of(d).plus(missing), lower=1.0)


def _add_on_demand(
    built: Rows,
    problem: AllocationProblem,
    *,
    units: tuple[tuple[int, ...], ...],
    entered: dict[int, tuple[Ints, Floats]],
    steady: Bools,
    s: Ints,
) -> None:
    for u, unit in enumerate(units):
        for i in unit:
            floor = problem.demand[i].on_demand_frac
            if floor > 0:
                kept = steady[entered[i][0]]
                row = Term(column=entered[i][0][kept], value=entered[i][1][kept]).plus(Term.of(s[[u]], floor))
                built.add((Family.ON_DEMAND, i, 0), row, lower=floor, scale=row_scale(row.value))


def _add_floors_and_caps(
    built: Rows,
    problem: AllocationProblem,
    *,
    chosen: tuple[int, ...],
    floors: tuple[int, ...],
    entered: dict[int, tuple[Ints, Floats]],
    e: Ints,
) -> None:
    for i in chosen:
        row, instances = problem.demand[i], Term.of(entered[i][0])
        if i in floors:
            missing = Term.of(e[[floors.index(i)]])
            built.add((Family.FLOOR, i, 0), instances.plus(missing), lower=row.min_instances)
        if row.max_instances is not None:
            built.add((Family.CAP, i, 0), instances, upper=row.max_instances)


def _zones(
    coverage: Coverage,
    columns: Columns,
    unit: tuple[int, ...],
    *,
    entered: dict[int, tuple[Ints, Floats]],
    served: Ints | None,
    useful: Floats,
    split: bool,
) -> list[Zone]:
    """The zones of a unit: places of a pair, regions where some are asked for, else all in one."""
    place = coverage.place(columns.template, columns.region) if served is not None else columns.region
    group = coverage.group_of[columns.template]
    spare = coverage.spare[list(unit)].any()
    used: list[int] = np.unique(np.concatenate([place[entered[i][0]] for i in unit])).tolist()
    zones = []
    for z in used if split else (None,):
        here = {i: _where(entered[i], None if z is None else place == z) for i in unit}
        terms = {i: Term(column=index, value=frac) for i, (index, frac) in here.items()}
        losses = []
        kinds = {tuple(k for k in g.rows if k in unit) for g in coverage.groups} if spare else set[tuple[int, ...]]()
        for kind in sorted(kinds - {()}):
            if not coverage.spare[list(kind)].any() and len(kind) == 1:
                continue
            of_kind = [g for g, own in enumerate(coverage.groups) if tuple(k for k in own.rows if k in unit) == kind]
            fracs = {i: _where(here[i], np.isin(group, of_kind)) for i in kind}
            index = fracs[kind[0]][0]
            if len(index):
                frac_by_row = {i: frac for i, (_, frac) in fracs.items()}
                loss = Loss(columns=index, group=group[index], most=useful[index], frac_by_row=frac_by_row)
                losses.append(loss)
        own = terms[unit[0]] if z is None or served is None else Term.of(served[[z]])
        region = z if z is None or served is None else z // coverage.n_variants
        zones.append(Zone(region=region, rows=terms, served=own, losses=tuple(losses)))
    return zones


def _where(entered: tuple[Ints, Floats], columns: Bools | None) -> tuple[Ints, Floats]:
    index, frac = entered
    if columns is None:
        return entered
    kept = columns[index]
    return index[kept], frac[kept]


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
