"""Independent checks of a program before a solver sees it, and of a solution after."""

from __future__ import annotations

import numpy as np

from coral_core.errors import SolverError
from coral_core.solver.program import Floats, IntegerProgram


def check_program(program: IntegerProgram) -> None:
    """Guarantee that shapes agree and that every number is one a solver may take.

    Raises SolverError naming the field: solvers answer such input with anything from a crash to a wrong optimum.
    """
    n, m = program.n_columns, program.n_rows
    expected = {"lower": n, "upper": n, "integer": n, "row_upper": m, "indptr": m + 1}
    for name, length in expected.items():
        if len(getattr(program, name)) != length:
            raise _malformed(program, f"{name} has {len(getattr(program, name))} entries, not {length}")
    if len(program.values) != len(program.indices) or program.indptr[-1] != len(program.indices):
        raise _malformed(program, "indptr, indices and values disagree on the number of terms")
    if program.indptr[0] != 0 or (np.diff(program.indptr) < 0).any():
        raise _malformed(program, "indptr must start at 0 and never decrease")
    if len(program.indices) and not 0 <= program.indices.min() <= program.indices.max() < n:
        raise _malformed(program, f"indices must lie in 0..{n - 1}")
    for name in ("objective", "values"):
        if not np.isfinite(getattr(program, name)).all():
            raise _malformed(program, f"{name} holds a number that is not finite")
    for low, high in (("lower", "upper"), ("row_lower", "row_upper")):
        lower, upper = getattr(program, low), getattr(program, high)
        if np.isnan(lower).any() or np.isnan(upper).any() or (lower == np.inf).any() or (upper == -np.inf).any():
            raise _malformed(program, f"{low} or {high} holds NaN or an infinity of the wrong sign")


def activity(program: IntegerProgram, x: Floats) -> Floats:
    """A x, shape (m,)."""
    row = np.repeat(np.arange(program.n_rows), np.diff(program.indptr))
    sums = np.bincount(row, weights=program.values * x[program.indices], minlength=program.n_rows)
    return sums.astype(np.float64, copy=False)


def objective_value(program: IntegerProgram, x: Floats) -> float:
    """The objective at `x`, offset included."""
    return float(program.objective @ x) + program.offset


def violation(program: IntegerProgram, x: Floats) -> float:
    """The largest violation of any bound, row (relative to its size) or integrality at `x`; 0 where it satisfies all."""
    rows = activity(program, x)
    parts = [
        program.lower - x,
        x - program.upper,
        _relative(program.row_lower, program.row_lower - rows),
        _relative(program.row_upper, rows - program.row_upper),
        np.abs(x - np.round(x))[program.integer],
    ]
    return max(0.0, *(float(part.max(initial=0.0)) for part in parts))


def _relative(bound: Floats, excess: Floats) -> Floats:
    return excess / np.maximum(1.0, np.abs(np.where(np.isfinite(bound), bound, 0.0)))


def _malformed(program: IntegerProgram, what: str) -> SolverError:
    return SolverError(f"malformed program: {what}", where=program.name)
