"""The free latency split against brute force: nodes to stages, cuts of the layers, cuts of the SLO."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.domain.placement import PlacementStatus
from coral_core.placement.free import FreePlacement
from coral_core.placement.free_verify import verify_free_placement
from coral_core.placement.lattice import LatticePlacement
from coral_core.placement.problem import problem_arrays
from tests.fakes.free_cases import free_problem


def brute_force(problem):
    """The best throughput by definition: any budgets of the grid within the SLO, or equal shares."""
    layers, nodes = problem.layers, problem.nodes
    by_node = np.array([problem.budget_capacity_tokens_per_s[node] for node in nodes])
    grid = by_node.shape[1]
    best = float(sum(problem.capacity_tokens_per_s[1][node][layers - 1] for node in nodes))
    for n_stages in range(2, min(len(nodes), layers) + 1):
        stages = np.arange(n_stages)
        published = np.array([problem.capacity_tokens_per_s[n_stages][node] for node in nodes])
        cuts = np.array([np.diff((0, *cut, layers)) for cut in itertools.combinations(range(1, layers), n_stages - 1)])
        ends = itertools.combinations(range(1, grid + 1), n_stages)
        shares = np.array([np.diff((0, *end)) for end in ends], dtype=int).reshape(-1, n_stages)
        for stage_of in itertools.product(range(n_stages), repeat=len(nodes)):
            if len(set(stage_of)) < n_stages:
                continue
            members = [np.array(stage_of) == stage for stage in range(n_stages)]
            equal = np.array([published[m].sum(axis=0) for m in members])
            best = max(best, float(equal[stages, cuts - 1].min(axis=1).max()))
            free = np.array([by_node[m].sum(axis=0) for m in members])
            values = free[stages, shares[:, None] - 1, cuts[None] - 1].min(axis=2)
            best = max(best, float(values.max(initial=0.0)))
    return best


@st.composite
def problems(draw, max_nodes=4, max_layers=6):
    return free_problem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        n=draw(st.integers(1, max_nodes)),
        n_configs=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, max_layers)),
        grid=draw(st.sampled_from([1, 2, 3, 4, 6, 7])),
        ties=draw(st.booleans()),
    )


def check(problem):
    expected = brute_force(problem)
    result = FreePlacement().solve(problem)
    assert result.throughput_tokens_per_s == pytest.approx(expected, rel=1e-12)
    assert result.throughput_tokens_per_s >= LatticePlacement().solve(problem).throughput_tokens_per_s
    if expected > 0:
        assert result.status is PlacementStatus.OPTIMAL
        verify_free_placement(problem, result.placement, result.throughput_tokens_per_s)
    else:
        assert result.status is PlacementStatus.INFEASIBLE
        assert result.placement is None
    return result


@settings(max_examples=150, deadline=None)
@given(problems())
def test_free_split_is_brute_force(problem):
    assert check(problem).method == "lattice-free"


def test_free_split_is_brute_force_on_larger_seeded_cases():
    rng = np.random.default_rng(3)
    better = 0
    for case in range(25):
        layers = int(rng.integers(2, 8))
        problem = free_problem(rng, n=5, n_configs=5, layers=layers, grid=6, ties=case % 2 == 0)
        result = check(problem)
        better += result.throughput_tokens_per_s > LatticePlacement().solve(problem).throughput_tokens_per_s
    assert better > 5  # the cases do tell the two splits apart


@settings(max_examples=30, deadline=None)
@given(problems(max_nodes=3, max_layers=5), st.data())
def test_more_capacity_never_gives_less(problem, data):
    factor = data.draw(st.floats(1, 3))
    name = data.draw(st.sampled_from(sorted(set(problem.nodes))))
    budgets = {k: v * factor if k == name else v for k, v in problem.budget_capacity_tokens_per_s.items()}
    published = {
        s: {k: v * factor if k == name else v for k, v in rows.items()}
        for s, rows in problem.capacity_tokens_per_s.items()
    }
    richer = replace(problem, capacity_tokens_per_s=published, budget_capacity_tokens_per_s=budgets)
    before, after = (FreePlacement().solve(p).throughput_tokens_per_s for p in (problem, richer))
    assert after >= before


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_free_split_is_brute_force_at_length():
    rng = np.random.default_rng(29)
    for case in range(4000):
        n = int(rng.integers(1, 7))
        grid = int(rng.choice([2, 4, 6, 8, 12])) if n < 5 else 6
        layers = int(rng.integers(1, 8))
        check(free_problem(rng, n=n, n_configs=5, layers=layers, grid=grid, ties=case % 2 == 0))


def reaches(problem, throughput):
    """Whether the recursion over budgets says that at least two stages reach `throughput`."""
    from coral_core.placement import free_kernel as kernel

    types, counts, _ = problem_arrays(problem)
    budgets = np.stack([problem.budget_capacity_tokens_per_s[name] for name in types])
    codes, runs, grid = int((counts + 1).prod()), len(types), budgets.shape[1]
    digits, place = np.zeros((codes, runs), dtype=np.int16), np.zeros(runs, dtype=np.int64)
    whole = kernel.fill_digits(counts, runs, digits, place)
    numbers, firsts = np.zeros((2, codes, grid), dtype=np.float32), np.zeros((2, codes), dtype=np.int64)
    work = (numbers[0], firsts[0], numbers[1], firsts[1])
    stage = (np.zeros(runs, dtype=np.int16), np.zeros(runs))
    order = np.arange(runs, dtype=np.int16)
    stages = np.zeros(min(len(problem.nodes), problem.layers), dtype=np.int64)
    return kernel.find_partition(budgets, throughput, order, digits, place, runs, whole, work, stage, stages) > 0


@settings(max_examples=40, deadline=None)
@given(problems(max_nodes=4, max_layers=5))
def test_a_throughput_is_reached_exactly_up_to_the_optimum_of_the_grid(problem):
    grid = problem.budget_capacity_tokens_per_s[problem.nodes[0]].shape[0]
    if grid == 1 or len(problem.nodes) == 1 or problem.layers == 1:
        return
    # Only pipelines on the grid: no single stage, no equal shares off the grid.
    none = {s: dict.fromkeys(rows, np.zeros(problem.layers)) for s, rows in problem.capacity_tokens_per_s.items()}
    best = brute_force(replace(problem, capacity_tokens_per_s=none))
    for factor in (0.3, 0.9, 1.0):
        assert reaches(problem, factor * best) or best == 0
    for factor in (1 + 1e-9, 1.5):
        assert not reaches(problem, max(factor * best, 1e-9))
