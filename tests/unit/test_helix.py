"""Baseline `helix`: what it refuses, how it starts and stops, and what its plan is as an allocation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from coral_core.allocation.baselines.helix import TEMPLATE_ID, helix, pool_allocation
from coral_core.allocation.baselines.helix_flow import verify_pool_plan
from coral_core.allocation.baselines.helix_program import kept_links
from coral_core.allocation.baselines.helix_start import equal_stages, flow_bound, searched, weakest_span
from coral_core.allocation.policies import helix_policy, policy
from coral_core.allocation.verify import verify_allocation
from coral_core.domain.allocation import AllocationProblem, DemandRow, TemplateColumns
from coral_core.domain.pool import SINK, SOURCE, PoolNode, PoolPlacement, PoolProblem
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, SolverError
from coral_core.solver.highs import HighsSolver
from coral_core.solver.program import SolveResult, SolveStatus


def node(work, held, config="a"):
    return PoolNode(config=config, requests_per_s=tuple(work / k for k in range(1, held + 1)))


def pool(*nodes, layers=4, link=np.inf, partial=True):
    n = len(nodes)
    return PoolProblem(
        model="m",
        layers=layers,
        nodes=nodes,
        link_requests_per_s=np.full((n, n), link),
        source_requests_per_s=np.full(n, np.inf),
        sink_requests_per_s=np.full(n, np.inf),
        partial=partial,
    )


MIXED = pool(node(8, 2), node(8, 3, "b"), node(4, 1), node(4, 2, "b"))


def test_two_equal_nodes_share_the_layers():
    plan = helix(pool(node(8, 2), node(8, 2)))
    assert plan.total_requests_per_s == pytest.approx(4.0)
    assert sorted(zip(plan.placement.start, plan.placement.end, strict=True)) == [(0, 2), (2, 4)]
    assert plan.gap_frac == pytest.approx(0.0, abs=1e-9)
    assert plan.statistics["solved"] == 0.0  # the start is at the bound, so no program is needed
    assert {SOURCE, SINK} <= {end for link in plan.flow_requests_per_s for end in link}


def test_a_pool_that_cannot_hold_the_model_has_no_flow():
    plan = helix(pool(node(8, 1), node(8, 1)), time_limit_s=600, solver=HighsSolver())
    assert (plan.total_requests_per_s, plan.flow_requests_per_s) == (0.0, {})


def test_a_node_without_throughput_carries_nothing():
    dead = PoolNode(config="a", requests_per_s=(0.0, 0.0))
    plan = helix(pool(node(8, 4), dead), search_rounds=2)
    assert plan.total_requests_per_s == pytest.approx(2.0)
    assert equal_stages(pool(node(8, 4), dead)) is None
    assert helix(pool(dead, layers=2)).total_requests_per_s == 0.0


def test_equal_stages_need_enough_nodes():
    assert equal_stages(pool(node(8, 1), node(8, 4))) is None
    placement = equal_stages(pool(node(8, 2), node(9, 2), node(4, 2)))
    assert sorted(zip(placement.start, placement.end, strict=True)) == [(0, 2), (2, 4), (2, 4)]


def test_the_bound_counts_no_node_beyond_the_flow():
    # a node that serves 100 with one layer cannot give more than the flow itself to that layer
    assert flow_bound(pool(node(100, 1), node(3, 3))) == pytest.approx(1.0)
    narrow = replace(MIXED, source_requests_per_s=np.array([0.5, 0.0, 0.25, 0.0]))
    assert flow_bound(narrow) == 0.75


def test_the_program_improves_on_a_start_and_says_so():
    plan = helix(MIXED, early_stop_frac=1.0, search_rounds=0, time_limit_s=600, solver=HighsSolver())
    statistics = plan.statistics
    assert statistics["solved"] == 1.0
    starts = [statistics[f"flow_{name}_requests_per_s"] for name in ("petals", "search")]
    assert plan.total_requests_per_s >= max(starts)
    assert plan.total_requests_per_s <= statistics["bound_solver_requests_per_s"] + 1e-6
    assert statistics["columns"] > 0
    assert statistics["rows"] > 0


def test_search_never_loses_what_it_starts_with_and_stops_when_it_has_enough():
    start = weakest_span(MIXED)
    assert searched(MIXED, start, np.random.default_rng(0), rounds=3, enough=0.0) is not None
    assert searched(MIXED, start, np.random.default_rng(0), rounds=0, enough=9.0) == start


def test_links_that_carry_flow_survive_pruning():
    used = {(0, 3): 1.0, (2, 1): 2.0}
    links = {(i, j) for i, j, _ in kept_links(MIXED, used, degree=1)}
    assert {(0, 3), (2, 1)} <= links
    assert sum(i >= 0 and j >= 0 for i, j in links) == 4
    unlinked = replace(MIXED, link_requests_per_s=np.zeros((4, 4)))
    assert all(i == SOURCE or j == SINK for i, j, _ in kept_links(unlinked, {}, degree=3))


@dataclass
class Silent:
    name: str = "silent"

    def accepts(self, program):
        return True

    def solve(self, program, options):
        return SolveResult(
            status=SolveStatus.UNKNOWN, x=None, objective=None, bound=None, solve_s=0.0, solver=self.name
        )


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_solver_without_an_answer_leaves_the_start(warm_start):
    plan = helix(MIXED, early_stop_frac=1.0, search_rounds=0, warm_start=warm_start, solver=Silent())
    assert plan.total_requests_per_s > 0
    assert np.isnan(plan.statistics["flow_solver_requests_per_s"])
    assert plan.method != "helix:milp"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": ()}, "0 nodes"),
        ({"layers": 0}, "0 layers"),
        ({"nodes": (PoolNode(config="a", requests_per_s=()), *MIXED.nodes[1:])}, r"nodes\[0\]"),
        ({"nodes": (node(1, 5), *MIXED.nodes[1:])}, r"nodes\[0\]"),
        ({"nodes": (*MIXED.nodes[:3], PoolNode(config="a", requests_per_s=(float("nan"),)))}, r"nodes\[3\]"),
        ({"nodes": (*MIXED.nodes[:3], PoolNode(config="a", requests_per_s=(-1.0,)))}, r"nodes\[3\]"),
        ({"link_requests_per_s": np.zeros((3, 3))}, "link_requests_per_s"),
        ({"source_requests_per_s": np.full(4, np.nan)}, "source_requests_per_s"),
        ({"sink_requests_per_s": np.full(4, -1.0)}, "sink_requests_per_s"),
    ],
)
def test_a_pool_without_meaning_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        helix(replace(MIXED, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"total_requests_per_s": 99.0},
        {"bound_requests_per_s": 0.5},
        {"placement": PoolPlacement(start=(0, 0), end=(2, 5))},
        {"placement": PoolPlacement(start=(0,), end=(2,))},
        {"placement": PoolPlacement(start=(0, 0), end=(2, 2))},
        {"flow_requests_per_s": {}},
        {"flow_requests_per_s": {(SOURCE, 0): 5.0, (0, 1): 4.0, (1, SINK): 4.0}},
        {"flow_requests_per_s": {(SOURCE, 0): 9.0, (0, 1): 9.0, (1, SINK): 9.0}, "total_requests_per_s": 9.0},
    ],
)
def test_a_false_plan_is_caught(change):
    asked = pool(node(8, 2), node(8, 2))
    plan = replace(helix(asked), placement=PoolPlacement(start=(0, 2), end=(2, 4)))
    plan = replace(plan, flow_requests_per_s={(SOURCE, 0): 4.0, (0, 1): 4.0, (1, SINK): 4.0})
    verify_pool_plan(asked, plan)
    with pytest.raises(SolverError, match="does not hold"):
        verify_pool_plan(asked, replace(plan, **change))


PROBLEM = AllocationProblem(
    regions=("r0", "r1"),
    configs=("b", "a"),
    available=np.array([[0, 0], [2, 3]]),
    price_usd_per_h=np.array([[1.0, 1.0], [1.0, 2.0]]),
    templates=TemplateColumns(
        ids=(), models=(), phases=(), nodes=np.zeros((0, 2), dtype=np.int64), throughput=np.zeros(0)
    ),
    demand=(
        DemandRow(model="m", phase=Phase.PREFILL, tokens_per_s=700.0, requests_per_s=10.0),
        DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=300.0, requests_per_s=10.0),
    ),
)


def test_a_pool_is_paid_for_whole_and_what_it_cannot_serve_is_stated():
    plan = helix(MIXED, search_rounds=2)
    problem, result = pool_allocation(PROBLEM, MIXED, plan, region="r1")
    verify_allocation(problem, result)
    assert result.cost_usd_per_h == 2 * 1.0 + 2 * 2.0
    missing = 1 - plan.total_requests_per_s / 10
    assert [item.frac for item in result.shortfall] == [pytest.approx(missing)] * 2
    assert [(item.template, item.region) for item in result.instances] == [(TEMPLATE_ID, "r1")]
    by_policy = helix_policy(MIXED, region="r1", time_limit_s=600)
    assert by_policy.solve(PROBLEM).cost_usd_per_h == 6.0
    assert (by_policy.name, by_policy.solve(PROBLEM).method) == ("helix", "helix")


def test_a_pool_that_the_region_does_not_hold_is_refused():
    plan = helix(MIXED, search_rounds=2)
    for region in ("r0", "r9"):
        with pytest.raises(InputError, match="does not hold the pool"):
            pool_allocation(PROBLEM, MIXED, plan, region=region)
    with pytest.raises(InputError, match="the problem has none"):
        pool_allocation(replace(PROBLEM, configs=("b", "c")), MIXED, plan, region="r1")


def test_helix_by_name_asks_for_its_pool():
    with pytest.raises(InputError, match="fixed pool"):
        policy("helix")
