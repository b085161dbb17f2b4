"""Solve integer programs with very many columns and few rows, with a proven bound.

Small programs go to the solver as they are. Wide ones:
1. Sifting: solve the linear relaxation on a few columns, price all others, add the most negative, repeat. For row
   prices y of any quality, L(y) = sum_i y_i b_i + sum_j min(rc_j l_j, rc_j u_j) is a lower bound (weak duality, computed
   here, hence free of the solver's tolerances).
2. A solution that uses a column of reduced cost rc_j at all costs at least L(y) + rc_j. So solving the integer program on
   the columns with rc_j <= delta proves min(its bound, L(y) + least rc_j left out). Grow delta until that is within the
   gap of the best solution found; at delta = best - L(y) nothing useful is left out.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from coral_core.allocation.coverage import Bools, Floats, Ints
from coral_core.solver.program import IntegerProgram, SolveOptions, Solver, SolveStatus

DIRECT_COLUMNS = 4_000
"""Programs up to this size are given to the solver whole."""
_FIRST_COLUMNS = 500
_GROWTH = 4
_SHARE = 0.25
_SIFT_BATCH = 1_000
_COST_RANGE_MAX = 1e7
_NOISE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class WideProgram:
    """min c x, row_lower <= A x <= row_upper, 0 <= x <= upper (finite), in sparse column form.

    The first `n_wide` columns may be left out (they are 0 then); the others always stay.
    """

    objective: Floats
    upper: Floats
    integer: Bools
    n_wide: int
    indptr: Ints
    rows: Ints
    values: Floats
    row_lower: Floats
    row_upper: Floats

    @classmethod
    def from_entries(
        cls,
        *,
        objective: Floats,
        upper: Floats,
        integer: Bools,
        n_wide: int,
        row: Ints,
        column: Ints,
        value: Floats,
        row_lower: Floats,
        row_upper: Floats,
    ) -> WideProgram:
        """Build from coordinates (row, column, value), each pair at most once."""
        order = np.lexsort((row, column))
        indptr = np.concatenate(([0], np.cumsum(np.bincount(column, minlength=len(objective)))))
        return cls(
            objective=objective,
            upper=upper,
            integer=integer,
            n_wide=n_wide,
            indptr=indptr,
            rows=row[order],
            values=value[order],
            row_lower=row_lower,
            row_upper=row_upper,
        )

    def accepts(self, x: Floats) -> bool:
        """Whether `x` satisfies every row and bound, to within float noise."""
        column = np.repeat(np.arange(len(self.objective)), np.diff(self.indptr))
        activity = np.bincount(self.rows, weights=self.values * x[column], minlength=len(self.row_lower))
        pairs = ((self.row_lower, activity), (activity, self.row_upper), (x, self.upper))
        return all(bool((low - high <= _NOISE * np.maximum(1.0, np.abs(low))).all()) for low, high in pairs)

    def take(self, columns: Ints, *, relaxed: bool, scale: float) -> IntegerProgram:
        """The program on `columns`, objective times `scale`, as the solvers take it."""
        lengths = np.diff(self.indptr)[columns]
        entry = np.repeat(self.indptr[columns] - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
        entry = entry + np.arange(len(entry))
        column = np.repeat(np.arange(len(columns)), lengths)
        order = np.argsort(self.rows[entry], kind="stable")
        counts = np.bincount(self.rows[entry], minlength=len(self.row_lower))
        return IntegerProgram(
            objective=self.objective[columns] * scale,
            lower=np.zeros(len(columns)),
            upper=self.upper[columns],
            integer=np.zeros(len(columns), dtype=bool) if relaxed else self.integer[columns],
            indptr=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            indices=column[order].astype(np.int32),
            values=self.values[entry][order],
            row_lower=self.row_lower,
            row_upper=self.row_upper,
            name="allocation",
        )

    def price(self, duals: Floats) -> tuple[Floats, float, Floats]:
        """Signed duals, the lower bound they prove, and every column's reduced cost."""
        y = np.where(np.isneginf(self.row_lower), np.minimum(duals, 0.0), duals)
        y = np.where(np.isposinf(self.row_upper), np.maximum(y, 0.0), y)
        column = np.repeat(np.arange(len(self.objective)), np.diff(self.indptr))
        paid = np.bincount(column, weights=self.values * y[self.rows], minlength=len(self.objective))
        reduced = self.objective - paid
        side = np.where(y > 0, self.row_lower, np.where(y < 0, self.row_upper, 0.0))
        bound = math.fsum(y * side) + math.fsum(np.minimum(reduced, 0.0) * self.upper)
        return y, bound, reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSolution:
    """`x` over all columns (None: nothing found), the proven bound, and whether infeasibility is proven."""

    x: Floats | None
    bound: float
    infeasible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """Linear relaxation: row prices, proven bound, reduced costs, the columns it worked with, its solution."""

    duals: Floats
    bound: float
    reduced: Floats
    active: Ints
    objective: float
    x: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a solve may spend: the gap wished, a deadline of `time.perf_counter`, the tolerance."""

    gap_frac: float
    deadline_s: float
    feasibility_tolerance: float = 1e-9

    def left_s(self) -> float:
        """Seconds until the deadline, at least a few so that a solver can return what it has."""
        return max(self.deadline_s - time.perf_counter(), 0.05)

    def within(self, share: float) -> Effort:
        """The same with only `share` of the time left."""
        return replace(self, deadline_s=time.perf_counter() + share * self.left_s())

    def options(self, start: Floats | None = None) -> SolveOptions:
        """As the solvers take it. At the finest gaps the solver aims a thousand times lower: it costs it nothing."""
        gap = self.gap_frac if self.gap_frac > 1e-6 else self.gap_frac / 1000
        return SolveOptions(
            time_limit_s=self.left_s(),
            gap_frac=gap,
            feasibility_tolerance=self.feasibility_tolerance,
            warm_start=start,
        )


def cost_scale(objective: Floats) -> float:
    """Factor that brings the least positive cost to 1: solvers' dual tolerances are absolute."""
    positive = objective[objective > 0]
    if not len(positive):
        return 1.0
    return float(min(1.0 / positive.min(), max(_COST_RANGE_MAX / positive.max(), 1.0 / positive.max())))


