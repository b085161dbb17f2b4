"""Dropping dominated templates never changes a plan's cost or shortfall (brute force over all small plans)."""

import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coral_core.placement.combinations import enumerate_combinations
from coral_core.placement.dominance import undominated
from coral_core.placement.lattice import LatticePlacement
from tests.property.test_placement_laws import random_table


def best_plan(counts, throughput, *, available, price, demand, most):
    """(shortfall, cost) of the best plan of at most `most` instances in one region, by trying all.

    Shortfalls that differ by rounding alone are equal: the cheapest of them counts.
    """
    plans = [(demand, 0.0)]
    for size in range(1, most + 1):
        for chosen in itertools.combinations_with_replacement(range(len(counts)), size):
            used = counts[list(chosen)].sum(axis=0)
            if (used <= available).all():
                short = max(0.0, demand - throughput[list(chosen)].sum())
                plans.append((short, float(used @ price)))
    least = min(short for short, _ in plans)
    slack = 1e-9 * max(demand, 1.0)
    return least, min(cost for short, cost in plans if short <= least + slack)


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=60)
@example(308789, False)
def test_the_pruned_library_has_the_same_best_plan(seed, is_whole):
    rng = np.random.default_rng(seed)
    n_configs, layers = int(rng.integers(2, 4)), int(rng.integers(2, 6))
    table = random_table(rng, n_configs=n_configs, layers=layers, s_max=3, whole=is_whole)
    ones = np.ones(n_configs)
    counts = enumerate_combinations(memory_bytes=ones, usable_memory_bytes=ones, model_bytes=1.5, n_max=3, rho=1e6)
    placed = LatticePlacement().place(table, counts)
    if len(placed) == 0:
        return
    all_rows = placed.counts.astype(np.int64)
    keep = undominated(placed.counts, placed.throughput)
    available = rng.integers(0, 5, n_configs)
    price = rng.choice([0.5, 1.0, 1.3, 3.0], n_configs)
    for demand in rng.uniform(0, 4, 3) * placed.throughput.max():
        for most in (1, 3):  # a cap on the number of instances
            limits = {"available": available, "price": price, "demand": demand, "most": most}
            whole = best_plan(all_rows, placed.throughput, **limits)
            pruned = best_plan(all_rows[keep], placed.throughput[keep], **limits)
            np.testing.assert_allclose(pruned, whole, rtol=1e-12, atol=1e-9 * placed.throughput.max())


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_another_node_never_costs_throughput(seed):
    """Why the pass needs no more than the multisets themselves: an idle node can always join a stage."""
    rng = np.random.default_rng(seed)
    table = random_table(rng, n_configs=3, layers=int(rng.integers(1, 7)), s_max=4)
    ones = np.ones(3)
    counts = enumerate_combinations(memory_bytes=ones, usable_memory_bytes=ones, model_bytes=0.5, n_max=4, rho=1e6)
    placed = LatticePlacement().place(table, counts)
    value = {tuple(row): t for row, t in zip(placed.counts.tolist(), placed.throughput, strict=True)}
    for row, t in value.items():
        for c in range(3):
            less = tuple(n - (i == c) for i, n in enumerate(row))
            assert value.get(less, 0.0) <= t * (1 + 1e-12)
