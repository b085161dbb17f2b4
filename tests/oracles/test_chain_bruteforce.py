"""Chains of nodes against brute force: every cut of the layers, one node per stage."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.placement.chain import ChainPlacement
from coral_core.placement.verify import verify_placed
from tests.fakes.artifact_cases import capacity_table


def brute_force(capacity, nodes, layers, parts):
    """The best slowest stage over all cuts of the layers that leave no node fewer than its parts."""
    cuts = itertools.combinations(range(1, layers), len(nodes) - 1)
    pieces = (np.diff((0, *cut, layers)) for cut in cuts)
    rows = capacity[len(nodes) - 1][list(nodes)]
    found = (min(row[j - 1] for row, j in zip(rows, piece, strict=True)) for piece in pieces if min(piece) >= parts)
    return max(found, default=0.0)


@st.composite
def tables(draw):
    layers, stages = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    number = draw(st.sampled_from([st.integers(0, 3), st.floats(0, 1e6, allow_subnormal=False)]))
    size = stages * 3 * layers
    values = np.array(draw(st.lists(number, min_size=size, max_size=size)), dtype=np.float64).reshape(stages, 3, layers)
    table = capacity_table(configs=("a", "b", "c"), layers=layers, max_stages=stages)
    return replace(table, throughput=-np.sort(-values, axis=2))


@settings(max_examples=120, deadline=None)
@given(tables(), st.integers(1, 3))
def test_chains_are_the_best_there_are(table, parts):
    counts = np.array(
        [row for row in itertools.product(range(3), repeat=3) if 0 < sum(row) <= table.max_stages], dtype=np.int16
    )
    placed = ChainPlacement(parts).place(table, counts)
    verify_placed(table, placed)
    assert (placed.stage_layers[placed.stage_layers > 0] >= parts).all()
    assert (placed.stage_counts.sum(axis=2) <= 1).all()
    found = {tuple(row): value for row, value in zip(placed.counts.tolist(), placed.throughput, strict=True)}
    for row in counts.tolist():
        nodes = [config for config, count in enumerate(row) for _ in range(count)]
        best = brute_force(table.throughput, nodes, table.layers, parts) if len(nodes) <= table.layers else 0.0
        assert found.get(tuple(row), 0.0) == pytest.approx(best, rel=1e-12)
    assert placed.statistics["infeasible"] == len(counts) - len(placed)