def relax(program: WideProgram, solver: Solver, effort: Effort, seed: Ints) -> Relaxation | None:
    """Linear relaxation by sifting from the `seed` columns, with which the program must be feasible.

    None where the solver gives no prices (infeasible on the seed, or out of time).
    """
    scale = cost_scale(program.objective)
    always = np.arange(program.n_wide, len(program.objective))
    wide_upper = program.upper[: program.n_wide]
    active = np.unique(seed[seed < program.n_wide])
    best: Relaxation | None = None
    while True:
        columns = np.concatenate((active, always))
        answer = solver.solve(program.take(columns, relaxed=True, scale=scale), effort.options())
        if answer.row_duals is None or answer.status is not SolveStatus.OPTIMAL or answer.objective is None:
            return best
        duals, bound, reduced = program.price(answer.row_duals / scale)
        if best is None or bound > best.bound:
            x = np.zeros(len(program.objective))
            x[columns] = answer.x
            best = Relaxation(
                duals=duals, bound=bound, reduced=reduced, active=active, objective=answer.objective / scale, x=x
            )
        gain = -reduced[: program.n_wide] * np.minimum(wide_upper, 1.0)
        gain[active] = 0.0
        entering = np.flatnonzero(gain > 1e-9 * max(abs(best.objective), 1e-9))
        if not len(entering) or time.perf_counter() > effort.deadline_s:
            return best
        if len(entering) > _SIFT_BATCH:
            entering = entering[np.argpartition(-gain[entering], _SIFT_BATCH)[:_SIFT_BATCH]]
        active = np.union1d(active, entering)


def solve_wide(
    program: WideProgram, solver: Solver, effort: Effort, *, seed: Ints, start: Floats | None = None
) -> WideSolution:
    """Minimise. `seed`: columns on which the program is feasible if at all; `start`: a known solution.

    Returns the best solution found with a bound that holds for the whole program.
    """
    everything = np.arange(len(program.objective))
    if len(everything) <= DIRECT_COLUMNS:
        return _solve_on(program, solver, effort, everything, start)
    relaxation = relax(program, solver, effort.within(0.3), seed)
    if relaxation is None:
        return _solve_on(program, solver, effort, everything, start)
    return _grow(program, solver, effort, relaxation, start)


def _grow(
    program: WideProgram, solver: Solver, effort: Effort, relaxation: Relaxation, start: Floats | None
) -> WideSolution:
    x, bound, n = start, relaxation.bound, program.n_wide
    reduced = relaxation.reduced[:n]
    order = np.argsort(reduced, kind="stable")
    always = np.arange(n, len(program.objective))
    size, last = min(_FIRST_COLUMNS, n), False
    while True:
        last = last or size == n
        kept = order[:size] if x is None else np.union1d(order[:size], np.flatnonzero(x[:n] > 0))
        columns = np.concatenate((kept, always))
        found = _solve_on(program, solver, effort if last else effort.within(_SHARE), columns, x)
        if size == n and found.infeasible:
            return found
        left_out = math.inf if size == n else relaxation.bound + max(float(reduced[order[size]]), 0.0)
        bound = max(bound, min(found.bound, left_out))
        if found.x is not None and (x is None or program.objective @ found.x < program.objective @ x):
            x = found.x
        value = math.inf if x is None else float(program.objective @ x)
        if last or value - bound <= effort.gap_frac * max(abs(value), 1e-9) or time.perf_counter() > effort.deadline_s:
            return WideSolution(x=x, bound=min(bound, value))
        if left_out < min(found.bound, value):
            # columns with a reduced cost above best - L(y) cannot be part of anything better
            useful = int(np.searchsorted(reduced[order], value - relaxation.bound, side="right"))
            size = min(size * _GROWTH, max(useful, size + 1), n)
        else:
            last = True  # what was left out cannot help: all the time left goes to these


def _solve_on(
    program: WideProgram, solver: Solver, effort: Effort, columns: Ints, start: Floats | None
) -> WideSolution:
    scale = cost_scale(program.objective)
    part = program.take(columns, relaxed=False, scale=scale)
    answer = solver.solve(part, effort.options(None if start is None else start[columns]))
    if answer.status is SolveStatus.INFEASIBLE:
        return WideSolution(x=None, bound=math.inf, infeasible=True)
    bound = -math.inf if answer.bound is None else answer.bound / scale
    if answer.x is None:
        return WideSolution(x=None, bound=bound)
    x = np.zeros(len(program.objective))
    x[columns] = answer.x
    return WideSolution(x=x, bound=bound)
