"""A solver-neutral mixed integer program, and what every solver adapter answers.

Data: c (n), A (m x n, compressed sparse rows), row bounds, column bounds, integrality.
Variables: x in R^n, x_i integer where `integer[i]`.
Constraints: row_lower <= A x <= row_upper; lower <= x <= upper.
Objective: minimise or maximise c x + offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerProgram:
    """One program in sparse row form. Shapes: objective/lower/upper/integer (n,), row_* (m,), indptr (m+1,)."""

    objective: Floats
    lower: Floats
    upper: Floats
    integer: NDArray[np.bool_]
    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    values: Floats
    row_lower: Floats
    row_upper: Floats
    maximize: bool = False
    offset: float = 0.0
    name: str = "program"

    @property
    def n_columns(self) -> int:
        """Number of variables."""
        return len(self.objective)

    @property
    def n_rows(self) -> int:
        """Number of constraints."""
        return len(self.row_lower)


class SolveStatus(StrEnum):
    """How a solve ended. `feasible`: a solution without a proof (limit reached); `unknown`: neither."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNBOUNDED = "unbounded"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """Limits and tolerances. `gap_frac` is relative; `time_limit_s` is the solver's own, the only one that can stop it.

    `warm_start`: a starting point (n,), NaN where unknown; a hint for integer programs that never changes the optimum.
    """

    time_limit_s: float = 60.0
    gap_frac: float = 1e-6
    feasibility_tolerance: float = 1e-9
    threads: int = 1
    seed: int = 0
    warm_start: Floats | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveResult:
    """What a solver found. `x` is None unless status is optimal or feasible; `bound` is the proven dual bound.

    Integer variables of `x` are whole within the feasibility tolerance, not rounded. `bound` is never better than the
    true optimum (at least it where maximising, at most it where minimising), infinite where nothing is proven.
    `row_duals` and `reduced_costs` are set for continuous programs only (the sign convention of HiGHS: the change of
    the objective per unit of the row's bound).
    """

    status: SolveStatus
    x: Floats | None
    objective: float | None
    bound: float | None
    solve_s: float
    solver: str
    row_duals: Floats | None = None
    reduced_costs: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverInfo:
    """Whether a solver can be used here. `size_limit`: most columns and most rows its licence allows, None = any.

    `note` says why it cannot be used, or how far.
    """

    name: str
    installed: bool
    version: str | None
    licensed: bool
    size_limit: int | None
    note: str = ""


class Solver(Protocol):
    """An adapter of one solver library."""

    name: str

    def accepts(self, program: IntegerProgram) -> bool:
        """Whether the library is installed and its licence allows a program of this size."""
        ...

    def solve(self, program: IntegerProgram, options: SolveOptions) -> SolveResult:
        """Solve; raises SolverError where the library is missing, unlicensed or fails."""
        ...
