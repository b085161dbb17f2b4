"""Quotas that configurations share, against enumeration of every plan, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation.baselines.cauchy import UnsupportedFamilyError, cauchy
from coral_core.allocation.baselines.homo import homo
from coral_core.allocation.baselines.homo_joint import homo_joint
from coral_core.allocation.explain import explain_allocation
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.verify import PlanViolationError, verify_allocation
from coral_core.domain.allocation import AllocationOptions, AllocationProblem, DemandRow, Pool, TemplateColumns
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from tests.fakes.allocation_cases import agrees, documents, guarantees, parsed, restrictions, shared_quotas


@settings(max_examples=250, deadline=None)
@given(doc=documents().flatmap(shared_quotas), wide=st.booleans(), reduce=st.booleans())
def test_pools_equal_enumeration(doc, wide, reduce, tmp_path_factory):
    """By every path: models apart, tolls and growing columns, the whole program with and without reductions."""
    doc["options"]["reduce"] = reduce
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr("coral_core.allocation.decompose.COVER_FROM_TEMPLATES", 0)
            patch.setattr("coral_core.allocation.joint.WIDE_FROM_COLUMNS", 0)
        agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=80, deadline=None)
@given(doc=documents().flatmap(guarantees).flatmap(restrictions).flatmap(shared_quotas))
def test_pools_beside_other_families_equal_enumeration(doc, tmp_path_factory):
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=80, deadline=None)
@given(doc=documents().flatmap(shared_quotas))
def test_baselines_keep_pools_or_say_that_they_cannot(doc, tmp_path_factory):
    problem = parsed(doc, tmp_path_factory.mktemp("doc") / "problem.json")
    best = solve_allocation(problem)
    for policy in (homo, homo_joint):
        result = policy(problem)  # verified inside
        assert result.statistics.get("shortfall_weighted", np.inf) >= best.statistics["shortfall_weighted"] - 1e-6
    if problem.pools:
        with pytest.raises(UnsupportedFamilyError, match="cauchy has no way to share the quota q"):
            cauchy(problem)


def two_kinds(limit: float, **changes) -> AllocationProblem:
    """Templates on a dear small node (4 vCPUs) and a cheap large one (48); demand for ten of either."""
    given_ = {
        "regions": ("r",),
        "configs": ("small", "large"),
        "available": np.array([[20, 20]]),
        "price_usd_per_h": np.array([[2.0, 1.0]]),
        "templates": TemplateColumns(
            ids=("s", "l"),
            models=("m", "m"),
            phases=(Phase.DECODE, Phase.DECODE),
            nodes=np.eye(2, dtype=np.int64),
            throughput=np.array([100.0, 100.0]),
        ),
        "demand": (DemandRow(model="m", phase=Phase.DECODE, tokens_per_s=1000.0),),
        "pools": (Pool(name="G and VT", region="r", limit=limit, units=(("small", 4.0), ("large", 48.0))),),
        "options": AllocationOptions(solver="highs"),
    }
    return AllocationProblem(**{**given_, **changes})


def held(problem):
    return {item.template: item.count for item in solve_allocation(problem).instances}


def test_a_shared_quota_makes_way_for_what_takes_less_of_it():
    assert held(two_kinds(480)) == {"l": 10}
    assert held(two_kinds(479)) == {"l": 9, "s": 1}
    assert held(two_kinds(100)) == {"l": 1, "s": 9}
    result = solve_allocation(two_kinds(20))
    assert {item.template: item.count for item in result.instances} == {"s": 5}
    assert result.shortfall[0].frac == pytest.approx(0.5)
    assert solve_allocation(two_kinds(0)).shortfall[0].frac == 1.0


def test_a_binding_quota_is_explained():
    problem = two_kinds(100)
    limits = {limit.family: limit for limit in explain_allocation(problem, solve_allocation(problem)).binding}
    quota = limits["quota"]
    assert (quota.name, quota.used, quota.limit) == (("r", "G and VT"), 84.0, 100.0)
    # One vCPU more turns 1/44 of a small node into a large one, which is 1 USD/h cheaper.
    assert quota.shadow_usd_per_h == pytest.approx(1 / 44)
    free = two_kinds(4800)
    found = {limit.family: limit for limit in explain_allocation(free, solve_allocation(free)).limits}["quota"]
    assert (found.binding, found.used) == (False, 480.0)


def test_a_plan_beyond_a_quota_is_caught():
    whole = solve_allocation(two_kinds(480))
    with pytest.raises(PlanViolationError, match=r"pools\[0\]: 480 of 'G and VT' in 'r' used, the limit is 479"):
        verify_allocation(two_kinds(479), whole)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"region": "x"}, r"pools\[0\]\.region: unknown region 'x'"),
        ({"limit": -1.0}, r"pools\[0\]\.limit: -1.0 is not a finite"),
        ({"limit": float("nan")}, r"pools\[0\]\.limit"),
        ({"units": (("huge", 1.0),)}, r"pools\[0\]\.units\.huge: unknown config"),
        ({"units": (("small", 0.0),)}, r"pools\[0\]\.units\.small: 0.0 is not a finite number > 0"),
        ({"units": (("small", 1.0), ("small", 2.0))}, "appears twice"),
    ],
)
def test_pools_without_a_meaning_are_refused(pool, message):
    problem = two_kinds(1)
    with pytest.raises(InputError, match=message):
        solve_allocation(replace(problem, pools=(replace(problem.pools[0], **pool),)))
    with pytest.raises(InputError, match="'G and VT' in 'r' appears twice"):
        solve_allocation(replace(problem, pools=problem.pools * 2))
