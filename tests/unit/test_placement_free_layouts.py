"""Layouts of placed nodes: of the published table for equal shares, of the budgets' table for free ones."""

from dataclasses import replace

import numpy as np
import pytest

from coral_core.catalog import load_catalog, load_models
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError
from coral_core.perf import capacity_table
from coral_core.perf.budgets import budget_table
from coral_core.placement import enumerate_combinations
from coral_core.placement.free import FreePlacement
from coral_core.placement.free_layouts import stage_layouts
from coral_core.placement.lattice import LatticePlacement
from coral_core.workload import named_lengths


@pytest.fixture(scope="module")
def table():
    catalog = load_catalog("paper-core")
    given = {
        "shape": load_models()["phi-4"],
        "variant": "bf16",
        "phase": Phase.DECODE,
        "slo": Slo(ttft_s=1.2, tpot_s=0.06),
        "lengths": named_lengths("azure-conv"),
        "configs": [catalog.configs[name] for name in sorted(catalog.configs)],
    }
    return replace(capacity_table(max_stages=4, **given), budgets=budget_table(**given))


@pytest.fixture(scope="module")
def counts(table):
    return enumerate_combinations(
        memory_bytes=table.memory_bytes,
        usable_memory_bytes=table.usable_memory_bytes,
        model_bytes=table.model_bytes,
        n_max=4,
        rho=12,
    )


@pytest.mark.parametrize("method", [LatticePlacement, FreePlacement])
def test_each_used_node_has_the_layout_of_its_capacity_and_idle_ones_none(table, counts, method):
    placed = method().place(table, counts)
    codes, names = stage_layouts(table, placed)
    assert codes.max() < len(names)
    grid = table.budgets
    seen = {"idle": 0, "free": 0, "published": 0}
    for row in range(0, len(placed), 7):
        n_stages = int(placed.n_stages[row])
        for s, c in np.ndindex(*codes.shape[1:]):
            if placed.stage_counts[row, s, c] == 0:
                assert codes[row, s, c] == -1
                continue
            j = placed.stage_layers[row, s] - 1
            if placed.stage_budget_frac is not None and n_stages > 1:
                beta = round(placed.stage_budget_frac[row, s] * grid.grid)
                capacity, code, of = grid.throughput[beta - 1, c, j], grid.layout[beta - 1, c, j], grid.layouts
                kind = "free"
            else:
                capacity, code = table.throughput[n_stages - 1, c, j], table.layout[n_stages - 1, c, j]
                of, kind = table.layouts, "published"
            assert (codes[row, s, c] == -1) == (capacity == 0)
            seen["idle" if capacity == 0 else kind] += 1
            assert capacity == 0 or names[codes[row, s, c]] == of[code]
    assert seen["idle"] > 0
    assert seen["published"] > 0
    assert (seen["free"] > 0) == (method is FreePlacement)


def test_free_shares_need_the_table_that_they_came_from(table, counts):
    placed = FreePlacement().place(table, counts[-5:])
    with pytest.raises(InputError, match="stage budgets"):
        stage_layouts(replace(table, budgets=None), placed)
