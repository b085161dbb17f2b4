"""Dominance against the definition: for every pair of templates, by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_core.errors import InputError
from coral_core.placement import dominance_kernel
from coral_core.placement.combinations import enumerate_combinations
from coral_core.placement.dominance import DominancePass, rows_with_placement, undominated


def by_definition(counts, throughput):
    """Templates (throughput above 0) that no other one equals or beats with at most its nodes."""
    keep = []
    for i, (mine, value) in enumerate(zip(counts, throughput, strict=True)):
        beaten = any(
            j != i and throughput[j] > 0 and throughput[j] >= value and (counts[j] <= mine).all()
            for j in range(len(counts))
        )
        keep.append(value > 0 and not beaten)
    return keep


@st.composite
def enumerations(draw):
    """What an enumeration gives under limits from both sides, and throughputs with ties, gaps and rounding errors."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_configs, n_max = draw(st.sampled_from([(1, 6), (2, 5), (3, 4), (4, 3), (5, 3)]))
    memory = rng.integers(1, 12, n_configs).astype(float)
    counts = enumerate_combinations(
        memory_bytes=memory,
        usable_memory_bytes=memory * rng.uniform(0.5, 1.0, n_configs),
        model_bytes=float(rng.integers(1, 12)),
        n_max=n_max,
        rho=float(rng.uniform(1, 6)),
    )
    kind = draw(st.sampled_from(["ties", "sums", "any"]))
    if kind == "ties":
        throughput = rng.integers(0, 4, len(counts)).astype(float)
    elif kind == "sums":
        throughput = counts @ rng.choice([0.0, 0.1, 0.2, 0.3], n_configs)
    else:
        throughput = rng.uniform(0, 10, len(counts))
    throughput[rng.uniform(size=len(counts)) < draw(st.sampled_from([0.0, 0.3, 0.8]))] = 0.0
    return counts, throughput


@given(enumerations(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_pass_keeps_what_the_definition_keeps_in_any_order_and_in_pieces(case, piece, seed):
    counts, throughput = case
    expected = by_definition(counts, throughput)
    assert undominated(counts, throughput).tolist() == expected
    shuffled = np.random.default_rng(seed).permutation(len(counts))
    assert undominated(counts[shuffled], throughput[shuffled]).tolist() == [expected[i] for i in shuffled]
    dominance = DominancePass(counts)
    pieces = [dominance.undominated(throughput[i : i + piece]) for i in range(0, len(counts), piece)]
    assert np.concatenate([*pieces, np.zeros(0, bool)]).tolist() == expected


@given(enumerations())
def test_of_equal_throughputs_one_stays_for_every_template(case):
    """Nothing is dropped for the sake of something that is dropped itself."""
    counts, throughput = case
    keep = undominated(counts, throughput)
    for mine, value in zip(counts[throughput > 0], throughput[throughput > 0], strict=True):
        assert (keep & (throughput >= value) & (counts <= mine).all(axis=1)).any()


@given(enumerations(), st.integers(0, 2**32 - 1))
def test_sub_multisets_are_those_of_the_definition_and_decide_alike(case, seed):
    counts, throughput = case
    chosen = np.random.default_rng(seed).uniform(size=len(counts)) < 0.2
    marked = DominancePass(counts).with_sub_multisets(chosen)
    expected = [any((row <= other).all() for other in counts[chosen]) for row in counts]
    assert marked.tolist() == expected
    whole = undominated(counts, throughput)
    part = undominated(counts[marked], throughput[marked])
    assert part[chosen[marked]].tolist() == whole[chosen].tolist()


def test_keys_that_coincide_are_told_apart(monkeypatch):
    """All weights equal: every multiset of a size has the same key."""
    counts = enumerate_combinations(
        memory_bytes=np.ones(4), usable_memory_bytes=np.ones(4), model_bytes=0.5, n_max=3, rho=1e6
    )
    throughput = np.random.default_rng(1).integers(1, 5, len(counts)).astype(float)

    class Ones:
        def integers(self, low, high, size, dtype):
            return np.ones(size, dtype=dtype)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Ones())
    assert undominated(counts, throughput).tolist() == by_definition(counts, throughput)


def test_rows_that_were_placed_are_found_again():
    counts = np.array(list(itertools.product(range(3), repeat=2)), dtype=np.int16)[1:]
    assert rows_with_placement(counts, counts).tolist() == list(range(8))
    assert rows_with_placement(counts, counts[[1, 4, 7]]).tolist() == [1, 4, 7]
    assert rows_with_placement(counts, counts[:0]).tolist() == []
    with pytest.raises(ValueError, match="placement 1 is of no combination"):
        rows_with_placement(counts, counts[[4, 1]])


@pytest.mark.parametrize(
    ("counts", "throughput", "where"),
    [
        ([[1, 0], [1, 0]], [1.0, 2.0], "counts"),
        ([1, 2], [1.0, 2.0], "counts"),
        ([[1, 0], [0, 1]], [1.0, np.nan], "throughput"),
        ([[1, 0], [0, 1]], [1.0, -1.0], "throughput"),
        ([[1, 0], [0, 1]], [np.inf, 1.0], "throughput"),
    ],
)
def test_bad_input_is_named(counts, throughput, where):
    with pytest.raises(InputError) as caught:
        DominancePass(np.array(counts, dtype=np.int16)).undominated(np.array(throughput))
    assert caught.value.where == where


def test_order_of_size_and_length_are_due():
    counts = np.array([[1, 0], [0, 1], [1, 1]], dtype=np.int16)
    with pytest.raises(InputError, match="smaller combinations"):
        DominancePass(counts[::-1])
    with pytest.raises(InputError, match="for 3 combinations left"):
        DominancePass(counts).undominated(np.ones(4))


def test_nothing_is_an_answer_too():
    assert undominated(np.zeros((0, 3), dtype=np.int16), np.zeros(0)).tolist() == []


def test_kernels_agree_with_their_python():
    """The same functions uncompiled: compiled code hides an index out of range."""
    counts = enumerate_combinations(
        memory_bytes=np.ones(3), usable_memory_bytes=np.ones(3), model_bytes=1.5, n_max=4, rho=1e6
    )
    throughput = np.random.default_rng(3).integers(0, 4, len(counts)).astype(float)
    expected = undominated(counts, throughput)
    kernels = ("find", "insert_rows", "mark_undominated", "mark_sub_multisets", "subsequence_rows")
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        for name in kernels:
            patch.setattr(dominance_kernel, name, getattr(dominance_kernel, name).py_func)
        assert undominated(counts, throughput).tolist() == expected.tolist()
        assert DominancePass(counts).with_sub_multisets(counts.sum(axis=1) == 4).all()
        assert rows_with_placement(counts, counts[2:5]).tolist() == [2, 3, 4]
