"""The covering dynamic program against plain search, and its bound against every plan."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation import cover as module
from coral_core.allocation.cover import CoverProblem, Items, cover, covers
from coral_core.allocation.fronts import wide_price_front
from coral_core.allocation.reduce import price_front

PRICES = st.sampled_from([0.0, 0.5, 1.0, 1.1, 2.0, 3.3])
FRACS = st.sampled_from([1 / 3, 0.25, 0.4, 0.5, 0.7, 1.0, 0.123])


@st.composite
def covering(draw):
    number = iter(range(100))

    def items(least, most):
        found = [
            (next(number), draw(PRICES), draw(FRACS), draw(st.sampled_from([math.inf, math.inf, 1.0, 2.0, 3.0])))
            for _ in range(draw(st.integers(least, most)))
        ]
        columns = list(zip(*found, strict=True)) if found else [()] * 4
        return Items(
            column=np.array(columns[0], dtype=np.int64),
            price_usd_per_h=np.array(columns[1], dtype=float),
            covered_frac=np.array(columns[2], dtype=float),
            upper=np.array(columns[3], dtype=float),
        )

    rows = draw(st.integers(1, 2))
    places = tuple(tuple(items(1, 2) for _ in range(rows)) for _ in range(draw(st.integers(0, 3))))
    return CoverProblem(places=places, everywhere=items(0, 2))


def least(problem):
    """Exhaustive search with exact arithmetic on what matters: every number of every item up to what covers alone."""

    def states(items):
        found = {0.0: 0.0}
        for price, frac, upper in zip(items.price_usd_per_h, items.covered_frac, items.upper, strict=True):
            most = int(min(upper, math.ceil(1 / frac)))
            found = _better(
                ((done + n * frac, cost + n * price) for done, cost in found.items() for n in range(most + 1))
            )
        return found

    total = states(problem.everywhere)
    for rows in problem.places:
        own = {}
        for k, items in enumerate(rows):
            row = states(items)
            own = row if k == 0 else _better((min(a, b), c + d) for a, c in own.items() for b, d in row.items())
        total = _better((a + b, c + d) for a, c in total.items() for b, d in own.items())
    return min((cost for done, cost in total.items() if done >= 1 - 1e-12), default=math.inf)


def _better(pairs):
    found = {}
    for done, cost in pairs:
        key = min(done, 1.0 + 1e-6)
        found[key] = min(cost, found.get(key, math.inf))
    front, cheapest = {}, math.inf
    for done in sorted(found, reverse=True):
        if found[done] < cheapest:
            cheapest = found[done]
            front[done] = cheapest
    return front


@settings(max_examples=200, deadline=None)
@given(problem=covering(), first=st.sampled_from([3, 50, 2048]), gap=st.sampled_from([0.0, 1e-3]))
def test_cover_is_between_its_bound_and_the_optimum(problem, first, gap):
    best = least(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FIRST_UNITS", first)
        patch.setattr(module, "_MAX_UNITS", first * 16)
        patch.setattr(module, "_MAX_UNITS_ONE_PLACE", first * 16)
        found = cover(problem, gap_frac=gap)
    if found.plan is None:
        assert found.bound_usd_per_h <= best + 1e-9
        assert best == math.inf or first == 3  # the coarsest grids may see nothing that covers
        return
    assert covers(problem, found.plan)
    kinds = [*(items for rows in problem.places for items in rows), problem.everywhere]
    upper = {int(j): u for items in kinds for j, u in zip(items.column, items.upper, strict=True)}
    assert all(0 < n <= upper[j] for j, n in found.plan.items())
    assert found.bound_usd_per_h <= best + 1e-9
    assert found.cost_usd_per_h >= best - 1e-9
    if found.cost_usd_per_h - found.bound_usd_per_h <= 1e-9:
        assert found.cost_usd_per_h == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 300), ties=st.booleans())
def test_the_wide_front_is_the_front(seed, n, ties):
    rng = np.random.default_rng(seed)
    price = rng.integers(1, 20, n).astype(float) if ties else rng.uniform(1, 20, n)
    throughput = np.minimum(rng.integers(0, 20, n).astype(float) if ties else rng.uniform(0, 30, n), 25.0)
    price[rng.uniform(size=n) < 0.1] = np.inf
    finite = np.flatnonzero(np.isfinite(price))
    plain = finite[price_front(price[finite], throughput[finite])]
    assert wide_price_front(price, throughput, 25.0).tolist() == plain.tolist()
