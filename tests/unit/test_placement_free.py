"""The free latency split: what it refuses, what it says, and that its check catches what is wrong."""

import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest

from coral_core.domain.placement import PlacementStatus
from coral_core.errors import InputError
from coral_core.placement import free as free_module
from coral_core.placement.free import FreePlacement
from coral_core.placement.free_verify import verify_free_placed, verify_free_placement
from coral_core.placement.lattice import LatticePlacement
from coral_core.placement.problem import problem_at
from coral_core.placement.verify import PlacementMismatchError
from tests.fakes.free_cases import free_table


def table_of(budgets, *, single=0.0, published=None):
    """One configuration per column: `budgets` (grid, C, L); alone a node set has `single` at every number of layers."""
    budgets = np.asarray(budgets, dtype=float)
    grid, n_configs, layers = budgets.shape
    table = free_table(np.random.default_rng(0), n_configs=n_configs, layers=layers, grid=grid, s_max=3)
    throughput = np.zeros((3, n_configs, layers))
    throughput[0] = single
    for stages in (2, 3):
        if grid % stages == 0:
            throughput[stages - 1] = budgets[grid // stages - 1]
        elif published is not None:
            throughput[stages - 1] = published
    return replace(table, throughput=throughput, budgets=replace(table.budgets, throughput=budgets))


def two_nodes():
    """A slow node needs 3/4 of the SLO for its one layer, a fast one holds 3 layers within 1/4; halves give 4."""
    slow = [[0, 0, 0, 0], [4, 0, 0, 0], [10, 0, 0, 0], [10, 0, 0, 0]]
    fast = [[12, 12, 12, 0], [12, 12, 12, 0], [12, 12, 12, 0], [12, 12, 12, 0]]
    return table_of(np.stack([slow, fast], axis=1))


ONE_EACH = np.array([[1, 1]], dtype=np.int16)


def test_a_slow_node_gets_the_budget_that_a_fast_one_does_not_need():
    table = two_nodes()
    assert LatticePlacement().place(table, ONE_EACH).throughput.tolist() == [4.0]
    placed = FreePlacement().place(table, ONE_EACH)
    assert placed.throughput.tolist() == [10.0]
    assert placed.method == "lattice-free"
    by_layers = dict(zip(placed.stage_layers[0].tolist(), placed.stage_budget_frac[0].tolist(), strict=True))
    assert by_layers == {1: 0.75, 3: 0.25}
    assert placed.proven.all()
    assert {
        "combinations": 1.0,
        "infeasible": 0.0,
        "unproven": 0.0,
        "improved": 1.0,
    }.items() <= placed.statistics.items()
    assert placed.statistics["tests"] >= 1
    assert placed.statistics["solve_s"] > 0


def test_a_single_stage_has_the_whole_slo_and_no_hop():
    table = table_of(np.full((4, 1, 4), 3.0), single=50.0)
    placed = FreePlacement().place(table, np.array([[2]], dtype=np.int16))
    assert placed.throughput.tolist() == [100.0]
    assert placed.stage_budget_frac.tolist() == [[1.0, 0.0]]
    verify_free_placed(table, placed)


def test_what_equal_shares_cannot_serve_may_be_served():
    budgets = np.zeros((4, 2, 4))
    budgets[2:, 0, 0] = 5
    budgets[:, 1, :3] = 9
    table = table_of(budgets)
    assert len(LatticePlacement().place(table, ONE_EACH)) == 0
    placed = FreePlacement().place(table, np.array([[2, 0], [1, 1], [0, 1]], dtype=np.int16))
    assert placed.counts.tolist() == [[1, 1]]
    assert placed.throughput.tolist() == [5.0]
    assert placed.statistics["infeasible"] == 2
    verify_free_placed(table, placed)


def test_more_stages_than_layers_are_never_made():
    """Three nodes, two layers: three stages would keep to the SLO, but one of them would hold nothing."""
    budgets = np.zeros((3, 3, 2))
    budgets[:, :, 0] = [[1, 2, 3]] * 3
    table = table_of(budgets)
    placed = FreePlacement().place(table, np.ones((1, 3), dtype=np.int16))
    assert placed.throughput.tolist() == [3.0]  # 1 and 2 together beside 3
    assert placed.n_stages.tolist() == [2]
    verify_free_placed(table, placed)


@pytest.mark.parametrize("shape", [(1, 5), (4, 1)])
def test_without_a_choice_of_budgets_or_stages_the_published_split_is_the_answer(shape):
    grid, layers = shape
    table = table_of(np.full((grid, 1, layers), 7.0), single=2.0, published=6.0)
    counts = np.array([[3], [1]], dtype=np.int16)
    placed = FreePlacement().place(table, counts)
    np.testing.assert_array_equal(placed.throughput, LatticePlacement().place(table, counts).throughput)
    verify_free_placed(table, placed)
    assert len(FreePlacement().place(table, counts[:0])) == 0


def test_rows_may_come_twice():
    placed = FreePlacement().place(two_nodes(), np.array([[1, 1], [1, 0], [1, 1], [1, 0]], dtype=np.int16))
    assert placed.counts.tolist() == [[1, 1], [1, 1]]
    assert placed.throughput.tolist() == [10.0, 10.0]


def test_capacities_over_budgets_are_required():
    table = replace(two_nodes(), budgets=None)
    with pytest.raises(InputError, match=r"table\.budgets: method lattice-free needs capacities over stage budgets"):
        FreePlacement().place(table, ONE_EACH)
    with pytest.raises(InputError, match="budget_capacity_tokens_per_s: method lattice-free needs"):
        FreePlacement().solve(problem_at(table, ONE_EACH[0]))


def spoiled(index, value):
    table = two_nodes()
    budgets = table.budgets.throughput.copy()
    budgets[index] = value
    return replace(table, budgets=replace(table.budgets, throughput=budgets))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        ((0, 1, 2), np.nan, r"budgets\.1\.c1\[2\]: .*nan.*is not finite"),
        ((3, 0, 0), np.inf, r"budgets\.4\.c0\[0\]: capacity inf of node 'c0' within 4/4 of the SLO is not finite"),
        ((0, 0, 0), -1.0, "is not finite and at least 0"),
        ((2, 1, 2), 13.0, r"13\.0 of node 'c1' within 3/4 of the SLO is above that of one layer less"),
        ((3, 0, 0), 9.0, r"9\.0 of node 'c0' within 4/4 of the SLO is below that of the next smaller budget"),
        ((1, 0, 0), 5.0, r"budgets\.2\.c0\[0\]: .*is not the published one of 2 stages"),
    ],
)
def test_a_capacity_that_cannot_be_is_named(index, value, message):
    table = spoiled(index, value)
    with pytest.raises(InputError, match=message):
        FreePlacement().place(table, ONE_EACH)
    with pytest.raises(InputError, match=message):
        FreePlacement().solve(problem_at(table, ONE_EACH[0]))


