"""Allocation against enumeration of every plan, straight from the document a user would write."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation.ilp import solve_allocation
from coral_core.config.allocation_file import allocation_result_to_json, read_allocation_file

TIE = 1e-7


def plans(doc):
    """Every dict (template index, region) -> count that respects the nodes available."""
    slots = [(t, r) for t in range(len(doc["templates"])) for r in doc["regions"]]

    def extend(index, left):
        if index == len(slots):
            yield {}
            return
        t, r = slots[index]
        need = doc["templates"][t]["nodes"]
        count = 0
        while all(left[r].get(c, 0) >= n * count for c, n in need.items() if n):
            rest = {**left, r: {c: a - need.get(c, 0) * count for c, a in left[r].items()}}
            for tail in extend(index + 1, rest):
                yield {(t, r): count, **tail}
            count += 1

    yield from extend(0, {r: {c: n["available"] for c, n in nodes.items()} for r, nodes in doc["regions"].items()})


def enters(template, row):
    if template["model"] != row["model"]:
        return False
    return template["phase"] in (row["phase"], "aggregated")


def asks(row):
    return row.get("tokens_per_s" if row["phase"] != "aggregated" else "requests_per_s", 0) > 0


def value(doc, plan):
    """(floor deficit, weighted shortfall, cost, churn, fractions) or None where a cap is broken."""
    deficit = 0
    cover = []
    for row in doc["demand"]:
        inside = {k: n for k, n in plan.items() if enters(doc["templates"][k[0]], row)}
        number = sum(inside.values())
        if number > row.get("max_instances", math.inf):
            return None
        deficit += max(0, row.get("min_instances", 0) - number)
        by_place = defaultdict(float)
        for (t, r), n in inside.items():
            template = doc["templates"][t]
            if not asks(row):
                continue
            place = (r, template.get("variant") if doc["options"]["pd_same_region"] else None)
            if template["phase"] == "aggregated":
                by_place[place] += n * template["throughput_requests_per_s"] / row["requests_per_s"]
            else:
                by_place[place] += n * template["throughput_tokens_per_s"] / row["tokens_per_s"]
        cover.append(by_place)
    missing = []
    for i, row in enumerate(doc["demand"]):
        together = [i]
        if doc["options"]["pd_same_region"] and row["phase"] != "aggregated":
            together += [k for k, o in enumerate(doc["demand"]) if k != i and o["model"] == row["model"] and asks(o)]
        served = sum(min(cover[k].get(place, 0.0) for k in together) for place in cover[i])
        missing.append(max(0.0, 1.0 - served) if asks(row) else 0.0)
    missing = without_floors(doc, plan, missing)
    missing = [0.0 if m < 1e-9 else m for m in missing]
    runs = {(x["template"], x["region"]): x["count"] for x in doc["running"]}
    cost = churn = 0.0
    for (t, r), n in plan.items():
        if n:
            nodes = doc["templates"][t]["nodes"]
            price = sum(k * doc["regions"][r][c]["price_usd_per_h"] for c, k in nodes.items() if k)
            cost += n * price
            churn += max(0, n - runs.get((doc["templates"][t]["id"], r), 0)) * price * doc["churn_k"]
    weighted = sum(row["weight"] * m for row, m in zip(doc["demand"], missing, strict=True))
    return deficit, weighted, cost, churn, missing


def steady(doc, plan, row):
    """The fraction of a row that templates without spot nodes cover."""
    total = 0.0
    for (t, _), n in plan.items():
        template = doc["templates"][t]
        if enters(template, row) and not any(template["nodes"].get(c) for c in doc["spot_configs"]):
            unit = "requests_per_s" if template["phase"] == "aggregated" else "tokens_per_s"
            total += n * template[f"throughput_{unit}"] / row[unit]
    return total


def without_floors(doc, plan, missing):
    """The missing fractions where on-demand floors count too."""
    missing = list(missing)
    for i, row in enumerate(doc["demand"]):
        if row.get("on_demand_frac") and asks(row):
            met = steady(doc, plan, row) / row["on_demand_frac"]
            pair = doc["options"]["pd_same_region"] and row["phase"] != "aggregated"
            for k, other in enumerate(doc["demand"]):
                if k == i or (pair and other["model"] == row["model"] and asks(other)):
                    missing[k] = max(missing[k], 1.0 - met)
    return missing


def allowed(doc, plan):
    cost = 0.0
    for (t, r), n in plan.items():
        template = doc["templates"][t]
        nodes = {c: k for c, k in template["nodes"].items() if k}
        cost += sum(n * k * doc["regions"][r][c]["price_usd_per_h"] for c, k in nodes.items()) if n else 0.0
        for item in doc.get("exclusions", []):
            banned = item.get("model", template["model"]) == template["model"] and item.get("region", r) == r
            if n and banned and ("config" not in item or item["config"] in nodes):
                return False
    return cost <= doc["options"].get("budget_usd_per_h", math.inf)


def best(doc):
    values = [v for plan in plans(doc) if allowed(doc, plan) and (v := value(doc, plan)) is not None]
    least = min(v[0] for v in values)
    values = [v for v in values if v[0] == least]
    short = min(v[1] for v in values)
    values = [v for v in values if v[1] <= short + TIE]
    return least, short, min(v[2] + v[3] for v in values)


def throughput(draw):
    return draw(st.one_of(st.integers(1, 12).map(float), st.floats(0.5, 12.0).map(lambda x: round(x, 3))))


@st.composite
def documents(draw, *, same_region=None):
    configs = [f"c{i}" for i in range(draw(st.integers(1, 3)))]
    regions = [f"r{i}" for i in range(draw(st.integers(1, 2)))]
    models = ["m", "n"][: draw(st.integers(1, 2))]
    aggregated, variants = draw(st.booleans()), draw(st.booleans())
    offers = st.fixed_dictionaries(
        {
            "available": st.sampled_from([0, 1, 2, 3, 4, 4]),
            "price_usd_per_h": st.floats(0.01, 100.0).map(lambda x: round(x, 3)),
        }
    )
    doc = {
        "regions": {r: {c: draw(offers) for c in configs if draw(st.integers(0, 7))} for r in regions},
        "templates": [],
        "demand": [],
        "running": [],
        "churn_k": draw(st.sampled_from([0.0, 0.1, 0.7])),
        "options": {"pd_same_region": draw(st.booleans()) if same_region is None else same_region},
    }
    for model in models:
        only_aggregated = aggregated and draw(st.integers(0, 3)) == 0
        for phase in ["aggregated"] if only_aggregated else draw(st.sampled_from([["prefill", "decode"], ["decode"]])):
            row = {"model": model, "phase": phase, "weight": draw(st.sampled_from([1.0, 1.0, 3.0, 0.25, 1000.0]))}
            amount = draw(st.sampled_from([0.0, 5.0, 7.77, 12.0, 12.0, 24.0, 24.0, 40.0]))
            if phase != "aggregated":
                row["tokens_per_s"] = amount
            if aggregated:
                row["requests_per_s"] = draw(st.sampled_from([3.0, 8.0, 12.0, 20.0])) if amount else 0.0
            if draw(st.integers(0, 4)) == 0:
                row["max_instances"] = draw(st.integers(0, 4))
            if draw(st.integers(0, 4)) == 0:
                row["min_instances"] = draw(st.integers(0, row.get("max_instances", 3)))
            doc["demand"].append(row)
    # mostly templates that some row can use, now and then one that none can
    uses = [(row["model"], phase) for row in doc["demand"] for phase in {row["phase"], *(["aggregated"] * aggregated)}]
    for t in range(draw(st.sampled_from([0, 1, 2, 3, 3, 4, 4]))):
        model, phase = draw(st.sampled_from([*sorted(uses), *sorted(uses), ("m", "prefill")]))
        nodes = draw(st.dictionaries(st.sampled_from(configs), st.integers(1, 2), min_size=1, max_size=2))
        unit = "throughput_requests_per_s" if phase == "aggregated" else "throughput_tokens_per_s"
        template = {"id": f"t{t}", "model": model, "phase": phase, "nodes": nodes, unit: throughput(draw)}
        doc["templates"].append(template | ({"variant": draw(st.sampled_from(["bf16", "fp8"]))} if variants else {}))
    for template, region in itertools.product([*doc["templates"], {"id": "gone"}], regions):
        if draw(st.integers(0, 3)) == 0:
            doc["running"].append({"template": template["id"], "region": region, "count": draw(st.integers(0, 3))})
    return doc


def parsed(doc, path):
    path.write_text(json.dumps(doc))
    problems, was_list = read_allocation_file(path)
    assert not was_list
    return problems[0]


def agrees(doc, path):
    deficit, short, objective = best(doc)
    result = solve_allocation(parsed(doc, path))
    answer = allocation_result_to_json(result)
    plan = {
        (next(t for t, x in enumerate(doc["templates"]) if x["id"] == i["template"]), i["region"]): i["count"]
        for i in answer["instances"]
    }
    own = value(doc, plan)
    assert own is not None
    assert allowed(doc, plan)
    assert own[0] == deficit == sum(x["instances"] for x in answer.get("floor_deficit", []))
    assert own[1] == pytest.approx(short, abs=1e-6)
    assert answer["objective_usd_per_h"] == pytest.approx(objective, abs=1e-6, rel=1e-7)
    assert answer["cost_usd_per_h"] == pytest.approx(own[2], abs=1e-9)
    assert answer["churn_usd_per_h"] == pytest.approx(own[3], abs=1e-9)
    assert [x["frac"] for x in answer["shortfall"]] == pytest.approx(own[4], abs=1e-8)
    assert answer["status"] == "optimal"
    assert answer["bound_usd_per_h"] <= objective + 1e-7
    return result


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


@st.composite
def restrictions(draw, doc):
    """What must not be used, and a budget that no plan costs to the last digit."""
    configs = sorted(
        {c for t in doc["templates"] for c in t["nodes"]} | {c for r in doc["regions"].values() for c in r}
    )
    kinds = {"model": sorted({t["model"] for t in doc["templates"]}), "config": configs, "region": [*doc["regions"]]}
    exclusions = []
    for _ in range(draw(st.integers(0, 2))):
        named = draw(st.sets(st.sampled_from(["model", "config", "region"]), min_size=1))
        item = {kind: draw(st.sampled_from(kinds[kind])) for kind in sorted(named) if kinds[kind]}
        exclusions += [item] if item else []
    options = {"budget_usd_per_h": draw(st.integers(0, 400)) / 2 + 0.00012345} if draw(st.booleans()) else {}
    return {**doc, "exclusions": exclusions, "options": doc["options"] | options}


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
    configs = sorted(
        {c for t in doc["templates"] for c in t["nodes"]} | {c for r in doc["regions"].values() for c in r}
    )
    doc["spot_configs"] = sorted(data.draw(st.sets(st.sampled_from(configs)))) if configs else []
    for row in doc["demand"]:
        row["on_demand_frac"] = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]))
    agrees(doc, tmp_path_factory.mktemp("doc") / "problem.json")
