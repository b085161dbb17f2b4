"""The gain of the free latency split is counted combination by combination and in the cost of a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.allocation import TemplateColumns
from coral_core.domain.workload import Phase
from coral_core.errors import SolverError
from tasks.split_gain import split_gains, with_method

TINY = resolve_scenario(load_scenario("tiny"))


def columns(*, factor=1.0, drop=0):
    """Two templates for each model and phase, on one and on two nodes of the first configuration, less the first few."""
    rows = [
        (f"{model.shape.name}-{phase}-{n}", model.shape.name, phase, n)
        for model in TINY.models
        for phase in (Phase.PREFILL, Phase.DECODE)
        for n in (1, 2)
    ][drop:]
    nodes = np.zeros((len(rows), len(TINY.configs)), dtype=np.int64)
    nodes[:, 0] = [n for _, _, _, n in rows]
    return TemplateColumns(
        ids=tuple(row[0] for row in rows),
        models=tuple(row[1] for row in rows),
        phases=tuple(row[2] for row in rows),
        nodes=nodes,
        throughput=np.array([1000.0 * n * (factor if n == 2 else 1.0) for _, _, _, n in rows]),
    )


def test_gains_are_of_throughput_and_of_the_cost_of_a_plan():
    gains = split_gains(TINY, columns(), columns(factor=2.0))
    assert len(gains) == 6
    for gain in gains:
        assert (gain.combinations, gain.free_only) == (2, 0)
        assert (gain.median_gain_frac, gain.most_gain_frac) == pytest.approx((0.5, 1.0))
        assert gain.free_usd_per_h <= gain.equal_usd_per_h
    # 11,547 tokens/s of one kilotoken a node; or four for two nodes.
    price = gains[0].equal_usd_per_h / 12
    assert gains[0].free_usd_per_h == pytest.approx(6 * price)


def test_what_only_the_free_split_serves_is_counted_apart_and_costs_nothing_known_without_it():
    gains = split_gains(TINY, columns(drop=2), columns())
    assert (gains[0].combinations, gains[0].free_only, gains[0].equal_usd_per_h) == (0, 2, None)
    assert gains[0].free_usd_per_h is not None
    assert gains[1].free_only == 0


def test_a_free_split_below_the_equal_one_is_a_bug():
    with pytest.raises(SolverError, match="less than the equal one"):
        split_gains(TINY, columns(), columns(factor=0.9))


def test_the_libraries_compared_hold_every_combination():
    free = with_method(TINY, "lattice-free").scenario
    equal = with_method(TINY, "lattice").scenario
    assert free.library.keep_all
    assert len({free.library_name, equal.library_name, TINY.scenario.library_name}) == 3
    assert replace(TINY, scenario=free).scenario.library.method == "lattice-free"