def test_capacities_of_another_shape_are_refused():
    table = two_nodes()
    fewer = replace(table, budgets=replace(table.budgets, throughput=table.budgets.throughput[:, :, :3]))
    with pytest.raises(InputError, match=r"budgets: shape \(4, 2, 3\) instead of \(grid, 2, 4\)"):
        FreePlacement().place(fewer, ONE_EACH)
    problem = problem_at(table, ONE_EACH[0])
    of_one = {"c0": problem.budget_capacity_tokens_per_s["c0"]}
    with pytest.raises(InputError, match="no capacity of node 'c1' over budgets"):
        FreePlacement().solve(replace(problem, budget_capacity_tokens_per_s=of_one))
    for wrong in (np.zeros((4, 3)), np.zeros((3, 4)), np.zeros(4)):
        with pytest.raises(InputError, match=r"budget_capacity_tokens_per_s\.c1: shape"):
            FreePlacement().solve(replace(problem, budget_capacity_tokens_per_s={**of_one, "c1": wrong}))
    empty = {"c0": np.zeros((0, 4)), "c1": np.zeros((0, 4))}
    with pytest.raises(InputError, match=r"c0: shape \(0, 4\)"):
        FreePlacement().solve(replace(problem, budget_capacity_tokens_per_s=empty))


def test_what_cannot_be_searched_is_refused_at_once(monkeypatch):
    table = two_nodes()
    monkeypatch.setattr(free_module, "MAX_SPLITS", 8)
    with pytest.raises(InputError, match=r"sub-multisets with .* are too many"):
        FreePlacement().place(table, ONE_EACH)
    monkeypatch.undo()
    monkeypatch.setattr(free_module, "MAX_LAYERS_IN_ALL", 7)
    with pytest.raises(InputError, match="would hold 8 of them, more than 7"):
        FreePlacement().place(table, ONE_EACH)


def tampered(placed, **changes):
    copies = {name: getattr(placed, name).copy() for name in ("stage_budget_frac", "stage_layers", "stage_counts")}
    for name, (index, value) in changes.items():
        copies[name][index] = value
    return replace(placed, **copies)


