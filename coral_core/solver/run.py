"""What every adapter does around its library's own solve: check, settle edge cases, take the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from coral_core.errors import SolverError
from coral_core.solver.check import check_program
from coral_core.solver.program import IntegerProgram, SolveOptions, SolveResult, SolveStatus

Run = Callable[[IntegerProgram, SolveOptions], SolveResult]


def run_checked(run: Run, program: IntegerProgram, options: SolveOptions, *, solver: str) -> SolveResult:
    """Solve by `run` with the guarantees of `Solver.solve`.

    `run` may answer `unbounded` for "unbounded or infeasible": which of them it is gets found out here.
    Raises SolverError where the program or the warm start is malformed.
    """
    check_program(program)
    start = options.warm_start
    if start is not None and start.shape != (program.n_columns,):
        raise SolverError(f"warm start has shape {start.shape}, not ({program.n_columns},)", where=program.name)
    started = time.perf_counter()
    if program.n_columns == 0:
        result = _without_columns(program, solver)
    else:
        result = run(program, options)
        if result.status is SolveStatus.UNBOUNDED:
            left_s = max(0.0, options.time_limit_s - (time.perf_counter() - started))
            result = _settle_unbounded(run, program, replace(options, time_limit_s=left_s), result)
    return replace(result, solve_s=time.perf_counter() - started)


def _without_columns(program: IntegerProgram, solver: str) -> SolveResult:
    if (program.row_lower > 0).any() or (program.row_upper < 0).any():
        return SolveResult(
            status=SolveStatus.INFEASIBLE, x=None, objective=None, bound=None, solve_s=0.0, solver=solver
        )
    return SolveResult(
        status=SolveStatus.OPTIMAL,
        x=np.zeros(0),
        objective=program.offset,
        bound=program.offset,
        solve_s=0.0,
        solver=solver,
        row_duals=np.zeros(program.n_rows),
        reduced_costs=np.zeros(0),
    )


def _settle_unbounded(run: Run, program: IntegerProgram, options: SolveOptions, result: SolveResult) -> SolveResult:
    """A feasible program with an unbounded relaxation is unbounded where its data are rational (Meyer 1974)."""
    feasible = run(replace(program, objective=np.zeros(program.n_columns)), options).status
    if feasible in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
        return result
    return replace(result, status=feasible)
