"""Laws of the allocation that hold whatever the numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation import skyline
from coral_core.allocation.baselines.homo import homo
from coral_core.allocation.baselines.homo_joint import homo_joint
from coral_core.allocation.coverage import coverage_of
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.prices import counts_of
from coral_core.allocation.reduce import dominated, price_front, reduce_columns
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    DemandRow,
    Exclusion,
    Preference,
    Running,
    TemplateColumns,
)
from coral_core.domain.workload import Phase

PHASES = (Phase.PREFILL, Phase.DECODE)


@st.composite
def problems(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n, r, c = draw(st.integers(1, 25)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    models = ("m", "n")[: draw(st.integers(1, 2))]
    held = draw(st.sampled_from([2, 6, 40]))
    aggregated = draw(st.booleans())
    phases = [*PHASES, Phase.AGGREGATED] if aggregated else [*PHASES]
    nodes = rng.integers(0, 3, (n, c))
    nodes[np.arange(n), rng.integers(0, c, n)] += 1
    templates = TemplateColumns(
        ids=tuple(f"t{i}" for i in range(n)),
        models=tuple(rng.choice(models, n).tolist()),
        phases=tuple(phases[i] for i in rng.integers(0, len(phases), n)),
        nodes=nodes,
        throughput=np.round(nodes.sum(axis=1) * rng.uniform(1.0, 9.0, n), draw(st.integers(0, 4))),
    )
    rows = []
    for model in models:
        for phase in PHASES:
            floor = int(rng.integers(0, 3)) if draw(st.integers(0, 5)) == 0 else 0
            cap = floor + int(rng.integers(0, 4)) if draw(st.integers(0, 5)) == 0 else None
            tokens = float(np.round(rng.choice([0.0, rng.uniform(1, 60), rng.uniform(1, 200)]), 3))
            rows.append(
                DemandRow(
                    model=model,
                    phase=phase,
                    tokens_per_s=tokens,
                    requests_per_s=float(rng.uniform(5, 60)),
                    weight=float(rng.choice([0.5, 1.0, 2.0])),
                    min_instances=floor,
                    max_instances=cap,
                )
            )
    running = tuple(
        Running(template=f"t{i}", region=f"r{k}", count=int(rng.integers(1, 4)))
        for i in range(n)
        for k in range(r)
        if rng.uniform() < 0.1
    )
    return AllocationProblem(
        regions=tuple(f"r{i}" for i in range(r)),
        configs=tuple(f"c{i}" for i in range(c)),
        available=rng.integers(0, held, (r, c)),
        price_usd_per_h=np.round(rng.uniform(0.1, 10.0, (r, c)), 2),
        templates=templates,
        demand=tuple(rows),
        running=running,
        churn_k=float(draw(st.sampled_from([0.0, 0.1, 0.5]))),
        options=AllocationOptions(pd_same_region=draw(st.booleans()), gap_frac=1e-6, solver="highs"),
    )


def needs(result):
    return sum(result.floor_deficit.values()), result.statistics["shortfall_weighted"]


def same_needs(a, b):
    return needs(a)[0] == needs(b)[0] and abs(needs(a)[1] - needs(b)[1]) < 1e-7


def equal(a, b):
    return same_needs(a, b) and a.objective_usd_per_h == pytest.approx(b.objective_usd_per_h, rel=3e-6, abs=1e-6)


FAMILIES = ("spare", "regions", "on_demand", "preferences", "exclusions", "budget")


@st.composite
def restricted(draw, chosen):
    """A problem with the chosen families on, most of its models served in full."""
    problem = draw(problems())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for row in problem.demand:
        parts = rng.dirichlet(np.ones(len(problem.regions) + 1))[:-1] / 2
        asked = {
            "spare": {"spare_instances": int(rng.integers(0, 2))},
            "regions": {"region_fracs": tuple(zip(problem.regions, map(float, parts), strict=True))},
            "on_demand": {"on_demand_frac": float(rng.choice([0.0, 0.4, 1.0]))},
        }
        changes = {key: value for family in sorted(chosen & asked.keys()) for key, value in asked[family].items()}
        easier = {"tokens_per_s": row.tokens_per_s / 4, "requests_per_s": row.requests_per_s / 4}
        rows.append(replace(row, **easier, **changes))
    problem = replace(problem, demand=tuple(rows), spot_configs=problem.configs[:1])
    if "preferences" in chosen:
        items = (Preference(config=problem.configs[-1], price_factor=2.5), Preference(model="m", price_factor=0.4))
        problem = replace(problem, preferences=items)
    if "exclusions" in chosen:
        items = (Exclusion(model="m", region=problem.regions[0]), Exclusion(config=problem.configs[0], region="r0"))
        problem = replace(problem, exclusions=items)
    if "budget" in chosen:
        free = solve_allocation(problem).cost_usd_per_h
        problem = replace(problem, options=replace(problem.options, budget_usd_per_h=free * 0.7 + 0.0123))
    return problem


@settings(max_examples=60)
@given(data=st.data())
def test_reductions_are_lossless_with_one_family_or_two(data):
    chosen = data.draw(st.sets(st.sampled_from(FAMILIES), min_size=1, max_size=2))
    problem = data.draw(restricted(chosen))
    whole = solve_allocation(replace(problem, options=replace(problem.options, reduce=False)))
    assert equal(whole, solve_allocation(problem))


@settings(max_examples=25)
@given(problem=restricted({"spare"}))
def test_a_spare_costs_and_ends_shortfall_of_serving_no_sooner(problem):
    without = replace(problem, demand=tuple(replace(row, spare_instances=0) for row in problem.demand))
    plain, spared = solve_allocation(without), solve_allocation(problem)
    assert needs(spared)[1] >= needs(plain)[1] - 1e-7
    if spared.full:
        assert plain.full
        assert spared.objective_usd_per_h >= plain.objective_usd_per_h * (1 - 3e-6) - 1e-6


@settings(max_examples=50)
@given(problem=problems())
def test_reductions_are_lossless(problem):
    whole = solve_allocation(replace(problem, options=replace(problem.options, reduce=False)))
    reduced = solve_allocation(problem)
    assert equal(whole, reduced)
    assert reduced.statistics["columns"] <= whole.statistics["columns"]


@settings(max_examples=40)
@given(problem=problems(), data=st.data())
def test_more_nodes_or_lower_prices_never_cost_more(problem, data):
    base = solve_allocation(problem)
    r = data.draw(st.integers(0, len(problem.regions) - 1))
    c = data.draw(st.integers(0, len(problem.configs) - 1))
    more = problem.available.copy()
    more[r, c] += data.draw(st.integers(1, 5))
    richer = solve_allocation(replace(problem, available=more))
    assert needs(richer) <= (needs(base)[0], needs(base)[1] + 1e-7)
    if same_needs(richer, base):
        assert richer.objective_usd_per_h <= base.objective_usd_per_h * (1 + 3e-6) + 1e-6
    lower = problem.price_usd_per_h.copy()
    lower[r, c] *= data.draw(st.floats(0.1, 1.0))
    cheaper = solve_allocation(replace(problem, price_usd_per_h=lower))
    assert same_needs(cheaper, base)
    assert cheaper.objective_usd_per_h <= base.objective_usd_per_h * (1 + 3e-6) + 1e-6


@settings(max_examples=30)
@given(problem=problems(), factor=st.floats(0.01, 50.0))
def test_scaling_prices_scales_the_cost(problem, factor):
    base = solve_allocation(problem)
    scaled = solve_allocation(replace(problem, price_usd_per_h=problem.price_usd_per_h * factor))
    assert same_needs(base, scaled)
    assert scaled.objective_usd_per_h == pytest.approx(base.objective_usd_per_h * factor, rel=3e-6, abs=1e-6)


@settings(max_examples=30)
@given(problem=problems(), data=st.data())
def test_order_of_inputs_is_irrelevant(problem, data):
    def shuffled(n):
        return data.draw(st.permutations(range(n)))

    t, r, c = (shuffled(len(x)) for x in (problem.templates, problem.regions, problem.configs))
    x = problem.templates
    other = replace(
        problem,
        regions=tuple(problem.regions[i] for i in r),
        configs=tuple(problem.configs[i] for i in c),
        available=problem.available[np.ix_(r, c)],
        price_usd_per_h=problem.price_usd_per_h[np.ix_(r, c)],
        templates=TemplateColumns(
            ids=tuple(x.ids[i] for i in t),
            models=tuple(x.models[i] for i in t),
            phases=tuple(x.phases[i] for i in t),
            nodes=x.nodes[np.ix_(t, c)],
            throughput=x.throughput[list(t)],
        ),
        demand=tuple(problem.demand[i] for i in shuffled(len(problem.demand))),
        running=tuple(problem.running[i] for i in shuffled(len(problem.running))),
    )
    assert equal(solve_allocation(problem), solve_allocation(other))


@settings(max_examples=30)
@given(problem=problems(), data=st.data())
def test_a_dominated_template_never_matters(problem, data):
    x = problem.templates
    i = data.draw(st.integers(0, len(x) - 1))
    worse = x.nodes[i] + np.array(
        data.draw(st.lists(st.integers(0, 2), min_size=x.nodes.shape[1], max_size=x.nodes.shape[1]))
    )
    extended = TemplateColumns(
        ids=(*x.ids, "worse"),
        models=(*x.models, x.models[i]),
        phases=(*x.phases, x.phases[i]),
        nodes=np.vstack((x.nodes, worse)),
        throughput=np.append(x.throughput, x.throughput[i] * data.draw(st.floats(0.1, 1.0))),
    )
    more = solve_allocation(replace(problem, templates=extended))
    assert equal(solve_allocation(problem), more)
    assert all(item.template != "worse" for item in more.instances)


@settings(max_examples=20)
@given(problem=problems())
def test_no_demand_costs_nothing(problem):
    idle = tuple(replace(row, tokens_per_s=0.0, min_instances=0) for row in problem.demand)
    result = solve_allocation(replace(problem, demand=idle))
    assert result.objective_usd_per_h == 0
    assert not result.instances
    assert result.full


@settings(max_examples=50)
@given(problem=problems())
def test_baselines_are_never_better(problem):
    ours, joint, greedy = solve_allocation(problem), homo_joint(problem), homo(problem)
    assert (joint.method, greedy.method) == ("homo_joint", "homo")
    single = {
        t for t, n in zip(problem.templates.ids, (problem.templates.nodes > 0).sum(axis=1), strict=True) if n == 1
    }
    for result in (joint, greedy):
        assert all(item.template in single for item in result.instances)
    order = [standing(problem, x) for x in (ours, joint, greedy)]
    for better, worse in itertools.pairwise(order):
        assert better[0] <= worse[0]
        if better[0] == worse[0]:
            assert better[1] <= worse[1] + 1e-7
            if worse[1] - better[1] < 1e-7:
                assert better[2] <= worse[2] * (1 + 3e-6) + 1e-6


def standing(problem, result):
    weights = [row.weight for row in problem.demand]
    short = sum(w * x.frac for w, x in zip(weights, result.shortfall, strict=True))
    return sum(result.floor_deficit.values()), short, result.objective_usd_per_h


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 60),
    c=st.integers(1, 5),
    kernel=st.sampled_from(["numpy", "compiled", "python"]),
)
def test_dominance_is_what_its_definition_says(seed, n, c, kernel):
    rng = np.random.default_rng(seed)
    nodes, throughput = rng.integers(0, 3, (n, c)), rng.integers(1, 8, n).astype(float)
    with pytest.MonkeyPatch.context() as patch:
        if kernel == "python":
            patch.setattr(skyline, "_scan", skyline._scan.py_func)
        if kernel != "numpy":
            patch.setattr("coral_core.allocation.reduce._PAIRWISE_MAX", -1)
        flags = dominated(throughput, nodes)
    kept = [i for i in range(n) if not flags[i]]
    below = [[(nodes[j] <= nodes[i]).all() and throughput[j] >= throughput[i] for j in range(n)] for i in range(n)]
    assert all(any(below[i][j] for j in kept) for i in range(n))  # everything dropped is replaced by something kept
    assert not any(below[i][j] for i in kept for j in kept if i != j)  # and nothing kept is superfluous


@settings(max_examples=60)
@given(items=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=20))
def test_price_front_keeps_a_replacement_for_everything(items):
    price, throughput = (np.array([x[k] for x in items], dtype=float) for k in (0, 1))
    keep = price_front(price, throughput)
    kept = [x for x, flag in zip(items, keep, strict=True) if flag]
    assert all(any(p <= price and t >= tput for p, t in kept) for price, tput in items)
    assert len({p for p, _ in kept}) == len(kept) == len({t for _, t in kept})


@settings(max_examples=30)
@given(problem=problems())
def test_what_runs_is_never_reduced_away(problem):
    result = solve_allocation(problem)
    reduction = reduce_columns(problem, coverage_of(problem))
    assert list(reduction.counts.values()) == sorted(reduction.counts.values(), reverse=True)
    # rerunning the plan from itself adds no churn and changes nothing that is cheaper to keep
    again = replace(
        problem, running=tuple(Running(template=i.template, region=i.region, count=i.count) for i in result.instances)
    )
    kept = solve_allocation(again)
    assert same_needs(kept, result)
    assert kept.objective_usd_per_h <= result.cost_usd_per_h * (1 + 3e-6) + 1e-6


@settings(max_examples=60)
@given(problem=problems(), first=st.sampled_from([2, 400]))
def test_tolls_give_what_the_whole_program_gives(problem, first):
    """The path of wide scarce problems, on small ones with all that it allows: churn, regions, aggregated templates."""
    rows = tuple(
        replace(row, min_instances=0, max_instances=None, requests_per_s=20.0, tokens_per_s=row.tokens_per_s * 0.3)
        for row in problem.demand
    )
    problem = replace(problem, demand=rows, available=problem.available + 4)
    wanted = counts_of(problem, solve_allocation(problem)).T @ problem.templates.nodes
    problem = replace(problem, available=np.maximum(np.where(wanted > 0, wanted - 1, problem.available), 0))
    whole = solve_allocation(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coral_core.allocation.decompose.COVER_FROM_TEMPLATES", 0)
        patch.setattr("coral_core.allocation.joint.WIDE_FROM_COLUMNS", 0)
        patch.setattr("coral_core.allocation.joint._FIRST_COLUMNS", first)
        tolled = solve_allocation(problem)
    assert equal(whole, tolled)
    assert tolled.bound_usd_per_h <= whole.objective_usd_per_h * (1 + 1e-9)
    assert tolled.status is whole.status
