"""Which solver takes a program, and what can be said of each."""

from __future__ import annotations

from typing import Literal

from coral_core.errors import InputError, SolverError
from coral_core.solver.program import IntegerProgram, Solver, SolverInfo

Preference = Literal["auto", "gurobi", "highs"]


def choose_solver(program: IntegerProgram, preference: Preference = "auto") -> Solver:
    """The solver for a program; `auto` is Gurobi where its licence allows the size, else HiGHS.

    Raises SolverError where Gurobi is asked for and cannot take the program, InputError for an unknown preference.
    """
    if preference == "highs":
        return _highs()
    if preference not in ("auto", "gurobi"):
        raise InputError(f"unknown solver {preference!r}", where="solver", fix="one of auto, gurobi, highs")
    # Imported here: the adapters load their library's shared objects.
    from coral_core.solver.gurobi import GurobiSolver, gurobi_info  # noqa: PLC0415

    gurobi = GurobiSolver()
    if gurobi.accepts(program):
        return gurobi
    if preference == "auto":
        return _highs()
    size = f"{program.n_columns} columns, {program.n_rows} rows"
    raise SolverError(
        f"Gurobi cannot take this program ({size}): {gurobi_info().note}",
        where=program.name,
        fix="set allocation.solver to highs or auto, or install a Gurobi licence",
    )


def solver_status() -> tuple[SolverInfo, ...]:
    """Each solver: installed, version, licensed, size limit (for `coral doctor`)."""
    from coral_core.solver.gurobi import gurobi_info  # noqa: PLC0415 - see choose_solver
    from coral_core.solver.highs import highs_info  # noqa: PLC0415

    return (gurobi_info(), highs_info())


def _highs() -> Solver:
    from coral_core.solver.highs import HighsSolver  # noqa: PLC0415 - see choose_solver

    return HighsSolver()
