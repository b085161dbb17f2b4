"""What the integer program's method makes of solvers that are wrong, blind or out of time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.domain.placement import PlacementProblem, PlacementStatus
from coral_core.errors import InputError
from coral_core.placement import ilp
from coral_core.placement.ilp import IlpPlacement
from coral_core.placement.verify import verify_placement
from coral_core.solver.highs import HighsSolver
from coral_core.solver.program import SolveStatus

NOTHING = np.zeros(4)


def problem(**rows: list[float]) -> PlacementProblem:
    """Two nodes that are worth something as two stages only."""
    two = {name: np.array(row, dtype=np.float64) for name, row in rows.items()}
    return PlacementProblem(layers=4, nodes=tuple(two), capacity_tokens_per_s={1: dict.fromkeys(two, NOTHING), 2: two})


# 2 + 2 layers give 3 tokens/s, 1 + 3 give 2, 3 + 1 give 1; two layers alone would give 4.
SMALL = problem(a=[5, 3, 1, 0], b=[4, 4, 2, 0])
# The same at a millionth of what few layers give.
FAR = problem(a=[5e6, 3, 1, 0], b=[4e6, 4e6, 2, 0])


def scripted(monkeypatch, answer):
    """HiGHS, whose results `answer(program, result, confirms)` may change."""
    asked = []

    class Scripted:
        def solve(self, program, options):
            confirms = program.lower[0] == program.upper[0]
            asked.append("confirm" if confirms else "search")
            return answer(program, HighsSolver().solve(program, options), confirms)

    monkeypatch.setattr(ilp, "choose_solver", lambda _program, _preference: Scripted())
    return asked


def solved(of: PlacementProblem):
    result = IlpPlacement().solve(of)
    if result.placement is not None:
        verify_placement(of, result.placement, result.throughput_tokens_per_s)
    return result.status, result.throughput_tokens_per_s


@pytest.mark.parametrize("of", [SMALL, FAR])
def test_an_honest_solver_proves_the_best(monkeypatch, of):
    asked = scripted(monkeypatch, lambda _program, result, _confirms: result)
    assert solved(of) == (PlacementStatus.OPTIMAL, 3)
    assert "confirm" in asked


@pytest.mark.parametrize("of", [SMALL, FAR])
def test_searches_that_end_with_a_worse_placement_are_found_out(monkeypatch, of):
    def worse(program, result, confirms):
        if confirms:
            return result
        low = replace(program, upper=np.concatenate(([program.lower[0]], program.upper[1:])))
        found = HighsSolver().solve(low, ilp.SolveOptions())
        return replace(found, bound=found.objective)

    asked = scripted(monkeypatch, worse)
    assert solved(of) == (PlacementStatus.OPTIMAL, 3)
    assert asked.count("confirm") >= 2


def test_blind_searches_lower_no_bound_for_good(monkeypatch):
    blind = SolveStatus.INFEASIBLE

    def answer(_program, result, confirms):
        return result if confirms else replace(result, status=blind, x=None, objective=None, bound=None)

    scripted(monkeypatch, answer)
    # Found, but a second opinion that cannot be right proves nothing.
    assert solved(SMALL) == (PlacementStatus.UNPROVEN, 3)
    assert solved(FAR) == (PlacementStatus.UNPROVEN, 3)


def test_a_bound_far_above_all_that_is_found_proves_nothing(monkeypatch):
    def answer(_program, result, confirms):
        return result if confirms else replace(result, x=np.zeros_like(result.x), bound=1.0)

    scripted(monkeypatch, answer)
    status, throughput = solved(FAR)
    assert status is PlacementStatus.UNPROVEN
    assert 0 < throughput <= 3


@pytest.mark.parametrize("of", [SMALL, FAR])
def test_without_an_answer_to_the_confirmation_the_best_is_unproven(monkeypatch, of):
    times = []

    def answer(_program, result, confirms):
        times.append(confirms)
        if confirms and times.count(True) > 1:
            return replace(result, status=SolveStatus.UNKNOWN, x=None, objective=None, bound=None)
        return result

    scripted(monkeypatch, answer)
    assert solved(of) == (PlacementStatus.UNPROVEN, 3)


def test_a_search_out_of_time_leaves_what_it_found(monkeypatch):
    def answer(_program, result, confirms):
        return result if confirms else replace(result, status=SolveStatus.FEASIBLE)

    scripted(monkeypatch, answer)
    assert solved(SMALL) == (PlacementStatus.UNPROVEN, 3)


def test_nothing_is_asked_where_all_capacities_are_zero(monkeypatch):
    asked = scripted(monkeypatch, lambda _program, result, _confirms: result)
    assert solved(problem(a=[0, 0, 0, 0], b=[0, 0, 0, 0])) == (PlacementStatus.INFEASIBLE, 0)
    assert solved(problem(a=[1, 1, 1, 1], b=[0, 0, 0, 0])) == (PlacementStatus.INFEASIBLE, 0)
    assert len(asked) <= 2


def test_a_program_beyond_any_solver_is_refused_before_it_is_built():
    nodes = tuple(f"n{index}" for index in range(100))
    of = PlacementProblem(layers=1000, nodes=nodes, capacity_tokens_per_s={})
    with pytest.raises(
        InputError, match=r"nodes: 100 nodes and 1000 layers need 10000000 variables.*use method lattice"
    ):
        IlpPlacement().solve(of)
