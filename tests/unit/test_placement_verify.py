from dataclasses import replace

import numpy as np
import pytest

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.placement import PlacementProblem
from coral_core.domain.templates import CapacitySource, Placement, Stage
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import SolverError
from coral_core.placement import verify
from coral_core.placement.lattice import LatticePlacement
from coral_core.placement.verify import PlacementMismatchError, verify_placed, verify_placement

ROWS = {"a": np.array([4.0, 3.0, 2.0]), "b": np.array([6.0, 5.0, 1.0])}
PROBLEM = PlacementProblem(layers=3, nodes=("a", "b", "a"), capacity_tokens_per_s=dict.fromkeys((1, 2, 3), ROWS))
GOOD = Placement(stages=(Stage(layers=1, nodes=("a",)), Stage(layers=2, nodes=("b", "a"))))  # min(4, 5 + 3)


def stages(*pairs):
    return Placement(stages=tuple(Stage(layers=layers, nodes=tuple(nodes)) for layers, nodes in pairs))


def test_a_right_placement_passes_within_rounding():
    verify_placement(PROBLEM, GOOD, 4.0)
    verify_placement(PROBLEM, GOOD, 4.0 * (1 + 5e-10))


@pytest.mark.parametrize(
    ("placement", "throughput", "what"),
    [
        (GOOD, 4.0 * (1 + 1e-8), "slowest stage"),
        (GOOD, 8.0, "slowest stage"),
        (GOOD, float("nan"), "slowest stage"),
        (stages((1, "a"), (2, "b")), 4.0, "each node"),
        (stages((1, "a"), (2, "baa")), 4.0, "each node"),
        (stages((1, "a"), (2, "bb")), 4.0, "each node"),
        (stages((1, "a"), (1, "ba")), 4.0, "2 layers"),
        (stages((2, "a"), (2, "ba")), 4.0, "4 layers"),
        (stages((0, "a"), (3, "ba")), 3.0, "no layer"),
        (stages((1, "aab"), (2, "")), 3.0, "no layer or no node"),
    ],
)
def test_every_kind_of_mismatch_is_named(placement, throughput, what):
    with pytest.raises(PlacementMismatchError, match=what):
        verify_placement(PROBLEM, placement, throughput)


def test_a_placement_worth_nothing_is_none():
    nothing = replace(PROBLEM, capacity_tokens_per_s={s: {"a": np.zeros(3), "b": np.zeros(3)} for s in (1, 2, 3)})
    with pytest.raises(PlacementMismatchError, match="no throughput"):
        verify_placement(nothing, GOOD, 0.0)


def test_the_error_is_a_solver_error_that_survives_a_process_boundary():
    import pickle

    error = pickle.loads(pickle.dumps(PlacementMismatchError("x", where="row 3")))
    assert isinstance(error, PlacementMismatchError)
    assert isinstance(error, SolverError)
    assert error.where == "row 3"


@pytest.fixture(scope="module")
def small_table():
    """Three configurations, five layers, up to three stages; capacities that make pipelines worth it."""
    rng = np.random.default_rng(4)
    throughput = np.sort(rng.uniform(1, 100, (3, 3, 5)), axis=2)[:, :, ::-1].copy()
    return CapacityTable(
        model="m",
        variant="bf16",
        phase=Phase.DECODE,
        slo=Slo(ttft_s=None, tpot_s=0.1),
        configs=("x", "y", "z"),
        layers=5,
        throughput=throughput,
        layout=np.zeros(throughput.shape, dtype=np.int16),
        layouts=("tp1 pp1 dp1",),
        sources=(CapacitySource.ESTIMATED,) * 3,
        error_frac=(None,) * 3,
        memory_bytes=np.ones(3),
        usable_memory_bytes=np.ones(3),
        model_bytes=1.0,
        inputs_hash="none",
    )


@pytest.fixture
def placed(small_table):
    counts = np.array([[1, 0, 0], [1, 1, 0], [0, 2, 1], [1, 1, 1]], dtype=np.int16)
    result = LatticePlacement().place(small_table, counts)
    verify_placed(small_table, result)
    return result


def broken(placed, field, at, value):
    array = getattr(placed, field).copy()
    array[at] = value
    return replace(placed, **{field: array})


@pytest.mark.parametrize("block_rows", [1, 2**16])
def test_bulk_verification_finds_every_kind_of_mismatch(monkeypatch, small_table, placed, block_rows):
    monkeypatch.setattr(verify, "_BLOCK_ROWS", block_rows)
    row = int(np.flatnonzero(placed.n_stages >= 2)[0])
    config = int(np.flatnonzero(placed.stage_counts[row, 0])[0])
    counts = placed.stage_counts[row, 0, config]
    cases = {
        "slowest": broken(placed, "throughput", row, placed.throughput[row] * (1 + 1e-8)),
        "out of range": broken(placed, "n_stages", row, 99),
        "negative": broken(placed, "stage_counts", (row, 0, config), -1),
        "exactly once": broken(placed, "stage_counts", (row, 0, config), counts + 1),
        "layers": broken(placed, "stage_layers", (row, 0), placed.stage_layers[row, 0] + 1),
        "no layer": broken(
            broken(placed, "stage_layers", (row, 0), 0), "stage_layers", (row, 1), placed.stage_layers[row, :2].sum()
        ),
        "no node": broken(
            broken(placed, "stage_counts", (row, 0), 0),
            "stage_counts",
            (row, 1),
            placed.stage_counts[row, :2].sum(axis=0),
        ),
    }
    for what, wrong in cases.items():
        with pytest.raises(PlacementMismatchError, match=what) as caught:
            verify_placed(small_table, wrong)
        assert caught.value.where == f"row {row}"


def test_bulk_verification_rejects_rows_without_throughput(small_table, placed):
    dead = replace(small_table, throughput=np.zeros_like(small_table.throughput))
    with pytest.raises(PlacementMismatchError, match="no throughput"):
        verify_placed(dead, placed)


def test_no_rows_are_right(small_table, placed):
    none = replace(
        placed,
        **{
            name: getattr(placed, name)[:0]
            for name in ("counts", "throughput", "n_stages", "stage_layers", "stage_counts", "proven")
        },
    )
    verify_placed(small_table, none)
