"""Every plan of a small allocation document, valued straight from the document a user would write."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict

import pytest
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
    """(floor deficit, weighted shortfall, counted cost, churn, fractions, real cost) or None where a cap is broken."""
    deficit = 0
    for row in doc["demand"]:
        number = sum(n for k, n in plan.items() if enters(doc["templates"][k[0]], row))
        if number > row.get("max_instances", math.inf):
            return None
        deficit += max(0, row.get("min_instances", 0) - number)
    missing = [lacking(doc, plan, i) for i in range(len(doc["demand"]))]
    runs = {(x["template"], x["region"]): x["count"] for x in doc["running"]}
    cost = churn = preference = 0.0
    for (t, r), n in plan.items():
        if n:
            template = doc["templates"][t]
            price = {c: k * doc["regions"][r][c]["price_usd_per_h"] for c, k in template["nodes"].items() if k}
            cost += n * sum(price.values())
            churn += max(0, n - runs.get((template["id"], r), 0)) * sum(price.values()) * doc["churn_k"]
            preference += n * sum((factor(doc, template["model"], c, r) - 1) * p for c, p in price.items())
    weighted = sum(row["weight"] * m for row, m in zip(doc["demand"], missing, strict=True))
    return deficit, weighted, cost + preference, churn, missing, cost


def factor(doc, model, config, region):
    """What the price of a node is multiplied with in the objective."""
    product = 1.0
    for item in doc.get("preferences", []):
        if all(item.get(k, v) == v for k, v in (("model", model), ("config", config), ("region", region))):
            product *= item["price_factor"]
    return product


def lacking(doc, plan, i):
    """What counts as missing of row i: what is not served, and a tenth of what is served until an instance is lost."""
    rows = doc["demand"]
    if not asks(rows[i]):
        return 0.0
    together = [i]
    if doc["options"]["pd_same_region"] and rows[i]["phase"] != "aggregated":
        together += [k for k, o in enumerate(rows) if k != i and o["model"] == rows[i]["model"] and asks(o)]
    floors = [steady(doc, plan, rows[k]) / f for k in together if (f := rows[k].get("on_demand_frac"))]
    now = min([served(doc, plan, together), *floors])
    after = now
    for place, n in plan.items():
        template = doc["templates"][place[0]]
        if n and any(rows[k].get("spare_instances") and enters(template, rows[k]) for k in together):
            after = min(after, served(doc, {**plan, place: n - 1}, together))
    now, after = (1.0 if x > 1 - 1e-9 else x for x in (now, after))
    return (1 - now) + 0.1 * (now - after)


def served(doc, plan, together):
    """The fraction of demand that rows served together get, each region's own demand first."""
    in_place = []
    for row in (doc["demand"][k] for k in together):
        got = defaultdict(float)
        for (t, r), n in plan.items():
            template = doc["templates"][t]
            if enters(template, row):
                unit = "requests_per_s" if template["phase"] == "aggregated" else "tokens_per_s"
                place = (r, template.get("variant") if doc["options"]["pd_same_region"] else None)
                got[place] += n * template[f"throughput_{unit}"] / row[unit]
        in_place.append(got)
    supply = defaultdict(float)
    for place in in_place[0]:
        supply[place[0]] += min(got[place] for got in in_place)
    wanted = defaultdict(float)
    for k in together:
        for region, frac in doc["demand"][k].get("region_fracs", {}).items():
            wanted[region] = max(wanted[region], frac)
    anywhere = 1.0 - sum(wanted.values())
    total = 0.0
    for region in {*supply, *wanted}:
        own = min(supply[region], wanted[region])
        more = min(supply[region] - own, anywhere)
        anywhere -= more
        total += own + more
    return total


def steady(doc, plan, row):
    """The fraction of a row that templates without spot nodes cover."""
    total = 0.0
    for (t, _), n in plan.items():
        template = doc["templates"][t]
        if enters(template, row) and not any(template["nodes"].get(c) for c in doc["spot_configs"]):
            unit = "requests_per_s" if template["phase"] == "aggregated" else "tokens_per_s"
            total += n * template[f"throughput_{unit}"] / row[unit]
    return total


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
    for pool in doc.get("pools", []):
        own = [(doc["templates"][t]["nodes"], n) for (t, r), n in plan.items() if r == pool["region"]]
        if sum(n * k * pool["units"].get(c, 0) for nodes, n in own for c, k in nodes.items()) > pool["limit"]:
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
    assert answer["cost_usd_per_h"] == pytest.approx(own[5], abs=1e-9)
    assert own[2] - own[5] == pytest.approx(answer.get("preference_usd_per_h", 0.0), abs=1e-9)
    assert answer["churn_usd_per_h"] == pytest.approx(own[3], abs=1e-9)
    assert [x["frac"] for x in answer["shortfall"]] == pytest.approx(own[4], abs=1e-8)
    assert answer["status"] == "optimal"
    assert answer["bound_usd_per_h"] <= objective + 1e-7
    return result


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


@st.composite
def shared_quotas(draw, doc):
    """Pools that configurations of a region share; some of them bind."""
    configs = all_configs(doc)
    pools = []
    for region in doc["regions"]:
        for number in range(draw(st.integers(0, 2)) if configs else 0):
            units = draw(st.dictionaries(st.sampled_from(configs), st.sampled_from([4, 8, 48, 96]), min_size=1))
            limit = draw(st.sampled_from([0, 7, 8, 16, 48, 100, 192, 200]))
            pools.append({"name": f"q{number}", "region": region, "limit": limit, "units": units})
    return {**doc, "pools": pools}


def all_configs(doc):
    return sorted({c for t in doc["templates"] for c in t["nodes"]} | {c for r in doc["regions"].values() for c in r})


@st.composite
def guarantees(draw, doc, *, spares=True, regions=True, preferences=True, on_demand=False):
    """Spares, per-region demand, preferences and on-demand floors beside what the document has."""
    names = [*doc["regions"]]
    easy = draw(st.sampled_from([1, 4, 8]))  # so that more can be served in full
    for row in doc["demand"]:
        for unit in {"tokens_per_s", "requests_per_s"} & row.keys():
            row[unit] /= easy
        if spares:
            row["spare_instances"] = draw(st.sampled_from([0, 1, 1]))
        if regions:
            parts = draw(st.sampled_from([(), (0.3,), (1.0,), (0.5, 0.5), (0.25, 0.6), (0.0, 0.7)]))
            chosen = draw(st.permutations(names))
            row["region_fracs"] = dict(zip(chosen, parts, strict=False))
        if on_demand:
            row["on_demand_frac"] = draw(st.sampled_from([0.0, 0.5, 1.0]))
    if regions and doc["options"]["pd_same_region"]:
        first = {}
        for row in doc["demand"]:  # both phases ask for the same, or one of them alone
            row["region_fracs"] = draw(st.sampled_from([first.setdefault(row["model"], row["region_fracs"]), {}]))
    configs = all_configs(doc)
    if on_demand:
        doc["spot_configs"] = sorted(draw(st.sets(st.sampled_from(configs)))) if configs else []
    kinds = {"model": sorted({row["model"] for row in doc["demand"]}), "config": configs, "region": names}
    doc["preferences"] = []
    for _ in range(draw(st.integers(1, 3)) if preferences else 0):
        named = draw(st.sets(st.sampled_from([kind for kind in kinds if kinds[kind]]), min_size=1))
        item = {kind: draw(st.sampled_from(kinds[kind])) for kind in sorted(named)}
        doc["preferences"].append(item | {"price_factor": draw(st.sampled_from([0.3, 0.8, 1.7, 5.0]))})
    return doc