def test_the_check_of_bulk_answers_catches_each_fault():
    table = two_nodes()
    placed = FreePlacement().place(table, ONE_EACH)
    verify_free_placed(table, placed)
    faults = {
        "its stated throughput": replace(placed, throughput=placed.throughput * 1.001),
        "budgets exceed the SLO": tampered(placed, stage_budget_frac=((0, slice(None)), 0.75)),
        "neither on the grid": tampered(placed, stage_budget_frac=((0, slice(None)), [0.3, 0.7])),
        "do not hold 4 layers": tampered(placed, stage_layers=((0, 0), 2)),
        "each node exactly once": tampered(placed, stage_counts=((0, 0, 0), 2)),
        "negative number": tampered(placed, stage_counts=((0, 0), [-1, 1])),
        "a stage has no throughput": tampered(placed, stage_layers=((0, slice(None)), placed.stage_layers[0][::-1])),
        "a stage has no node": tampered(placed, stage_counts=((0, slice(None)), [[1, 1], [0, 0]])),
        "a stage has no layer": replace(placed, n_stages=np.array([1], dtype=np.int16)),
        "stages is out of range": replace(placed, n_stages=np.array([0], dtype=np.int16)),
    }
    for message, wrong in faults.items():
        with pytest.raises(PlacementMismatchError, match=message):
            verify_free_placed(table, wrong)
    with pytest.raises(InputError, match="no stage budgets"):
        verify_free_placed(replace(table, budgets=None), placed)
    with pytest.raises(InputError, match="no stage budgets"):
        verify_free_placed(table, replace(placed, stage_budget_frac=None))


def test_the_check_of_one_answer_catches_each_fault():
    problem = problem_at(two_nodes(), ONE_EACH[0])
    result = FreePlacement().solve(problem)
    assert result.status is PlacementStatus.OPTIMAL
    first, second = result.placement.stages
    verify_free_placement(problem, result.placement, result.throughput_tokens_per_s)
    faults = {
        "stated are 11": (result.placement.stages, 11.0),
        "exactly once": ((first,), 10.0),
        "no layer or no node": ((replace(first, layers=0), second), 10.0),
        "hold 5 layers": ((replace(first, layers=first.layers + 1), second), 10.0),
        "missing or exceed": ((replace(first, budget_frac=None), second), 10.0),
        "missing or exceed the SLO": ((replace(first, budget_frac=0.75), replace(second, budget_frac=0.75)), 10.0),
        "neither on the grid": ((replace(first, budget_frac=0.3), replace(second, budget_frac=0.7)), 10.0),
        "no throughput": ((replace(first, layers=second.layers), replace(second, layers=first.layers)), 10.0),
    }
    for message, (stages, throughput) in faults.items():
        with pytest.raises(PlacementMismatchError, match=message):
            verify_free_placement(problem, replace(result.placement, stages=stages), throughput)
    with pytest.raises(InputError, match="no stage budgets"):
        verify_free_placement(replace(problem, budget_capacity_tokens_per_s=None), result.placement, 10.0)


def test_the_compiled_kernel_does_what_its_source_says(monkeypatch):
    """The same source, interpreted: every index is checked, and nothing rests on how numbers overflow or convert."""
    from coral_core.placement import free_kernel

    with monkeypatch.context() as patch:
        patch.setattr("coral_core.placement.compiled.compiled", lambda _signature: lambda function: function)
        spec = importlib.util.spec_from_file_location(free_kernel.__name__, free_kernel.__file__)
        interpreted = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(interpreted)
    rng = np.random.default_rng(41)
    counts = np.array([[1, 1, 1], [2, 0, 1], [0, 3, 0], [1, 0, 0], [0, 2, 2]], dtype=np.int16)
    for case in range(8):
        table = free_table(rng, n_configs=3, layers=2 + case % 4, grid=2 + case, s_max=4, ties=case % 2 == 0)
        compiled = FreePlacement().place(table, counts)
        with monkeypatch.context() as patch:
            patch.setattr("coral_core.placement.free_kernel", interpreted)
            patch.setitem(sys.modules, "coral_core.placement.free_kernel", interpreted)
            plain = FreePlacement().place(table, counts)
        for name in ("counts", "throughput", "n_stages", "stage_layers", "stage_counts", "stage_budget_frac"):
            np.testing.assert_array_equal(getattr(plain, name), getattr(compiled, name))
        assert plain.statistics["tests"] == compiled.statistics["tests"]
