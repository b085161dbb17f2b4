"""Gurobi adapter (gurobipy, imported on first use): fast, but licensed.

The licence that comes with the package allows 2,000 variables and 2,000 constraints; installed is not licensed.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import metadata
from typing import Any, Final

import numpy as np

from coral_core.errors import SolverError
from coral_core.solver.program import (
    Floats,
    IntegerProgram,
    SolveOptions,
    SolveResult,
    SolverInfo,
    SolveStatus,
)
from coral_core.solver.run import run_checked

RESTRICTED_SIZE: Final = 2_000
"""Most variables, and most linear constraints, of Gurobi's restricted licence (gurobi.com, "restricted license")."""

_TOO_LARGE = 10010  # GRB.Error.SIZE_LIMIT_EXCEEDED
_MIN_TOLERANCE = 1e-9  # the smallest that Gurobi accepts
_FIX = "use HiGHS, or install a Gurobi licence (GRB_LICENSE_FILE)"


class GurobiSolver:
    """Mixed integer and linear programs on Gurobi."""

    name = "gurobi"

    def accepts(self, program: IntegerProgram) -> bool:
        """Whether gurobipy is installed and its licence allows this size."""
        info = gurobi_info()
        if not info.licensed:
            return False
        return info.size_limit is None or max(program.n_columns, _n_constraints(program)) <= info.size_limit

    def solve(self, program: IntegerProgram, options: SolveOptions) -> SolveResult:
        """Solve; see `Solver.solve`."""
        return run_checked(_run, program, options, solver=self.name)


def gurobi_info() -> SolverInfo:
    """What `coral doctor` says of Gurobi; the licence is tried, not guessed."""
    try:
        version = metadata.version("gurobipy")
    except metadata.PackageNotFoundError:
        note = "gurobipy is not installed (extra `gurobi`)"
        return SolverInfo(name="gurobi", installed=False, version=None, licensed=False, size_limit=None, note=note)
    try:
        limit = _licensed_size()
    except SolverError as error:
        return SolverInfo(
            name="gurobi", installed=True, version=version, licensed=False, size_limit=None, note=error.what
        )
    note = "" if limit is None else f"restricted licence: at most {limit} variables and {limit} constraints"
    return SolverInfo(name="gurobi", installed=True, version=version, licensed=True, size_limit=limit, note=note)


@cache  # a failure is an exception and so is tried again
def _licensed_size() -> int | None:
    """The size that the licence allows, None = any: a program one variable above the restricted size is tried."""
    gp = _gurobipy()
    try:
        with _environment(gp) as env, gp.Model(env=env) as model:
            model.addMVar(RESTRICTED_SIZE + 1)
            model.optimize()
    except gp.GurobiError as error:
        if error.errno == _TOO_LARGE:
            return RESTRICTED_SIZE
        raise _failed(error, where="gurobi") from error
    return None


def _gurobipy() -> Any:  # noqa: ANN401 - gurobipy is optional, its types are not at hand
    try:
        import gurobipy  # noqa: PLC0415 - heavy and optional
    except ImportError as error:
        raise SolverError("gurobipy is not installed", where="gurobi", fix="install the extra `gurobi`") from error
    return gurobipy


def _environment(gp: Any) -> Any:  # noqa: ANN401 - see _gurobipy
    return gp.Env(params={"OutputFlag": 0, "LogToConsole": 0})


def _run(program: IntegerProgram, options: SolveOptions) -> SolveResult:
    gp = _gurobipy()
    try:
        with _environment(gp) as env, gp.Model(env=env) as model:
            _set_options(model, options)
            rows = _fill(gp, model, program, options)
            model.optimize()
            return _result(gp, model, program, rows)
    except gp.GurobiError as error:
        where = f"{program.name} ({program.n_columns} columns, {program.n_rows} rows)"
        raise _failed(error, where=where) from error


def _failed(error: Exception, *, where: str) -> SolverError:
    return SolverError(f"Gurobi failed: {error}", where=where, fix=_FIX)


def _set_options(model: Any, options: SolveOptions) -> None:  # noqa: ANN401 - see _gurobipy
    tolerance = max(options.feasibility_tolerance, _MIN_TOLERANCE)
    for key, value in {
        "TimeLimit": options.time_limit_s,
        "MIPGap": options.gap_frac,
        "MIPGapAbs": 0.0,
        "FeasibilityTol": tolerance,
        "IntFeasTol": tolerance,
        "Threads": options.threads,
        "Seed": options.seed,
    }.items():
        model.setParam(key, value)


