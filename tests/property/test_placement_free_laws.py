"""Laws of the free latency split: bulk = one by one, never below the published split, order irrelevant."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.catalog import load_catalog, load_models
from coral_core.domain.placement import PlacementStatus
from coral_core.domain.workload import Phase, Slo
from coral_core.perf import capacity_table
from coral_core.perf.budgets import budget_table
from coral_core.placement import enumerate_combinations, verify_placed
from coral_core.placement.free import FreePlacement
from coral_core.placement.free_verify import verify_free_placed, verify_free_placement
from coral_core.placement.lattice import LatticePlacement
from coral_core.placement.problem import placement_at, problem_at
from coral_core.workload import named_lengths
from tests.fakes.free_cases import free_table


def all_combinations(n_configs, n_max):
    ones = np.ones(n_configs)
    return enumerate_combinations(memory_bytes=ones, usable_memory_bytes=ones, model_bytes=0.5, n_max=n_max, rho=1e9)


def by_combination(placed):
    return {tuple(row.tolist()): value for row, value in zip(placed.counts, placed.throughput, strict=True)}


@st.composite
def tables(draw, n_max=4):
    return free_table(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        n_configs=draw(st.integers(1, 3)),
        layers=draw(st.integers(1, 7)),
        grid=draw(st.sampled_from([1, 2, 5, 12, 60])),
        s_max=n_max,
        ties=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(tables())
def test_bulk_is_one_by_one_verified_and_never_below_the_published_split(table):
    counts = all_combinations(len(table.configs), 4)
    placed = FreePlacement().place(table, counts)
    verify_free_placed(table, placed)
    free, published = by_combination(placed), by_combination(LatticePlacement().place(table, counts))
    assert free.keys() >= published.keys()
    assert all(free[key] >= value for key, value in published.items())
    rows = {key: row for row, key in enumerate(free)}
    for one in counts[:: max(1, len(counts) // 12)]:
        problem = problem_at(table, one)
        result = FreePlacement().solve(problem)
        key = tuple(one.tolist())
        assert result.throughput_tokens_per_s == free.get(key, 0.0)
        assert (result.status is PlacementStatus.OPTIMAL) == (key in free)
        if key in free:
            verify_free_placement(problem, result.placement, result.throughput_tokens_per_s)
            assert placement_at(placed, table.configs, rows[key]) == result.placement
    assert placed.statistics["infeasible"] == len(counts) - len(placed)


@settings(max_examples=25, deadline=None)
@given(tables(n_max=3), st.randoms(use_true_random=False))
def test_the_order_of_configurations_and_nodes_is_irrelevant(table, random):
    order = list(range(len(table.configs)))
    random.shuffle(order)
    shuffled = replace(
        table,
        configs=tuple(table.configs[c] for c in order),
        throughput=table.throughput[:, order],
        budgets=replace(table.budgets, throughput=table.budgets.throughput[:, order]),
    )
    counts = all_combinations(len(order), 3)
    one = by_combination(FreePlacement().place(table, counts))
    other = by_combination(FreePlacement().place(shuffled, counts[:, order]))
    assert one == pytest.approx({tuple(np.array(key)[np.argsort(order)].tolist()): v for key, v in other.items()})


@settings(max_examples=25, deadline=None)
@given(tables(n_max=4))
def test_another_node_never_gives_less(table):
    free = by_combination(FreePlacement().place(table, all_combinations(len(table.configs), 4)))
    for key, value in free.items():
        for c in range(len(key)):
            more = (*key[:c], key[c] + 1, *key[c + 1 :])
            assert sum(more) > 4 or free[more] >= value


@settings(max_examples=25, deadline=None)
@given(tables(n_max=3), st.integers(2, 3))
def test_a_finer_grid_never_gives_less(table, finer):
    """The same capacities as steps of a finer grid: every old budget is among the new ones."""
    budgets = np.zeros((table.budgets.grid * finer, *table.budgets.throughput.shape[1:]))
    for beta in range(1, len(budgets) + 1):
        budgets[beta - 1] = table.budgets.throughput[beta // finer - 1] if beta >= finer else 0
    # Equal shares that the coarse grid lacks are published capacities of their own; they must agree with the steps.
    published = table.throughput.copy()
    for stages in range(2, len(published) + 1):
        if len(budgets) % stages == 0:
            published[stages - 1] = budgets[len(budgets) // stages - 1]
    coarse = replace(table, throughput=published)
    fine = replace(coarse, budgets=replace(table.budgets, throughput=budgets, layout=np.zeros(budgets.shape, np.int16)))
    counts = all_combinations(len(table.configs), 3)
    of_coarse, of_fine = (by_combination(FreePlacement().place(t, counts)) for t in (coarse, fine))
    assert all(of_fine[key] >= value for key, value in of_coarse.items())


def real_table(phase, n_max):
    catalog = load_catalog("paper-core")
    given_ = {
        "shape": load_models()["qwen3-32b"],
        "variant": "bf16",
        "phase": phase,
        "slo": Slo(ttft_s=1.6, tpot_s=0.1),
        "lengths": named_lengths("azure-conv"),
        "configs": [catalog.configs[name] for name in sorted(catalog.configs)][::2],
    }
    return replace(capacity_table(max_stages=n_max, **given_), budgets=budget_table(**given_))


@pytest.mark.parametrize("phase", list(Phase))
def test_on_the_catalogue_the_gain_is_real_and_nothing_gets_worse(phase):
    table = real_table(phase, 5)
    counts = enumerate_combinations(
        memory_bytes=table.memory_bytes,
        usable_memory_bytes=table.usable_memory_bytes,
        model_bytes=table.model_bytes,
        n_max=5,
        rho=12,
    )
    published, free = LatticePlacement().place(table, counts), FreePlacement().place(table, counts)
    verify_placed(table, published)
    verify_free_placed(table, free)
    before = by_combination(published)
    gains = np.array([value / before[key] for key, value in by_combination(free).items() if key in before])
    assert len(gains) == len(published)
    assert (gains >= 1).all()
    assert (gains > 1.01).any()
    assert free.statistics["improved"] > 0


def test_above_six_nodes_equal_shares_off_the_grid_stay_a_choice():
    """Seven equal nodes that must each be a stage of their own: a seventh of the SLO is not on a grid of 60."""
    table = free_table(np.random.default_rng(0), n_configs=1, layers=7, grid=60, s_max=7)
    budgets = np.zeros_like(table.budgets.throughput)
    budgets[7:, 0, 0] = 3.0  # 8/60 is less than a seventh
    budgets[8:, 0, 0] = 4.0  # 9/60 is more: seven such stages exceed the SLO
    published = np.zeros_like(table.throughput)
    for stages in range(2, 7):
        published[stages - 1] = budgets[60 // stages - 1]
    published[6, 0, 0] = 3.5
    table = replace(table, throughput=published, budgets=replace(table.budgets, throughput=budgets))
    counts = np.array([[7]], dtype=np.int16)
    placed = FreePlacement().place(table, counts)
    verify_free_placed(table, placed)
    assert placed.throughput.tolist() == [3.5]
    np.testing.assert_allclose(placed.stage_budget_frac, np.full((1, 7), 1 / 7))
    result = FreePlacement().solve(problem_at(table, counts[0]))
    verify_free_placement(problem_at(table, counts[0]), result.placement, 3.5)
    published[6, 0, 0] = 2.0
    better = FreePlacement().place(table, counts)
    verify_free_placed(table, better)
    assert better.throughput.tolist() == [3.0]
