"""The free latency split against brute force: nodes to stages, cuts of the layers, cuts of the SLO."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.domain.placement import PlacementProblem, PlacementStatus
from coral_core.placement.free import FreePlacement
from coral_core.placement.free_verify import verify_free_placement
from coral_core.placement.lattice import LatticePlacement


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


def monotone(values):
    """Non-decreasing in the budget, non-increasing in the layers."""
    return np.maximum.accumulate(np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1], axis=0)


def problem_from(rng, nodes, layers, grid, *, ties=False):
    """Capacities over budgets that tend to grow in them; the published ones agree wherever S divides the grid."""
    budgets, published = {}, {s: {} for s in range(1, len(nodes) + 1)}
    for name in sorted(set(nodes)):
        shape = (grid, layers)
        noise = rng.integers(0, 4, shape) if ties else rng.random(shape) * 10
        trend = rng.integers(0, 3) * np.arange(grid)[:, None] / grid * 5 + rng.integers(0, 3) * 5 / np.arange(
            1, layers + 1
        )
        table = monotone(np.rint(noise + trend) if ties else noise + trend)
        reach = np.sort(rng.integers(0, layers + 1, grid))  # how many layers fit at all, by budget
        table[np.arange(layers) >= reach[:, None]] = 0
        budgets[name] = table.astype(float)
        for s, rows in published.items():
            fresh = np.sort(rng.integers(0, 4, layers) if ties else rng.random(layers) * 12)[::-1]
            rows[name] = table[grid // s - 1] if s > 1 and grid % s == 0 else fresh.astype(float)
    return PlacementProblem(
        layers=layers, nodes=tuple(nodes), capacity_tokens_per_s=published, budget_capacity_tokens_per_s=budgets
    )


@st.composite
def problems(draw, max_nodes=4, max_layers=6):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=max_nodes))
    grid = draw(st.sampled_from([1, 2, 3, 4, 6, 7]))
    return problem_from(rng, nodes, draw(st.integers(1, max_layers)), grid, ties=draw(st.booleans()))


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
        problem = problem_from(rng, rng.choice(list("abcde"), 5), int(rng.integers(2, 8)), 6, ties=case % 2 == 0)
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
    richer = PlacementProblem(
        layers=problem.layers,
        nodes=problem.nodes,
        capacity_tokens_per_s=published,
        budget_capacity_tokens_per_s=budgets,
    )
    before, after = (FreePlacement().solve(p).throughput_tokens_per_s for p in (problem, richer))
    assert after >= before


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_free_split_is_brute_force_at_length():
    rng = np.random.default_rng(29)
    for case in range(1500):
        nodes = rng.choice(list("abcdef"), int(rng.integers(1, 7)))
        grid = int(rng.choice([2, 4, 6, 8, 12])) if len(nodes) < 5 else 6
        check(problem_from(rng, nodes, int(rng.integers(1, 8)), grid, ties=case % 2 == 0))