def _fill(gp: Any, model: Any, program: IntegerProgram, options: SolveOptions) -> list[tuple[int, Any]]:  # noqa: ANN401 - see _gurobipy
    """Add variables and constraints; returns (row, constraint) pairs, two for a row bounded on both sides.

    Gurobi's own ranges would add a variable each, and its matrix rows need scipy.
    """
    kinds = np.where(program.integer, gp.GRB.INTEGER, gp.GRB.CONTINUOUS)
    x = model.addMVar(
        program.n_columns, lb=program.lower, ub=program.upper, obj=program.objective, vtype=kinds
    ).tolist()
    model.ModelSense = gp.GRB.MAXIMIZE if program.maximize else gp.GRB.MINIMIZE
    model.ObjCon = program.offset
    if options.warm_start is not None:
        for variable, value in zip(x, options.warm_start.tolist(), strict=True):
            if math.isfinite(value):
                variable.Start = value
    constraints = []
    columns, values = program.indices.tolist(), program.values.tolist()
    bounds = zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)
    for row, (lower, upper) in enumerate(bounds):
        start, end = int(program.indptr[row]), int(program.indptr[row + 1])
        terms = gp.LinExpr(values[start:end], [x[column] for column in columns[start:end]])
        constraints += [(row, model.addLConstr(terms, sense, bound)) for sense, bound in _sides(gp, lower, upper)]
    return constraints


def _sides(gp: Any, lower: float, upper: float) -> list[tuple[str, float]]:  # noqa: ANN401 - see _gurobipy
    if lower == upper:
        return [(gp.GRB.EQUAL, lower)]
    sides = [(gp.GRB.GREATER_EQUAL, lower), (gp.GRB.LESS_EQUAL, upper)]
    return [(sense, bound) for sense, bound in sides if math.isfinite(bound)]


def _n_constraints(program: IntegerProgram) -> int:
    """Constraints that `_fill` makes of the program's rows."""
    equal = program.row_lower == program.row_upper
    sides = np.isfinite(program.row_lower).astype(int) + np.isfinite(program.row_upper)
    return int(np.where(equal, 1, sides).sum())


def _result(gp: Any, model: Any, program: IntegerProgram, rows: list[tuple[int, Any]]) -> SolveResult:  # noqa: ANN401 - see _gurobipy
    proven = {
        gp.GRB.OPTIMAL: SolveStatus.OPTIMAL,
        gp.GRB.INFEASIBLE: SolveStatus.INFEASIBLE,
        gp.GRB.UNBOUNDED: SolveStatus.UNBOUNDED,
        gp.GRB.INF_OR_UNBD: SolveStatus.UNBOUNDED,
    }
    status = proven.get(model.Status, SolveStatus.FEASIBLE if model.SolCount else SolveStatus.UNKNOWN)
    bound = _bound(model, program, status)
    if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
        known = bound if status is SolveStatus.UNKNOWN and math.isfinite(bound) else None
        return SolveResult(status=status, x=None, objective=None, bound=known, solve_s=0.0, solver="gurobi")
    row_duals = reduced_costs = None
    if not model.IsMIP and status is SolveStatus.OPTIMAL:
        row_duals = np.zeros(program.n_rows)
        np.add.at(row_duals, [row for row, _ in rows], [constraint.Pi for _, constraint in rows])
        reduced_costs = np.asarray(model.getAttr("RC", model.getVars()), dtype=np.float64)
    return SolveResult(
        status=status,
        x=_values(model),
        objective=float(model.ObjVal),
        bound=bound,
        solve_s=0.0,
        solver="gurobi",
        row_duals=row_duals,
        reduced_costs=reduced_costs,
    )


def _values(model: Any) -> Floats:  # noqa: ANN401 - see _gurobipy
    return np.asarray(model.getAttr("X", model.getVars()), dtype=np.float64)


def _bound(model: Any, program: IntegerProgram, status: SolveStatus) -> float:  # noqa: ANN401 - see _gurobipy
    if model.IsMIP and abs(model.ObjBound) < 1e100:  # 1e100: GRB.INFINITY
        return float(model.ObjBound)
    if not model.IsMIP and status is SolveStatus.OPTIMAL:
        return float(model.ObjVal)
    return math.inf if program.maximize else -math.inf
