import itertools
import math

import numpy as np
import pytest

from coral_core.errors import InputError
from coral_core.placement import combinations
from coral_core.placement.combinations import enumerate_combinations, split_combinations

GB = 1e9
GPU_GB = {"L4": 24, "A10G": 24, "L40S": 48, "A100": 80, "H100": 80}


def everything(n_configs, n_max):
    ones = np.ones(n_configs)
    return enumerate_combinations(memory_bytes=ones, usable_memory_bytes=ones, model_bytes=0.5, n_max=n_max, rho=1e6)


@pytest.mark.parametrize(("n_configs", "n_max"), [(1, 1), (1, 7), (3, 4), (12, 4), (12, 6), (20, 4)])
def test_counts_equal_the_closed_form(n_configs, n_max):
    assert len(everything(n_configs, n_max)) == math.comb(n_configs + n_max, n_max) - 1


def test_canonical_order_by_size_then_lexicographic_each_once():
    expected = [multiset for size in (1, 2, 3) for multiset in itertools.combinations_with_replacement(range(4), size)]
    got = [tuple(np.repeat(np.arange(4), row).tolist()) for row in everything(4, 3)]
    assert got == expected


@pytest.mark.parametrize(
    ("gpus", "model_gb", "expected"),
    [
        (("L4", "A10G", "L40S"), 29.3, 2_268),  # Phi-4 14B in bf16, core
        (("L4", "A10G", "L40S"), 65.5, 12_980),  # Qwen3 32B, core
        (("L4", "A10G", "L40S", "A100", "H100"), 29.3, 5_074),  # extended
        (("L4", "A10G", "L40S", "A100", "H100"), 65.5, 68_754),
    ],
)
def test_published_setups_have_the_counts_of_an_independent_enumeration(gpus, model_gb, expected):
    """Counts made by another program under the same assumptions: 90% usable, at most 12 times the weights, bf16."""
    memory = np.array([GPU_GB[gpu] * n * GB for gpu in gpus for n in (1, 2, 4, 8)])
    found = enumerate_combinations(
        memory_bytes=memory, usable_memory_bytes=0.9 * memory, model_bytes=model_gb * GB, n_max=6, rho=12
    )
    assert len(found) == expected


def test_limits_are_those_of_brute_force():
    rng = np.random.default_rng(2)
    for _ in range(20):
        memory = rng.integers(1, 30, 4).astype(float)
        usable = memory * rng.uniform(0.5, 1, 4)
        model, n_max, rho = float(rng.integers(5, 40)), int(rng.integers(1, 5)), float(rng.uniform(0.5, 4))
        expected = [
            counts
            for counts in itertools.product(range(n_max + 1), repeat=4)
            if 1 <= sum(counts) <= n_max and np.dot(counts, memory) < rho * model and np.dot(counts, usable) >= model
        ]
        found = enumerate_combinations(
            memory_bytes=memory, usable_memory_bytes=usable, model_bytes=model, n_max=n_max, rho=rho
        )
        assert sorted(map(tuple, found.tolist())) == sorted(expected)
        assert found.dtype == np.int16
        assert found.shape[1] == 4


def test_the_memory_limit_is_strict_and_the_fit_is_not():
    arguments = {"memory_bytes": [10.0], "usable_memory_bytes": [8.0], "model_bytes": 8.0, "n_max": 2}
    assert enumerate_combinations(**arguments, rho=1.25).tolist() == []
    assert enumerate_combinations(**arguments, rho=1.26).tolist() == [[1]]
    assert enumerate_combinations(**arguments, rho=2.6).tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"memory_bytes": [1.0, math.nan]}, "memory_bytes"),
        ({"memory_bytes": [1.0, 0.0]}, "memory_bytes"),
        ({"memory_bytes": []}, "memory_bytes"),
        ({"memory_bytes": [[1.0, 2.0]]}, "memory_bytes"),
        ({"usable_memory_bytes": [1.0, -1.0]}, "usable_memory_bytes"),
        ({"usable_memory_bytes": [1.0]}, "usable_memory_bytes"),
        ({"model_bytes": 0.0}, "model_bytes"),
        ({"model_bytes": math.inf}, "model_bytes"),
        ({"rho": -1.0}, "rho"),
        ({"rho": math.nan}, "rho"),
        ({"n_max": 0}, "n_max"),
    ],
)
def test_bad_input_is_named(changes, where):
    good = {"memory_bytes": [1.0, 2.0], "usable_memory_bytes": [1.0, 2.0], "model_bytes": 1.0, "n_max": 2, "rho": 4.0}
    with pytest.raises(InputError) as caught:
        enumerate_combinations(**{**good, **changes})
    assert caught.value.where == where


def test_too_many_are_refused_before_memory_runs_out(monkeypatch):
    monkeypatch.setattr(combinations, "MAX_COMBINATIONS", 100)
    with pytest.raises(InputError, match="lower n_max"):
        everything(20, 6)


@pytest.mark.parametrize("parts", [1, 2, 7, 1000])
def test_a_split_holds_each_row_once_and_no_part_is_empty(parts):
    counts = everything(5, 3)
    split = split_combinations(counts, parts)
    assert len(split) == min(parts, len(counts))
    assert all(len(part) for part in split)
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert sorted(map(tuple, np.concatenate(split).tolist())) == sorted(map(tuple, counts.tolist()))
    assert split_combinations(counts[:0], parts) == []


def test_split_parts_share_less_than_parts_dealt_in_turn():
    from coral_core.placement.lattice import LatticePlacement

    counts = everything(8, 4)
    table = np.ones((4, 8, 2))

    def sub_multisets(parts):
        return sum(LatticePlacement()._place(table, part).statistics["sub_multisets"] for part in parts)

    assert sub_multisets(split_combinations(counts, 6)) < 0.7 * sub_multisets([counts[i::6] for i in range(6)])


def test_a_split_into_no_parts_is_refused():
    with pytest.raises(InputError, match="at least one part"):
        split_combinations(everything(2, 2), 0)
