"""Baseline `helix` against enumeration of every placement, each valued by its smallest cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation.baselines.helix import helix
from coral_core.allocation.baselines.helix_flow import max_flow, verify_pool_plan
from coral_core.allocation.baselines.helix_start import flow_bound, improved_cover, least_cover, weakest_span
from coral_core.domain.pool import PoolNode, PoolPlacement, PoolProblem
from coral_core.solver.highs import HighsSolver


def smallest_cut(problem, start, end):
    """By max-flow min-cut: every way to put node entries (a) and exits (b) on the source's side or the sink's."""
    n = len(problem.nodes)
    best = np.inf
    for sides in itertools.product((True, False), repeat=2 * n):
        a, b = sides[:n], sides[n:]  # True: with the source
        cut = 0.0
        for i in range(n):
            if a[i] and not b[i]:
                cut += problem.nodes[i].requests_per_s[end[i] - start[i] - 1]
            if start[i] == 0 and not a[i]:
                cut += problem.source_requests_per_s[i]
            if end[i] == problem.layers and b[i]:
                cut += problem.sink_requests_per_s[i]
            for j in range(n):
                continues = start[j] <= end[i] < end[j] if problem.partial else start[j] == end[i]
                if i != j and continues and b[i] and not a[j]:
                    cut += problem.link_requests_per_s[i, j]
        best = min(best, cut)
    return best


def placements(problem):
    runs = [
        [(s, s + k) for k in range(1, len(node.requests_per_s) + 1) for s in range(problem.layers - k + 1)]
        for node in problem.nodes
    ]
    for chosen in itertools.product(*runs):
        yield tuple(s for s, _ in chosen), tuple(e for _, e in chosen)


@st.composite
def pools(draw, most_nodes=3, most_layers=4, bounded=True):
    n, layers = draw(st.integers(1, most_nodes)), draw(st.integers(1, most_layers))
    nodes = []
    for _ in range(n):
        work, held = draw(st.integers(1, 12)), draw(st.integers(1, min(3, layers)))
        nodes.append(PoolNode(config="c", requests_per_s=tuple(work / k for k in range(1, held + 1))))
    bounds = st.sampled_from([0.0, 1.0, 2.5, 100.0]) if bounded else st.just(np.inf)
    numbers = lambda size: np.array([draw(bounds) for _ in range(size)])  # noqa: E731 - short and local
    return PoolProblem(
        model="m",
        layers=layers,
        nodes=tuple(nodes),
        link_requests_per_s=numbers(n * n).reshape(n, n),
        source_requests_per_s=numbers(n),
        sink_requests_per_s=numbers(n),
        partial=draw(st.booleans()) if bounded else True,
    )


@given(pool=pools(most_nodes=4, most_layers=5), data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_largest_flow_is_the_smallest_cut(pool, data):
    runs = data.draw(
        st.tuples(
            *(
                st.integers(1, len(node.requests_per_s)).flatmap(
                    lambda k: st.integers(0, pool.layers - k).map(lambda s, k=k: (s, s + k))
                )
                for node in pool.nodes
            )
        )
    )
    start, end = tuple(s for s, _ in runs), tuple(e for _, e in runs)
    total, flow = max_flow(pool, PoolPlacement(start=start, end=end))
    assert total == pytest.approx(smallest_cut(pool, start, end), abs=1e-6)
    assert all(amount > 0 for amount in flow.values())


@given(pool=pools())
@settings(max_examples=40, deadline=None)
def test_the_program_finds_the_best_of_all_placements(pool):
    plan = helix(pool, degree=9, early_stop_frac=1.0, time_limit_s=600, search_rounds=1, solver=HighsSolver())
    verify_pool_plan(pool, plan)
    best = max(smallest_cut(pool, start, end) for start, end in placements(pool))
    assert plan.total_requests_per_s == pytest.approx(best, abs=1e-5)
    assert plan.bound_requests_per_s >= best - 1e-6
    assert flow_bound(pool) >= best - 1e-9


@given(pool=pools())
@settings(max_examples=25, deadline=None)
def test_without_a_start_the_program_finds_it_too(pool):
    plan = helix(pool, degree=9, early_stop_frac=1.0, time_limit_s=600, warm_start=False, solver=HighsSolver())
    best = max(smallest_cut(pool, start, end) for start, end in placements(pool))
    assert plan.total_requests_per_s == pytest.approx(best, abs=1e-5)


@given(pool=pools(most_nodes=4, most_layers=6, bounded=False), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_where_no_link_binds_the_flow_is_the_least_cover(pool, seed):
    placement = weakest_span(pool)
    improved = improved_cover(pool, placement, np.random.default_rng(seed))
    for each in (placement, improved):
        assert max_flow(pool, each)[0] == pytest.approx(least_cover(pool, each), abs=1e-6)
        assert least_cover(pool, each) <= flow_bound(pool) + 1e-9
