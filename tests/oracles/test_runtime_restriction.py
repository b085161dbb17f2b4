"""What a restriction to certain runtimes costs, against enumeration of every plan with and without it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation.columns import with_templates
from coral_core.allocation.ilp import solve_allocation
from coral_core.domain.launch import Runtime
from coral_core.engine.runnable import Obstacle
from tasks.runtimes import RESTRICTIONS, Scope, runtimes_document
from tests.fakes.allocation_cases import best, documents, parsed

BLOCKS = {
    None: 0,
    Runtime.VLLM: int(Obstacle.NODES_IN_STAGE),
    Runtime.CORAL: int(Obstacle.REPLICAS_IN_NODE),
    "both": int(Obstacle.NODES_IN_STAGE | Obstacle.REPLICAS_IN_NODE),
}


@settings(max_examples=60, deadline=None)
@given(
    doc=documents(),
    blocked=st.lists(st.sampled_from([*BLOCKS]), min_size=4, max_size=4),
    allowed=st.sampled_from(RESTRICTIONS),
)
def test_the_cost_of_a_restriction_is_that_of_the_best_plans(doc, blocked, allowed, tmp_path_factory):
    problem = parsed(doc, tmp_path_factory.mktemp("doc") / "problem.json")
    ids = [template["id"] for template in doc["templates"]]
    found = np.array([BLOCKS[block] for block in blocked[: len(ids)]], dtype=np.int64)
    scope = Scope(
        rows=pa.table({"template_id": pa.array(ids, pa.string())}),
        found=found,
        passes_kv=np.zeros(len(ids), dtype=np.bool_),
        models={},
        allowed=allowed,
    )
    solved = []

    def solve(usable):
        solved.append(usable["template_id"].to_pylist())
        kept = np.array([ids.index(name) for name in solved[-1]], dtype=np.int64)
        return solve_allocation(with_templates(problem, kept))

    own = solve(scope.usable)
    document = runtimes_document(scope, own, solve, weights=[row.weight for row in problem.demand])
    assert document["allowed"] == (None if allowed is None else [runtime.value for runtime in allowed])
    assert len({tuple(names) for names in solved}) == len(solved), "the same rows were solved twice"
    everything = best(doc)
    assert {tuple(item["runtimes"] or ()) for item in document["restrictions"]} == {("vllm",), ("vllm", "coral"), ()}
    for item in document["restrictions"]:
        wanted = None if item["runtimes"] is None else [Runtime(name) for name in item["runtimes"]]
        can = [wanted is None or any(block not in {runtime, "both"} for runtime in wanted) for block in blocked]
        usable = [template for template, fits in zip(doc["templates"], can, strict=False) if fits]
        deficit, short, objective = best({**doc, "templates": usable})
        assert item["templates"] == len(usable)
        assert item["objective_usd_per_h"] == pytest.approx(objective, abs=1e-6, rel=1e-6)
        if (deficit, short) == pytest.approx(everything[:2], abs=1e-6):
            assert item["extra_usd_per_h"] == pytest.approx(objective - everything[2], abs=1e-4)
            assert item["extra_usd_per_h"] >= 0
            if everything[2] > 1e-3:
                assert item["extra_frac"] == pytest.approx((objective - everything[2]) / everything[2], abs=1e-3)
        else:
            assert item["extra_usd_per_h"] is None
            assert item["extra_frac"] is None
