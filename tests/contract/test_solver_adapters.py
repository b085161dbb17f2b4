"""One contract for every solver adapter: programs with one possible answer, in every way a solve can end."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from coral_core.errors import SolverError
from coral_core.solver.builder import ProgramBuilder
from coral_core.solver.check import objective_value, violation
from coral_core.solver.gurobi import GurobiSolver, gurobi_info
from coral_core.solver.highs import HighsSolver
from coral_core.solver.program import IntegerProgram, SolveOptions, SolveResult, SolveStatus

INF = math.inf


def program(
    objective, matrix, *, row_lower=-INF, row_upper=INF, lower=0.0, upper=INF, integer=False, maximize=False, offset=0.0
) -> IntegerProgram:
    matrix = np.atleast_2d(np.asarray(matrix, dtype=float))
    builder = ProgramBuilder(maximize=maximize, offset=offset)
    columns = builder.add_columns("x", len(objective), objective=objective, lower=lower, upper=upper, integer=integer)
    m, n = matrix.shape
    rows = np.repeat(np.arange(m), n)
    builder.add_rows(
        "row", m, rows=rows, columns=np.tile(columns, m), values=matrix.ravel(), lower=row_lower, upper=row_upper
    )
    return builder.build()


def hard_knapsack(n: int = 60, m: int = 25) -> IntegerProgram:
    """Equality-tight market split: far beyond what a solver proves in the blink of an eye."""
    rng = np.random.default_rng(7)
    matrix = rng.integers(1, 100, (m, n)).astype(float)
    slack = np.hstack([matrix, np.eye(m), -np.eye(m)])
    cost = np.r_[np.zeros(n), np.ones(2 * m)]
    half = np.floor(matrix.sum(axis=1) / 2)
    upper = np.r_[np.ones(n), np.full(2 * m, 1e4)]
    integer = np.r_[np.ones(n, bool), np.zeros(2 * m, bool)]
    return program(cost, slack, row_lower=half, row_upper=half, upper=upper, integer=integer)


@pytest.fixture(params=["highs", "gurobi"])
def solver(request):
    if request.param == "gurobi":
        if not gurobi_info().licensed:
            pytest.skip(f"Gurobi cannot be used here: {gurobi_info().note}")
        return GurobiSolver()
    return HighsSolver()


def solve(solver, prog, **options):
    result = solver.solve(prog, SolveOptions(**options))
    assert result.solver == solver.name
    assert result.solve_s >= 0
    if result.x is None:
        assert result.objective is None
        assert result.status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE)
    else:
        assert violation(prog, result.x) <= 1e-6
        assert result.objective == pytest.approx(objective_value(prog, result.x), rel=1e-7, abs=1e-7)
        sign = 1 if prog.maximize else -1
        assert sign * (result.bound - result.objective) >= -1e-7 * max(1, abs(result.objective))
    return result


def test_accepts_a_small_program(solver):
    assert solver.accepts(program([1], [[1]]))


def test_linear_minimum_with_duals(solver):
    # min 2x + 3y, x + y >= 4, x <= 3: x=3, y=1.
    result = solve(solver, program([2, 3], [[1, 1], [1, 0]], row_lower=[4, -INF], row_upper=[INF, 3]))
    assert result.status is SolveStatus.OPTIMAL
    assert result.objective == pytest.approx(9)
    assert result.bound == pytest.approx(9)
    np.testing.assert_allclose(result.x, [3, 1], atol=1e-8)
    np.testing.assert_allclose(result.row_duals, [3, -1], atol=1e-8)  # one more demanded costs 3, one more x saves 1
    np.testing.assert_allclose(result.reduced_costs, [0, 0], atol=1e-8)


def test_linear_maximum_with_duals_in_the_same_sense(solver):
    # max 3x + 2y, x + 2y <= 3: x=3; y would lose 4 a unit.
    result = solve(solver, program([3, 2], [[1, 2]], row_upper=[3], maximize=True))
    np.testing.assert_allclose(result.x, [3, 0], atol=1e-8)
    np.testing.assert_allclose(result.row_duals, [3], atol=1e-8)
    np.testing.assert_allclose(result.reduced_costs, [0, -4], atol=1e-8)


@pytest.mark.parametrize(("cost", "x", "dual"), [([1], 2, 1), ([-1], 5, -1)])
def test_a_row_bounded_on_both_sides(solver, cost, x, dual):
    result = solve(solver, program(cost, [[1]], row_lower=[2], row_upper=[5]))
    np.testing.assert_allclose(result.x, [x], atol=1e-8)
    np.testing.assert_allclose(result.row_duals, [dual], atol=1e-8)


def test_equality_and_free_rows_and_negative_lower_bounds(solver):
    prog = program([1, 1], [[1, -1], [1, 1]], row_lower=[3, -INF], row_upper=[3, INF], lower=[-5, -7])
    result = solve(solver, prog)
    np.testing.assert_allclose(result.x, [-4, -7], atol=1e-8)
    assert result.row_duals[1] == 0


def test_free_variables(solver):
    result = solve(solver, program([1], [[1]], row_lower=[-8], lower=-INF))
    assert result.objective == pytest.approx(-8)


def test_duals_are_the_change_of_the_objective_per_unit(solver):
    prog = program([4, 3, 5], [[1, 2, 1], [3, 1, 1]], row_lower=[5, 4])
    base = solve(solver, prog)
    for row in range(2):
        moved = prog.row_lower.copy()
        moved[row] += 1e-3
        change = solve(solver, replace(prog, row_lower=moved)).objective - base.objective
        assert base.row_duals[row] == pytest.approx(change / 1e-3, rel=1e-5)


def test_integer_program_has_the_integer_optimum_and_no_duals(solver):
    prog = program([5, 4], [[6, 4], [1, 2]], row_upper=[24, 6], integer=True, maximize=True)
    result = solve(solver, prog)
    assert result.status is SolveStatus.OPTIMAL
    np.testing.assert_allclose(result.x, [4, 0], atol=1e-6)
    assert result.bound == pytest.approx(20)
    assert result.row_duals is None
    assert result.reduced_costs is None


def test_mixed_program(solver):
    prog = program([-1, -1], [[2, 2]], row_upper=[5], integer=[True, False], upper=[INF, 0.25])
    np.testing.assert_allclose(solve(solver, prog).x, [2, 0.25], atol=1e-6)


def test_small_knapsacks_equal_enumeration(solver):
    rng = np.random.default_rng(3)
    for _ in range(10):
        weight, value = rng.integers(1, 20, 8), rng.integers(1, 20, 8)
        room = int(weight.sum() // 2)
        best = max(
            int(np.dot(value, pick)) for pick in itertools.product((0, 1), repeat=8) if np.dot(weight, pick) <= room
        )
        result = solve(solver, program(value, [weight], row_upper=[room], upper=1, integer=True, maximize=True))
        assert result.objective == pytest.approx(best)


def test_the_offset_counts_in_objective_and_bound(solver):
    for integer in (False, True):
        result = solve(solver, program([1], [[1]], row_lower=[2], integer=integer, offset=10))
        assert result.objective == pytest.approx(12)
        assert result.bound == pytest.approx(12)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_infeasible_is_told_from_unbounded(solver, integer, maximize):
    sign = -1 if maximize else 1
    # x - y = 1 and x - y = 2, unbounded objective direction.
    prog = program(
        [-sign, 0],
        [[1, -1], [1, -1]],
        row_lower=[1, 2],
        row_upper=[1, 2],
        integer=integer,
        maximize=maximize,
    )
    assert solve(solver, prog).status is SolveStatus.INFEASIBLE
    free = replace(prog, row_lower=np.array([1.0, 1.0]), row_upper=np.array([1.0, 1.0]))
    assert solve(solver, free).status is SolveStatus.UNBOUNDED


def test_an_unbounded_relaxation_of_an_infeasible_integer_program_is_infeasible(solver):
    # 2x - 2y = 1 has no whole solution, its relaxation runs away.
    prog = program([-1, 0], [[2, -2]], row_lower=[1], row_upper=[1], integer=True)
    assert solve(solver, prog).status is SolveStatus.INFEASIBLE


def test_crossed_bounds_are_infeasible(solver):
    for integer in (False, True):
        assert solve(solver, program([1], [[1]], lower=2, upper=1, integer=integer)).status is SolveStatus.INFEASIBLE


def test_no_rows_and_no_columns(solver):
    builder = ProgramBuilder()
    builder.add_columns("x", 2, objective=[1, -1], lower=-1, upper=3)
    assert solve(solver, builder.build()).objective == pytest.approx(-4)
    empty = ProgramBuilder(offset=2)
    assert solve(solver, empty.build()).objective == 2
    empty.add_rows("never", 1, lower=1)
    assert solve(solver, empty.build()).status is SolveStatus.INFEASIBLE


def test_a_time_limit_ends_the_solve_and_claims_no_proof(solver):
    result = solve(solver, hard_knapsack(), time_limit_s=0.5, gap_frac=0.0)
    assert result.solve_s < 10
    assert result.status in (SolveStatus.FEASIBLE, SolveStatus.UNKNOWN)
    if result.bound is not None and result.objective is not None:
        assert result.bound < result.objective


def test_no_time_at_all_is_unknown_or_better(solver):
    assert solve(solver, hard_knapsack(), time_limit_s=0.0).status in (SolveStatus.FEASIBLE, SolveStatus.UNKNOWN)


@pytest.mark.parametrize(
    "start", [[4.0, 0.0], [math.nan, 0.0], [0.0, 0.0], [1000.0, 1000.0], [math.nan, math.nan], [3.5, 0.5]]
)
def test_a_warm_start_never_changes_the_optimum(solver, start):
    prog = program([5, 4], [[6, 4], [1, 2]], row_upper=[24, 6], integer=True, maximize=True)
    assert solve(solver, prog, warm_start=np.array(start)).objective == pytest.approx(20)
    relaxed = replace(prog, integer=np.zeros(2, dtype=bool))
    assert solve(solver, relaxed, warm_start=np.array(start)).objective == pytest.approx(21)


def test_a_good_warm_start_survives_a_time_limit(solver):
    prog = hard_knapsack()
    good = solve(solver, prog, time_limit_s=1.0, gap_frac=0.0)
    if good.x is None:
        pytest.skip("no point found in a second on this machine")
    again = solve(solver, prog, time_limit_s=0.2, gap_frac=0.0, warm_start=good.x)
    assert again.objective <= good.objective + 1e-6


def test_thread_counts_may_change_between_solves(solver):
    prog = program([5, 4], [[6, 4], [1, 2]], row_upper=[24, 6], integer=True, maximize=True)
    for threads in (1, 2, 1):
        assert solve(solver, prog, threads=threads).objective == pytest.approx(20)


def test_nothing_is_printed_even_at_file_descriptor_level(solver, capfd):
    solve(solver, program([5, 4], [[6, 4], [1, 2]], row_upper=[24, 6], integer=True, maximize=True))
    solve(solver, program([1], [[1]], row_lower=[1]))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_the_first_solve_of_a_process_prints_nothing(solver):
    """Both libraries have a banner that they print once per process."""
    code = (
        f"from {type(solver).__module__} import {type(solver).__name__} as Solver\n"
        "from coral_core.solver.builder import ProgramBuilder\n"
        "from coral_core.solver.program import SolveOptions\n"
        "builder = ProgramBuilder()\n"
        "builder.add_columns('x', 3, objective=1, lower=0.5, integer=True)\n"
        "assert Solver().solve(builder.build(), SolveOptions()).objective == 3\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("objective", [math.nan, 1.0]),
        ("objective", [math.inf, 1.0]),
        ("values", [1.0, math.nan]),
        ("lower", [math.nan, 0.0]),
        ("lower", [math.inf, 0.0]),
        ("upper", [-math.inf, 0.0]),
        ("row_upper", [math.nan]),
        ("upper", [1.0]),
    ],
)
def test_a_malformed_program_is_refused_by_name(solver, field, value):
    prog = replace(program([1, 1], [[1, 1]]), **{field: np.array(value)})
    with pytest.raises(SolverError, match=field):
        solver.solve(prog, SolveOptions())


@pytest.mark.parametrize(
    "broken",
    [
        {"indices": np.array([0, 2], dtype=np.int32)},
        {"indices": np.array([0], dtype=np.int32)},
        {"indptr": np.array([1, 2], dtype=np.int32)},
        {"indptr": np.array([0, 2, 1, 2], dtype=np.int32), "row_lower": np.zeros(3), "row_upper": np.ones(3)},
    ],
)
def test_broken_sparse_rows_are_refused(solver, broken):
    with pytest.raises(SolverError, match="malformed"):
        solver.solve(replace(program([1, 1], [[1, 1]]), **broken), SolveOptions())


def test_a_warm_start_of_the_wrong_length_is_refused(solver):
    with pytest.raises(SolverError, match="warm start"):
        solver.solve(program([1, 1], [[1, 1]]), SolveOptions(warm_start=np.zeros(3)))


@pytest.mark.parametrize("again", [SolveStatus.OPTIMAL, SolveStatus.UNKNOWN])
def test_a_starting_point_beside_another_objective_is_not_believed(monkeypatch, again):
    """As HiGHS 1.16 does with some starting points: solved again without it, or claimed as no more than it is."""
    builder = ProgramBuilder()
    x = builder.add_columns("x", 1, objective=1.0, upper=9, integer=True)
    builder.add_rows("least", 1, rows=[0], columns=x, lower=2.5)
    program, starts = builder.build(), []

    def mix_up(program, options):
        starts.append(options.warm_start)
        if options.warm_start is None:
            found = again is SolveStatus.OPTIMAL
            x, value = (np.array([3.0]), 3.0) if found else (None, None)
            return SolveResult(status=again, x=x, objective=value, bound=value, solve_s=0.0, solver="highs")
        start = options.warm_start
        return SolveResult(status=SolveStatus.OPTIMAL, x=start, objective=3.0, bound=3.0, solve_s=0.0, solver="highs")

    monkeypatch.setattr("coral_core.solver.highs._run", mix_up)
    result = HighsSolver().solve(program, SolveOptions(warm_start=np.array([9.0])))
    assert [start is None for start in starts] == [False, True]
    assert result.objective == objective_value(program, result.x)
    assert (result.status, result.objective) == (
        (SolveStatus.OPTIMAL, 3.0) if again is SolveStatus.OPTIMAL else (SolveStatus.FEASIBLE, 9.0)
    )
    assert result.bound == 3.0
