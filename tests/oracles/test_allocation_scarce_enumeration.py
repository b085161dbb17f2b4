"""Allocation by whole plans of units, forced onto tiny problems, against enumeration of every plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation import ilp
from tests.fakes.allocation_cases import agrees, documents, guarantees, restrictions


def plain(doc, *, running):
    """The document as this way takes it: throughput alone, one rate for a pair's rows."""
    doc["options"]["solver"] = "highs"
    doc["running"] = doc["running"] if running else []
    for row in doc["demand"]:
        row.pop("min_instances", None)
        row.pop("max_instances", None)
        if "requests_per_s" in row:
            row["requests_per_s"] = 8.0
        if row.get("tokens_per_s") == 0:
            row["tokens_per_s"] = 7.77
    return doc


def forced(patch, *, first, used):
    def counted(*args):
        found = solve(*args)
        used.append(found is not None)
        return found

    solve = ilp.solve_scarce
    patch.setattr("coral_core.allocation.ilp.solve_scarce", counted)
    patch.setattr("coral_core.allocation.scarce.FROM_COLUMNS", 0)
    patch.setattr("coral_core.allocation.scarce._FIRST_PLANS", first)


@settings(max_examples=120, deadline=None)
@given(doc=documents(), running=st.booleans(), first=st.sampled_from([1, 2, 500]))
def test_plans_of_units_equal_enumeration(doc, running, first, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        forced(patch, first=first, used=[])
        agrees(plain(doc, running=running), tmp_path_factory.mktemp("doc") / "problem.json")


@settings(max_examples=50, deadline=None)
@given(doc=documents(same_region=True).flatmap(restrictions), data=st.data())
def test_plans_of_units_with_restrictions_and_preferences_equal_enumeration(doc, data, tmp_path_factory):
    doc = data.draw(guarantees(plain(doc, running=True), spares=False, regions=False))
    with pytest.MonkeyPatch.context() as patch:
        forced(patch, first=1, used=[])
        agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")


def test_this_way_is_taken(tmp_path):
    doc = {
        "regions": {
            "east": {"a": {"available": 2, "price_usd_per_h": 1.0}, "b": {"available": 1, "price_usd_per_h": 3.0}},
            "west": {"a": {"available": 1, "price_usd_per_h": 1.1}},
        },
        "templates": [
            {"id": "p", "model": "m", "phase": "prefill", "nodes": {"a": 1}, "throughput_tokens_per_s": 6.0},
            {"id": "d", "model": "m", "phase": "decode", "nodes": {"b": 1}, "throughput_tokens_per_s": 9.0},
            {"id": "e", "model": "m", "phase": "decode", "nodes": {"a": 1}, "throughput_tokens_per_s": 4.0},
        ],
        "demand": [
            {"model": "m", "phase": "prefill", "tokens_per_s": 12.0, "weight": 1.0},
            {"model": "m", "phase": "decode", "tokens_per_s": 10.0, "weight": 1.0},
        ],
        "running": [{"template": "e", "region": "west", "count": 1}],
        "churn_k": 0.5,
        "options": {"pd_same_region": True, "solver": "highs"},
        "spot_configs": [],
    }
    used = []
    with pytest.MonkeyPatch.context() as patch:
        forced(patch, first=500, used=used)
        agrees(doc, tmp_path / "problem.json")
    assert True in used
