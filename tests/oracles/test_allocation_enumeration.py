"""Allocation against enumeration of every plan, straight from the document a user would write."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coral_core.allocation.ilp import solve_allocation
from tests.fakes.allocation_cases import agrees, all_configs, best, documents, guarantees, parsed, restrictions


@settings(max_examples=250, deadline=None)
@given(doc=documents())
def test_equals_enumeration(doc, tmp_path_factory):
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=60, deadline=None)
@given(doc=documents(same_region=True))
def test_same_region_equals_enumeration(doc, tmp_path_factory):
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=60, deadline=None)
@given(doc=documents(), solver=st.sampled_from(["highs", "auto"]))
def test_without_reductions_equals_enumeration(doc, solver, tmp_path_factory):
    doc["options"] |= {"solver": solver, "reduce": False}
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=120, deadline=None)
@given(doc=documents())
def test_column_growth_equals_enumeration(doc, tmp_path_factory):
    """The path of wide programs, forced onto tiny ones: sifting, few columns first, growth until proven."""
    doc["options"]["solver"] = "highs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coral_core.allocation.wide.DIRECT_COLUMNS", 2)
        patch.setattr("coral_core.allocation.stages.DIRECT_COLUMNS", 2)
        patch.setattr("coral_core.allocation.wide._FIRST_COLUMNS", 1)
        patch.setattr("coral_core.allocation.wide._SIFT_BATCH", 1)
        agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=150, deadline=None)
@given(doc=documents(), units=st.sampled_from([4, 64, 2048]))
def test_covering_by_dynamic_program_equals_enumeration(doc, units, tmp_path_factory):
    """Blocks without binding capacity on demand units, from grids so coarse that rounding matters."""
    for nodes in doc["regions"].values():
        for offer in nodes.values():
            offer["available"] = min(offer["available"] * 2, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coral_core.allocation.decompose.COVER_FROM_TEMPLATES", 0)
        patch.setattr("coral_core.allocation.cover._FIRST_UNITS", units)
        agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=200, deadline=None)
@given(doc=documents(), first=st.sampled_from([1, 3, 400]), running=st.booleans(), small=st.booleans())
def test_tolls_and_growing_columns_equal_enumeration(doc, first, running, small, tmp_path_factory):
    """The path of wide scarce programs, forced onto tiny ones: tolls, bounds of columns, growth until proven."""
    doc["options"]["solver"] = "highs"
    doc["running"] = doc["running"] if running else []
    for row in doc["demand"]:
        row.pop("min_instances", None)
        row.pop("max_instances", None)
        if "requests_per_s" in row:
            row["requests_per_s"] = 8.0  # a pair's rows state one rate
        for unit in ("tokens_per_s", "requests_per_s"):
            if unit in row and small:
                row[unit] /= 4  # so that more can be served in full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coral_core.allocation.decompose.COVER_FROM_TEMPLATES", 0)
        patch.setattr("coral_core.allocation.joint.WIDE_FROM_COLUMNS", 0)
        patch.setattr("coral_core.allocation.joint._FIRST_COLUMNS", first)
        agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=200, deadline=None)
@given(doc=documents().flatmap(restrictions), wide=st.booleans())
def test_exclusions_and_a_budget_equal_enumeration(doc, wide, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr("coral_core.allocation.decompose.COVER_FROM_TEMPLATES", 0)
            patch.setattr("coral_core.allocation.joint.WIDE_FROM_COLUMNS", 0)
        agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=200, deadline=None)
@given(doc=documents(), data=st.data())
def test_on_demand_floors_equal_enumeration(doc, data, tmp_path_factory):
    configs = all_configs(doc)
    doc["spot_configs"] = sorted(data.draw(st.sets(st.sampled_from(configs)))) if configs else []
    for row in doc["demand"]:
        row["on_demand_frac"] = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]))
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


def guaranteed(**families):
    return documents().flatmap(lambda doc: guarantees(doc, **families))


NONE = {"spares": False, "regions": False, "preferences": False}


def spare_of_the_lighter_row(**first_region):
    """One instance covers all prefill, which asks for the spare; decode of the same pair needs two, so N+1 is three."""
    row = {"model": "m", "weight": 1.0, "tokens_per_s": 1.25}
    return {
        "regions": {"r0": first_region, "r1": {"c0": {"available": 3, "price_usd_per_h": 1.0}}},
        "templates": [
            {"id": "t0", "model": "m", "phase": "aggregated", "nodes": {"c0": 1}, "throughput_requests_per_s": 1.0}
        ],
        "demand": [
            row | {"phase": "prefill", "requests_per_s": 0.75, "spare_instances": 1},
            row | {"phase": "decode", "requests_per_s": 2.0},
        ],
        "running": [],
        "churn_k": 0.0,
        "options": {"pd_same_region": True},
    }


@settings(max_examples=120, deadline=None)
@given(doc=guaranteed(**NONE | {"spares": True}))
@example(doc=spare_of_the_lighter_row())
@example(doc=spare_of_the_lighter_row(c0={"available": 1, "price_usd_per_h": 2.0}))
def test_redundancy_equals_enumeration(doc, tmp_path_factory):
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=80, deadline=None)
@given(doc=guaranteed(**NONE | {"regions": True}))
def test_per_region_demand_equals_enumeration(doc, tmp_path_factory):
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=80, deadline=None)
@given(doc=guaranteed(**NONE | {"preferences": True}), wide=st.booleans())
def test_preferences_equal_enumeration(doc, wide, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr("coral_core.allocation.decompose.COVER_FROM_TEMPLATES", 0)
            patch.setattr("coral_core.allocation.joint.WIDE_FROM_COLUMNS", 0)
        agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=150, deadline=None)
@given(doc=guaranteed(on_demand=True).flatmap(restrictions), wide=st.booleans())
def test_families_together_equal_enumeration(doc, wide, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr("coral_core.allocation.decompose.COVER_FROM_TEMPLATES", 0)
            patch.setattr("coral_core.allocation.joint.WIDE_FROM_COLUMNS", 0)
        agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=60, deadline=None)
@given(doc=guaranteed())
def test_families_without_reductions_equal_enumeration(doc, tmp_path_factory):
    doc["options"] |= {"solver": "highs", "reduce": False}
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=80, deadline=None)
@given(doc=guaranteed(on_demand=True))
def test_wide_guarantees_state_bounds_that_hold(doc, tmp_path_factory):
    """The path of wide scarce problems, forced onto tiny ones: its plan may not be the best, what it proves must hold."""
    doc["options"]["solver"] = "highs"
    path = tmp_path_factory.mktemp("doc") / "problem.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coral_core.allocation.ilp.DIRECT_COLUMNS", 0)
        result = solve_allocation(parsed(doc, path))
    deficit, short, objective = best(doc)
    found = sum(result.floor_deficit.values()), result.statistics["shortfall_weighted"]
    assert found >= (deficit, short - 1e-6)
    if found[0] == deficit:
        assert result.statistics["shortfall_bound"] <= short + 1e-6
        if found[1] <= short + 1e-7:
            assert result.bound_usd_per_h <= objective + 1e-6 <= result.objective_usd_per_h + 2e-6
        assert result.status == "gap" or found[1] == pytest.approx(short, abs=1e-6)
