"""Laws of the tables over a region's nodes, of whole plans of units, of their prices and of branching."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation import lattice_kernel
from coral_core.allocation.baselines.homo_joint import homo_joint
from coral_core.allocation.branch import branch
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.lattice import Closure, NodeLattice
from coral_core.allocation.plan_tolls import Aim, PlanBook, bounds_if_used, find_plan_prices, price_units
from coral_core.allocation.unit_plans import UnitPlans
from coral_core.allocation.wide import Effort
from coral_core.domain.allocation import (
    AllocationOptions,
    AllocationProblem,
    DemandRow,
    Running,
    TemplateColumns,
)
from coral_core.domain.workload import Phase
from coral_core.solver.highs import HighsSolver

SOLVER = HighsSolver()
HELD = st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)


def effort(gap_frac=0.0, limit_s=600.0):
    return Effort(gap_frac=gap_frac, deadline_s=time.perf_counter() + limit_s)


def below(held):
    return [np.array(counts) for counts in itertools.product(*(range(n + 1) for n in held))]


@st.composite
def templates(draw, held):
    """Node counts within what is held, and fractions covered."""
    fitting = [tuple(counts.tolist()) for counts in below(held) if counts.any()]
    chosen = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=6))
    return np.array(chosen), np.array([draw(st.sampled_from([0.1, 0.25, 0.3, 0.6, 1.0])) for _ in chosen])


def most(nodes, frac, held):
    """The most that any instances cover within what is held, by trying all."""
    return max(
        (frac[i] + most(nodes, frac, held - nodes[i]) for i in range(len(nodes)) if (nodes[i] <= held).all()),
        default=0.0,
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), held=HELD, python=st.booleans())
def test_a_closure_covers_the_most_and_says_how(data, held, python):
    held = np.array(held)
    nodes, frac = data.draw(templates(held))
    with pytest.MonkeyPatch.context() as patch:
        if python:
            for name in ("close", "join_least", "join_sum"):
                patch.setattr(lattice_kernel, name, getattr(lattice_kernel, name).py_func)
        lattice = NodeLattice.of(held)
        closure = Closure.of(lattice, np.arange(len(nodes)), nodes, frac)
        joined = lattice.least_of(closure.table, closure.table), lattice.sum_of(closure.table, closure.table)
    assert len(lattice) == len(below(held))
    for state, counts in enumerate(lattice.nodes(np.arange(len(lattice)), len(held))):
        assert lattice.states(counts[None, :])[0] == state
        assert closure.table[state] == pytest.approx(most(nodes, frac, counts))
        used = closure.instances(state)
        assert (sum((n * nodes[t] for t, n in used.items()), start=np.zeros(len(held))) <= counts).all()
        assert math.fsum(n * frac[t] for t, n in used.items()) == pytest.approx(closure.table[state])
        splits = lattice.below(state)
        left, right = closure.table[splits], closure.table[state - splits]
        assert joined[0][state] == pytest.approx(np.minimum(left, right).max())
        assert joined[1][state] == pytest.approx((left + right).max())


def test_too_many_multisets_are_not_tabulated():
    assert NodeLattice.of(np.full(12, 3)) is None
    assert NodeLattice.of(np.full(30, 1)) is None
    assert len(NodeLattice.of(np.zeros(3, dtype=np.int64))) == 1


@st.composite
def books(draw):
    """Plans of two units in two regions, not of any templates."""
    regions, configs, units = 2, 2, draw(st.integers(1, 3))
    available = np.array([[draw(st.integers(0, 2)) for _ in range(configs)] for _ in range(regions)])
    plans = []
    for _ in range(units):
        own = []
        for r in range(regions):
            held = [counts for counts in below(available[r]) if counts.any()]
            nodes = draw(st.lists(st.sampled_from(held), max_size=4)) if held else []
            nodes = np.array([np.zeros(configs, dtype=np.int64), *nodes])
            n = len(nodes)
            served = [0.0, *(draw(st.sampled_from([0.2, 0.35, 0.5, 0.8, 1.0])) for _ in range(n - 1))]
            price = [0.0, *(draw(st.integers(1, 20)) / 4 for _ in range(n - 1))]
            own.append(
                UnitPlans(
                    nodes=nodes,
                    served_frac=np.array(served),
                    price_usd_per_h=np.array(price),
                    kept=np.zeros(n, dtype=np.int64),
                    state=np.arange(n),
                    held=available[r],
                    kinds=(),
                    choices=(),
                )
            )
        plans.append(own)
    weight = np.array([draw(st.sampled_from([1.0, 2.0, 5.0])) for _ in range(units)])
    return PlanBook(weight=weight, available=available, plans=plans)


def choices(book):
    """Every choice of plans that fits."""
    for flat in itertools.product(*(range(len(plans)) for own in book.plans for plans in own)):
        choice = np.array(flat).reshape(len(book.plans), -1)
        used = np.sum(
            [
                [plans.nodes[g] for plans, g in zip(own, row, strict=True)]
                for own, row in zip(book.plans, choice, strict=True)
            ],
            axis=0,
        )
        if (used <= book.available).all():
            yield choice


def value(book, aim, choice):
    short = book.shortfall(choice)
    if not aim.by_cost:
        return short
    return book.price_usd_per_h(choice) if short <= aim.shortfall + 1e-9 else math.inf


@st.composite
def aims(draw, book):
    if draw(st.booleans()):
        return Aim(shortfall=None)
    return Aim(shortfall=book.shortfall(draw(st.sampled_from(list(choices(book))))))


@settings(max_examples=50, deadline=None)
@given(data=st.data(), book=books())
def test_any_prices_prove_bounds(data, book):
    """Weak duality: whatever the tolls, no plan is better, and none that uses a plan of a unit better than its bound."""
    aim = data.draw(aims(book))
    toll = np.array([[data.draw(st.sampled_from([0.0, 0.1, 1.0, 3.0])) for _ in row] for row in book.available])
    prices = price_units(book, aim, toll, data.draw(st.sampled_from([0.0, 0.5, 4.0])) if aim.by_cost else 1.0)
    least = bounds_if_used(book, aim, prices)
    for choice in choices(book):
        reached = value(book, aim, choice)
        assert prices.bound <= reached + 1e-9
        for u, r in np.ndindex(choice.shape):
            assert least[u][r][choice[u, r]] <= reached + 1e-9


@settings(max_examples=50, deadline=None)
@given(data=st.data(), book=books())
def test_branching_finds_the_best_and_proves_it(data, book):
    aim = data.draw(aims(book))
    every = list(choices(book))
    best = min(value(book, aim, choice) for choice in every)
    known = value(book, aim, data.draw(st.sampled_from([c for c in every if value(book, aim, c) < math.inf])))
    root = find_plan_prices(book, aim, SOLVER, effort())
    assert root.prices.bound <= best + 1e-9
    found = branch(book, aim, root, SOLVER, effort(), value=known, room=lambda _: 1e-7, improve=lambda _: math.inf)
    reached = min([known, *(value(book, aim, origin[:, :, 1]) for origin in found.origins)])
    assert found.bound <= best + 1e-9
    assert reached == pytest.approx(best, abs=1e-6)
    assert found.bound == pytest.approx(best, abs=1e-5)


@st.composite
def scarce_problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, c, r = draw(st.integers(20, 60)), 4, draw(st.integers(1, 2))
    nodes = rng.integers(0, 2, (n, c))
    nodes[np.arange(n), rng.integers(0, c, n)] += 1
    rows = tuple(
        DemandRow(
            model=model,
            phase=phase,
            tokens_per_s=float(rng.uniform(10, 40)),
            requests_per_s=10.0,
            weight=float(rng.choice([1.0, 2.0])),
        )
        for model in ("m", "n")
        for phase in (Phase.PREFILL, Phase.DECODE)
    )
    same_region = draw(st.booleans())
    phases = [Phase.PREFILL, Phase.DECODE, *([Phase.AGGREGATED] if same_region else [])]
    return AllocationProblem(
        regions=tuple(f"r{i}" for i in range(r)),
        configs=tuple(f"c{i}" for i in range(c)),
        available=rng.integers(0, 4, (r, c)),
        price_usd_per_h=np.round(rng.uniform(0.5, 8.0, (r, c)), 2),
        templates=TemplateColumns(
            ids=tuple(f"t{i}" for i in range(n)),
            models=tuple(rng.choice(("m", "n"), n).tolist()),
            phases=tuple(phases[i] for i in rng.integers(0, len(phases), n)),
            nodes=nodes,
            throughput=np.round(nodes.sum(axis=1) * rng.uniform(1.0, 9.0, n), 2),
        ),
        demand=rows,
        running=tuple(
            Running(template=f"t{i}", region=f"r{k}", count=1)
            for i in range(n)
            for k in range(r)
            if rng.uniform() < 0.05
        ),
        churn_k=draw(st.sampled_from([0.0, 0.2])),
        options=AllocationOptions(
            pd_same_region=same_region, gap_frac=draw(st.sampled_from([1e-6, 0.05])), solver="highs"
        ),
    )


def standing(result):
    return result.statistics["shortfall_weighted"], result.objective_usd_per_h


@settings(max_examples=40, deadline=None)
@given(problem=scarce_problems())
def test_plans_of_units_give_what_the_whole_program_gives(problem):
    exact = replace(problem, options=replace(problem.options, gap_frac=1e-6))
    whole = solve_allocation(exact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coral_core.allocation.scarce.FROM_COLUMNS", 0)
        patch.setattr("coral_core.allocation.scarce._FIRST_PLANS", 20)
        found = solve_allocation(problem)
    short, cost = standing(whole)
    assert found.statistics["shortfall_bound"] <= short + 1e-6
    assert found.statistics["shortfall_weighted"] >= short - 1e-6
    if found.statistics["shortfall_weighted"] <= short + 1e-7:
        assert found.bound_usd_per_h <= cost * (1 + 1e-7) + 1e-7
        assert cost * (1 - 3e-6) - 1e-6 <= found.objective_usd_per_h
    assert found.statistics["shortfall_weighted"] <= short + problem.options.gap_frac * short + 1e-6
    assert found.gap_frac <= problem.options.gap_frac + 1e-9


@settings(max_examples=30, deadline=None)
@given(problem=scarce_problems(), tabulated=st.booleans(), limit_s=st.sampled_from([1e-6, 600.0]))
def test_no_plan_is_worse_than_over_homogeneous_templates_or_what_runs(problem, tabulated, limit_s):
    """Whatever the gap wished for; out of time, no worse than doing nothing."""
    problem = replace(problem, options=replace(problem.options, time_limit_s=limit_s))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coral_core.allocation.scarce.FROM_COLUMNS", 0 if tabulated else 10**9)
        found, homogeneous = solve_allocation(problem), homo_joint(problem)
    if limit_s > 1:
        assert standing(found)[0] <= standing(homogeneous)[0] + 1e-6
        if abs(standing(found)[0] - standing(homogeneous)[0]) <= 1e-7:
            assert found.objective_usd_per_h <= homogeneous.objective_usd_per_h * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(problem=scarce_problems())
def test_the_shortfall_bound_of_tolls_holds(problem):
    """The way of wide programs, cut short of most columns: what it proves of the shortfall is no more than the least."""
    exact = replace(problem, options=replace(problem.options, gap_frac=1e-6))
    short, _ = standing(solve_allocation(exact))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coral_core.allocation.scarce.FROM_COLUMNS", 10**9)
        patch.setattr("coral_core.allocation.decompose.COVER_FROM_TEMPLATES", 0)
        patch.setattr("coral_core.allocation.joint.WIDE_FROM_COLUMNS", 0)
        patch.setattr("coral_core.allocation.joint._FIRST_COLUMNS", 2)
        found = solve_allocation(problem)
    assert found.statistics["shortfall_bound"] <= short + 1e-6


def test_the_time_limit_is_kept_with_a_plan_and_true_bounds():
    rng = np.random.default_rng(7)
    n, c, models = 4_000, 14, ("k", "l", "m", "n")
    nodes = rng.multinomial(1, np.ones(c) / c, n) + rng.multinomial(2, np.ones(c) / c, n)
    problem = AllocationProblem(
        regions=("east", "west"),
        configs=tuple(f"c{i}" for i in range(c)),
        available=rng.integers(0, 3, (2, c)),
        price_usd_per_h=rng.uniform(1.0, 9.0, (2, c)),
        templates=TemplateColumns(
            ids=tuple(f"t{i}" for i in range(n)),
            models=tuple(rng.choice(models, n).tolist()),
            phases=tuple((Phase.PREFILL, Phase.DECODE)[i] for i in rng.integers(0, 2, n)),
            nodes=nodes,
            throughput=nodes.sum(axis=1) * rng.uniform(1.0, 9.0, n),
        ),
        demand=tuple(
            DemandRow(model=model, phase=phase, tokens_per_s=60.0)
            for model in models
            for phase in (Phase.PREFILL, Phase.DECODE)
        ),
        options=AllocationOptions(pd_same_region=True, gap_frac=0.0, solver="highs", time_limit_s=0.001),
    )
    solve_allocation(problem)  # loads what is compiled
    started_s = time.process_time()  # what this process works: the machine may stand still, or work for others
    hasty = solve_allocation(replace(problem, options=replace(problem.options, time_limit_s=1.0)))
    assert time.process_time() - started_s < 15.0
    patient = solve_allocation(replace(problem, options=replace(problem.options, gap_frac=0.05, time_limit_s=4.0)))
    assert hasty.statistics["shortfall_bound"] <= patient.statistics["shortfall_weighted"] + 1e-6
    assert patient.statistics["shortfall_bound"] <= hasty.statistics["shortfall_weighted"] + 1e-6
