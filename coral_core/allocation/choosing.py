"""The solver of an allocation: for each program the one its size, the wish and the licences allow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from coral_core.solver.choose import Preference, choose_solver
from coral_core.solver.program import IntegerProgram, SolveOptions, SolveResult


def solver_for(preference: str) -> Choosing:
    """A solver that picks, for each program, the one that `preference` (checked before) allows."""
    return Choosing(preference=cast("Preference", preference))


@dataclass(slots=True, kw_only=True)
class Choosing:
    """Picks a solver for each program by size and licence; `used` collects their names for the record."""

    preference: Preference
    name: str = "auto"
    used: set[str] = field(default_factory=set)

    def accepts(self, program: IntegerProgram) -> bool:
        """Whether the one it would pick takes the program."""
        return choose_solver(program, self.preference).accepts(program)

    def solve(self, program: IntegerProgram, options: SolveOptions) -> SolveResult:
        """As the picked one solves it."""
        solver = choose_solver(program, self.preference)
        self.used.add(solver.name)
        return solver.solve(program, options)
