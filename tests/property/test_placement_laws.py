"""Laws of every placement method: bulk = one by one, order of nodes irrelevant, more capacity never hurts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacementProblem, PlacementStatus
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError
from coral_core.placement import lattice as lattice_module
from coral_core.placement.combinations import enumerate_combinations
from coral_core.placement.ilp import IlpPlacement
from coral_core.placement.lattice import LatticePlacement
from coral_core.placement.problem import placement_at, problem_at
from coral_core.placement.verify import verify_placed, verify_placement


def table_of(throughput) -> CapacityTable:
    _, n_configs, layers = throughput.shape
    return CapacityTable(
        model="m",
        variant="bf16",
        phase=Phase.DECODE,
        slo=Slo(ttft_s=None, tpot_s=0.1),
        configs=tuple(f"c{c}" for c in range(n_configs)),
        layers=layers,
        throughput=throughput,
        layout=np.where(throughput > 0, 0, -1).astype(np.int16),
        layouts=("tp1 pp1 dp1",),
        sources=(CapacitySource.ESTIMATED,) * n_configs,
        error_frac=(None,) * n_configs,
        memory_bytes=np.ones(n_configs),
        usable_memory_bytes=np.ones(n_configs),
        model_bytes=0.5,
        inputs_hash="none",
    )


def random_table(rng, *, n_configs, layers, s_max, whole=False) -> CapacityTable:
    """Rows that end at a random depth (memory); whole numbers make ties."""
    shape = (s_max, n_configs, layers)
    values = rng.integers(1, 9, shape).astype(float) if whole else rng.uniform(0, 1e4, shape)
    values = -np.sort(-values, axis=2)
    depth = rng.integers(0, layers + 1, (s_max, n_configs, 1))
    return table_of(np.where(np.arange(layers) < depth, values, 0.0))


def all_combinations(n_configs, n_max):
    ones = np.ones(n_configs)
    return enumerate_combinations(memory_bytes=ones, usable_memory_bytes=ones, model_bytes=0.5, n_max=n_max, rho=1e9)


def as_rows(table, placed):
    return [
        (tuple(placed.counts[row].tolist()), placed.throughput[row], placement_at(placed, table.configs, row))
        for row in range(len(placed))
    ]


def one_by_one(table, counts, method):
    results = [(row, method.solve(problem_at(table, row))) for row in counts]
    return [
        (tuple(row.tolist()), result.throughput_tokens_per_s, result.placement)
        for row, result in results
        if result.status is not PlacementStatus.INFEASIBLE
    ]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("n_configs", "n_max", "layers"), [(1, 6, 4), (3, 4, 7), (4, 5, 5), (6, 3, 20)])
def test_bulk_equals_one_by_one_placement_for_placement(whole, n_configs, n_max, layers):
    rng = np.random.default_rng([n_configs, n_max, layers, whole])
    table = random_table(rng, n_configs=n_configs, layers=layers, s_max=n_max, whole=whole)
    counts = all_combinations(n_configs, n_max)
    placed = LatticePlacement().place(table, counts)
    verify_placed(table, placed)
    assert as_rows(table, placed) == one_by_one(table, counts, LatticePlacement())
    assert placed.statistics["combinations"] == len(counts)
    assert placed.statistics["infeasible"] == len(counts) - len(placed)
    assert placed.statistics["unproven"] == 0
    assert placed.proven.all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_any_subset_in_any_order_gives_the_same_rows(seed, n_configs, n_max, layers, whole):
    """Shards may cut the combinations anywhere: what else is in a shard changes nothing."""
    rng = np.random.default_rng(seed)
    table = random_table(rng, n_configs=n_configs, layers=layers, s_max=n_max, whole=whole)
    counts = all_combinations(n_configs, n_max)
    whole_answer = {row[0]: row for row in as_rows(table, LatticePlacement().place(table, counts))}
    chosen = rng.permutation(len(counts))[: rng.integers(0, len(counts) + 1)]
    placed = LatticePlacement().place(table, counts[chosen])
    verify_placed(table, placed)
    expected = [whole_answer[key] for key in map(tuple, counts[chosen].tolist()) if key in whole_answer]
    assert as_rows(table, placed) == expected


def test_repeated_combinations_each_get_their_row():
    table = table_of(np.tile([5.0, 3.0, 2.0], (2, 2, 1)))
    counts = np.array([[1, 1], [1, 0], [1, 1], [1, 0]], dtype=np.int16)
    rows = as_rows(table, LatticePlacement().place(table, counts))
    assert rows[:2] == rows[2:]
    assert len(rows) == 4


def test_the_kernel_interpreted_equals_the_kernel_compiled(monkeypatch):
    """Also what lets coverage see into it."""
    import importlib.util

    import numba

    import coral_core.placement
    from coral_core.placement import lattice_kernel

    table = random_table(np.random.default_rng(6), n_configs=3, layers=6, s_max=4, whole=True)
    counts = all_combinations(3, 4)
    expected = as_rows(table, LatticePlacement().place(table, counts))
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    spec = importlib.util.spec_from_file_location("interpreted_kernel", lattice_kernel.__file__)
    interpreted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interpreted)
    assert interpreted.holds is not lattice_kernel.holds
    monkeypatch.setattr(coral_core.placement, "lattice_kernel", interpreted)
    with np.errstate(over="ignore"):  # keys are meant modulo 2^64
        assert as_rows(table, LatticePlacement().place(table, counts)) == expected


def test_keys_beyond_64_bits_give_the_same_answer(monkeypatch):
    rng = np.random.default_rng(9)
    table = random_table(rng, n_configs=5, layers=6, s_max=4)
    counts = all_combinations(5, 4)
    expected = as_rows(table, LatticePlacement().place(table, counts))
    wide = np.tile(table.throughput, (1, 14, 1))  # 70 configurations, the first five used
    wide_counts = np.zeros((len(counts), 70), dtype=np.int16)
    wide_counts[:, :5] = counts
    spare = np.zeros((65, 70), dtype=np.int16)
    spare[np.arange(65), np.arange(5, 70)] = 3
    placed = LatticePlacement().place(table_of(wide), np.concatenate([wide_counts, spare]))
    verify_placed(table_of(wide), placed)
    assert as_rows(table_of(wide), placed)[: len(expected)] == [
        ((*key, *[0] * 65), throughput, placement) for key, throughput, placement in expected
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_the_order_of_nodes_is_irrelevant(seed, whole):
    rng = np.random.default_rng(seed)
    table = random_table(rng, n_configs=3, layers=int(rng.integers(1, 10)), s_max=5, whole=whole)
    problem = problem_at(table, rng.multinomial(int(rng.integers(1, 6)), [0.4, 0.3, 0.3]).astype(np.int16))
    shuffled = replace(problem, nodes=tuple(rng.permutation(problem.nodes).tolist()))
    first, second = LatticePlacement().solve(problem), LatticePlacement().solve(shuffled)
    assert replace(first, solve_s=0.0) == replace(second, solve_s=0.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_more_capacity_never_hurts(seed, whole):
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 10))
    table = random_table(rng, n_configs=3, layers=layers, s_max=4, whole=whole)
    more = random_table(rng, n_configs=3, layers=layers, s_max=4, whole=whole)
    better = replace(table, throughput=np.maximum(table.throughput, more.throughput))
    counts = all_combinations(3, 4)
    before = {row[0]: row[1] for row in as_rows(table, LatticePlacement().place(table, counts))}
    after = {row[0]: row[1] for row in as_rows(better, LatticePlacement().place(better, counts))}
    assert before.keys() <= after.keys()
    assert all(after[key] >= value for key, value in before.items())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 2.0, 1024.0]))
def test_scaling_capacity_scales_throughput(seed, factor):
    rng = np.random.default_rng(seed)
    table = random_table(rng, n_configs=3, layers=6, s_max=4)
    counts = all_combinations(3, 4)
    base = LatticePlacement().place(table, counts)
    scaled = LatticePlacement().place(replace(table, throughput=table.throughput * factor), counts)
    np.testing.assert_array_equal(scaled.throughput, base.throughput * factor)
    np.testing.assert_array_equal(scaled.stage_counts, base.stage_counts)


def test_identical_nodes_in_one_stage_add_up():
    table = table_of(np.full((4, 1, 3), 10.0))
    placed = LatticePlacement().place(table, np.array([[4]], dtype=np.int16))
    assert placed.throughput.tolist() == [40.0]
    assert placed.n_stages.tolist() == [1]


def test_a_pipeline_is_found_where_no_node_holds_the_model():
    """Each node holds 2 of 6 layers: exactly three stages, two layers each."""
    row = np.array([9.0, 5.0, 0, 0, 0, 0])
    placed = LatticePlacement().place(table_of(np.tile(row, (3, 1, 1))), np.array([[3]], dtype=np.int16))
    assert placed.throughput.tolist() == [5.0]
    assert placed.stage_layers.tolist() == [[2, 2, 2]]


def test_ilp_in_bulk_equals_lattice_and_verifies():
    rng = np.random.default_rng(21)
    table = random_table(rng, n_configs=3, layers=5, s_max=3, whole=True)
    counts = all_combinations(3, 3)
    expected = LatticePlacement().place(table, counts)
    placed = IlpPlacement(preference="highs").place(table, counts)
    verify_placed(table, placed)
    np.testing.assert_array_equal(placed.counts, expected.counts)
    np.testing.assert_allclose(placed.throughput, expected.throughput, rtol=1e-9)
    assert placed.proven.all()
    assert placed.method == "ilp"
    assert {k: placed.statistics[k] for k in ("combinations", "infeasible", "unproven")} == {
        k: expected.statistics[k] for k in ("combinations", "infeasible", "unproven")
    }


def test_an_ilp_without_time_is_unproven_never_optimal():
    table = random_table(np.random.default_rng(8), n_configs=4, layers=40, s_max=4)
    table = replace(table, throughput=table.throughput + np.linspace(50, 1, 40))
    counts = np.array([[1, 1, 1, 1]], dtype=np.int16)
    result = IlpPlacement(preference="highs", time_limit_s=0.0).solve(problem_at(table, counts[0]))
    assert result.status is PlacementStatus.UNPROVEN
    placed = IlpPlacement(preference="highs", time_limit_s=0.0).place(table, counts)
    assert placed.statistics["unproven"] == 1
    assert placed.statistics["infeasible"] == 0
    assert not placed.proven.any()
    if result.placement is not None:
        verify_placement(problem_at(table, counts[0]), result.placement, result.throughput_tokens_per_s)


@pytest.mark.parametrize("method", [LatticePlacement(), IlpPlacement()])
class TestBadInput:
    def table(self):
        return random_table(np.random.default_rng(3), n_configs=2, layers=4, s_max=2, whole=True)

    @pytest.mark.parametrize(
        ("counts", "what"),
        [
            ([[0, 0]], "no node"),
            ([[1, 0], [-1, 2]], "row 1 has a negative count"),
            ([[1, 0, 0]], "shape"),
            ([[2, 1]], "covers 2 stages, 3 are due"),
            ([[30_000, 1]], "more than 10000 nodes"),
        ],
    )
    def test_counts(self, method, counts, what):
        with pytest.raises(InputError, match=what):
            method.place(self.table(), np.array(counts, dtype=np.int16))

    def test_no_combinations_are_no_rows(self, method):
        placed = method.place(self.table(), np.zeros((0, 2), dtype=np.int16))
        assert len(placed) == 0
        assert placed.statistics["combinations"] == 0
        verify_placed(self.table(), placed)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
    def test_capacity_values(self, method, value):
        table = self.table()
        table.throughput[1, 1, 2] = value
        with pytest.raises(InputError) as caught:
            method.place(table, np.array([[1, 1]], dtype=np.int16))
        assert caught.value.where == "capacity_tokens_per_s.2.c1[2]"

    def test_capacity_that_increases_names_node_and_layer(self, method):
        table = self.table()
        table.throughput[0, 1] = [3, 3, 2, 4]
        with pytest.raises(InputError, match=r"node 'c1' increases from 2\.0 at layer 3 to 4\.0 at layer 4"):
            method.place(table, np.array([[1, 1]], dtype=np.int16))

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"layers": 0}, "1 to 10000 layers are due, not 0"),
            ({"layers": 40_000}, "1 to 10000 layers are due, not 40000"),
            ({"nodes": ()}, "1 to 10000 nodes are due, not 0"),
            ({"nodes": ("c0",) * 40_000}, "1 to 10000 nodes are due, not 40000"),
            ({"nodes": ("c0", "zz")}, "no capacity of node 'zz'"),
            ({"layers": 5}, "4 capacities instead of 5"),
            ({"capacity_tokens_per_s": {}}, "no capacity of node 'c0' at 1 stages"),
        ],
    )
    def test_problems(self, method, changes, what):
        problem = problem_at(self.table(), np.array([1, 1], dtype=np.int16))
        with pytest.raises(InputError, match=what):
            method.solve(replace(problem, **changes))


def test_more_layers_than_stages_are_covered_is_fine_when_layers_are_few():
    """S <= L: a table of 2 stages serves 3 nodes of a model with 2 layers."""
    table = random_table(np.random.default_rng(3), n_configs=1, layers=2, s_max=2, whole=True)
    assert len(LatticePlacement().place(table, np.array([[3]], dtype=np.int16))) in (0, 1)


def test_too_large_is_refused_before_it_is_listed(monkeypatch):
    names = tuple(f"n{i}" for i in range(40))
    rows = dict.fromkeys(names, np.ones(2))
    problem = PlacementProblem(layers=2, nodes=names, capacity_tokens_per_s=dict.fromkeys(range(1, 41), rows))
    with pytest.raises(InputError, match="sub-multisets"):
        LatticePlacement().solve(problem)
    monkeypatch.setattr(lattice_module, "MAX_STEPS", 1e3)
    few = replace(problem, nodes=names[:6])
    with pytest.raises(InputError, match="steps"):
        LatticePlacement().solve(few)


def test_tables_above_the_limit_are_refused():
    table = random_table(np.random.default_rng(3), n_configs=4, layers=10, s_max=4)
    with pytest.raises(InputError, match="lists of 10 layers"):
        LatticePlacement(max_table_bytes=2**11).place(table, all_combinations(4, 4))
