"""HiGHS adapter (highspy, https://highs.dev): the open solver, always there, no size limit."""

from __future__ import annotations

import math
import time

import highspy
import numpy as np

from coral_core.errors import SolverError
from coral_core.solver.program import IntegerProgram, SolveOptions, SolveResult, SolveStatus

_STATUS = {
    highspy.HighsModelStatus.kOptimal: SolveStatus.OPTIMAL,
    highspy.HighsModelStatus.kInfeasible: SolveStatus.INFEASIBLE,
    highspy.HighsModelStatus.kUnbounded: SolveStatus.UNBOUNDED,
    highspy.HighsModelStatus.kUnboundedOrInfeasible: SolveStatus.INFEASIBLE,
    highspy.HighsModelStatus.kModelEmpty: SolveStatus.OPTIMAL,
}


class HighsSolver:
    """Mixed integer and linear programs on HiGHS."""

    name = "highs"

    def accepts(self, program: IntegerProgram) -> bool:  # noqa: ARG002 - HiGHS takes any size
        """Always: HiGHS is a base dependency without a licence."""
        return True

    def solve(self, program: IntegerProgram, options: SolveOptions) -> SolveResult:
        """Solve; see `Solver.solve`."""
        started = time.perf_counter()
        highs = highspy.Highs()
        _set_options(highs, options)
        if highs.passModel(_model(program)) == highspy.HighsStatus.kError:
            raise SolverError("HiGHS refused the program", where=program.name)
        if options.warm_start is not None:
            _set_start(highs, options.warm_start)
        highs.run()
        return _result(highs, program, time.perf_counter() - started)


def _set_options(highs: highspy.Highs, options: SolveOptions) -> None:
    for key, value in {
        "output_flag": False,
        "time_limit": options.time_limit_s,
        "mip_rel_gap": options.gap_frac,
        "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": max(options.feasibility_tolerance, 1e-10),
        "primal_feasibility_tolerance": max(options.feasibility_tolerance, 1e-10),
        "threads": options.threads,
        "random_seed": options.seed,
    }.items():
        highs.setOptionValue(key, value)


def _model(program: IntegerProgram) -> highspy.HighsLp:
    lp = highspy.HighsLp()
    lp.num_col_ = program.n_columns
    lp.num_row_ = program.n_rows
    lp.col_cost_ = program.objective
    lp.col_lower_ = program.lower
    lp.col_upper_ = program.upper
    lp.row_lower_ = program.row_lower
    lp.row_upper_ = program.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = program.indptr
    lp.a_matrix_.index_ = program.indices
    lp.a_matrix_.value_ = program.values
    lp.offset_ = program.offset
    lp.sense_ = highspy.ObjSense.kMaximize if program.maximize else highspy.ObjSense.kMinimize
    if program.integer.any():
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(flag)] for flag in program.integer]
    return lp


def _set_start(highs: highspy.Highs, start: np.ndarray) -> None:
    known = np.flatnonzero(~np.isnan(start)).astype(np.int32)
    highs.setSolution(len(known), known, start[known])


def _result(highs: highspy.Highs, program: IntegerProgram, solve_s: float) -> SolveResult:
    info = highs.getInfo()
    status = _STATUS.get(highs.getModelStatus(), SolveStatus.UNKNOWN)
    has_point = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status is SolveStatus.UNKNOWN and has_point:
        status = SolveStatus.FEASIBLE
    if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
        return SolveResult(status=status, x=None, objective=None, bound=None, solve_s=solve_s, solver="highs")
    solution = highs.getSolution()
    is_mip = bool(program.integer.any())
    objective = float(info.objective_function_value)
    bound = float(info.mip_dual_bound) if is_mip else objective
    if not math.isfinite(bound):
        bound = math.inf if program.maximize else -math.inf
    return SolveResult(
        status=status,
        x=np.asarray(solution.col_value, dtype=np.float64),
        objective=objective,
        bound=bound,
        solve_s=solve_s,
        solver="highs",
        row_duals=None if is_mip else np.asarray(solution.row_dual, dtype=np.float64),
        reduced_costs=None if is_mip else np.asarray(solution.col_dual, dtype=np.float64),
    )
