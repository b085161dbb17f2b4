"""HiGHS adapter (highspy, https://highs.dev): the open solver, always there, no size limit."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import metadata

import highspy
import numpy as np

from coral_core.errors import SolverError
from coral_core.solver.check import objective_value
from coral_core.solver.program import (
    Floats,
    IntegerProgram,
    SolveOptions,
    SolveResult,
    SolverInfo,
    SolveStatus,
)
from coral_core.solver.run import run_checked

_Model = highspy.HighsModelStatus
_STATUS = {
    _Model.kOptimal: SolveStatus.OPTIMAL,
    _Model.kModelEmpty: SolveStatus.OPTIMAL,
    _Model.kInfeasible: SolveStatus.INFEASIBLE,
    # HiGHS proves "the relaxation is unbounded" or "unbounded or infeasible"; `run_checked` finds out which.
    _Model.kUnbounded: SolveStatus.UNBOUNDED,
    _Model.kUnboundedOrInfeasible: SolveStatus.UNBOUNDED,
}
_FAILED = {
    _Model.kNotset,
    _Model.kLoadError,
    _Model.kModelError,
    _Model.kPresolveError,
    _Model.kSolveError,
    _Model.kPostsolveError,
}
_MIN_TOLERANCE = 1e-10  # the smallest that HiGHS accepts
_OBJECTIVE_NOISE = 1e-9
_LEAST_S = 0.05


class HighsSolver:
    """Mixed integer and linear programs on HiGHS."""

    name = "highs"

    def accepts(self, program: IntegerProgram) -> bool:  # noqa: ARG002 - HiGHS takes any size
        """Always: HiGHS is a base dependency without a licence."""
        return True

    def solve(self, program: IntegerProgram, options: SolveOptions) -> SolveResult:
        """Solve; see `Solver.solve`."""
        result = run_checked(_run, program, options, solver=self.name)
        if options.warm_start is None or result.x is None or result.objective is None:
            return result
        found = objective_value(program, result.x)
        if abs(result.objective - found) <= _OBJECTIVE_NOISE * max(1.0, abs(found)):
            return result
        # HiGHS 1.16 can return the starting point beside the objective of a better one that presolve saw
        left_s = max(options.time_limit_s - result.solve_s, _LEAST_S)
        again = self.solve(program, replace(options, warm_start=None, time_limit_s=left_s))
        if again.x is None:
            # the starting point is still feasible; only its stated objective and optimality were wrong
            again = replace(result, status=SolveStatus.FEASIBLE, objective=found)
        return replace(again, solve_s=result.solve_s + again.solve_s)


def highs_info() -> SolverInfo:
    """What `coral doctor` says of HiGHS."""
    return SolverInfo(name="highs", installed=True, version=metadata.version("highspy"), licensed=True, size_limit=None)


class _Quiet(highspy.Highs):
    """highspy prints its banner when it registers callbacks, before any option can be set; we need no callbacks."""

    def enableCallbacks(self) -> None:  # noqa: N802 - overrides highspy's name
        self.silent()


def _run(program: IntegerProgram, options: SolveOptions) -> SolveResult:
    # HiGHS keeps one scheduler per calling thread and refuses to run with another thread count than its first.
    highspy.Highs.resetThreadScheduler(True)  # noqa: FBT003 - highspy's signature
    highs = _Quiet()  # type: ignore[no-untyped-call]  # highspy's constructor has no annotations
    _set_options(highs, options)
    if highs.passModel(_model(program)) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS refused the program", where=program.name)
    if options.warm_start is not None and program.integer.any():
        _set_start(highs, options.warm_start)
    highs.run()
    return _result(highs, program)


def _set_options(highs: highspy.Highs, options: SolveOptions) -> None:
    tolerance = max(options.feasibility_tolerance, _MIN_TOLERANCE)
    for key, value in {
        "output_flag": False,
        "time_limit": options.time_limit_s,
        "mip_rel_gap": options.gap_frac,
        "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": tolerance,
        "primal_feasibility_tolerance": tolerance,
        "threads": options.threads,
        "random_seed": options.seed,
    }.items():
        if highs.setOptionValue(key, value) == highspy.HighsStatus.kError:
            raise SolverError(f"HiGHS refused {key} = {value}", where="solve options")


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


def _set_start(highs: highspy.Highs, start: Floats) -> None:
    known = np.flatnonzero(np.isfinite(start)).astype(np.int32)
    highs.setSolution(len(known), known, np.ascontiguousarray(start[known], dtype=np.float64))


def _result(highs: highspy.Highs, program: IntegerProgram) -> SolveResult:
    info = highs.getInfo()
    ended = highs.getModelStatus()
    if ended in _FAILED:
        raise SolverError(f"HiGHS failed: {highs.modelStatusToString(ended)}", where=program.name)
    status = _STATUS.get(ended, SolveStatus.UNKNOWN)  # the rest are limits
    is_mip = bool(program.integer.any())
    has_point = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if status is SolveStatus.UNKNOWN and has_point:
        status = SolveStatus.FEASIBLE
    bound = _bound(float(info.mip_dual_bound) if is_mip else math.nan, program)
    if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
        known = bound if status is SolveStatus.UNKNOWN and math.isfinite(bound) else None
        return SolveResult(status=status, x=None, objective=None, bound=known, solve_s=0.0, solver="highs")
    solution = highs.getSolution()
    objective = float(info.objective_function_value)
    if status is SolveStatus.OPTIMAL and not math.isfinite(bound):
        bound = objective  # a linear program, or a mixed one that presolve alone settled
    duals = not is_mip and status is SolveStatus.OPTIMAL
    return SolveResult(
        status=status,
        x=np.asarray(solution.col_value, dtype=np.float64),
        objective=objective,
        bound=bound,
        solve_s=0.0,
        solver="highs",
        row_duals=np.asarray(solution.row_dual, dtype=np.float64) if duals else None,
        reduced_costs=np.asarray(solution.col_dual, dtype=np.float64) if duals else None,
    )


def _bound(value: float, program: IntegerProgram) -> float:
    """HiGHS's dual bound, or the infinity that claims nothing."""
    return value if math.isfinite(value) else (math.inf if program.maximize else -math.inf)
