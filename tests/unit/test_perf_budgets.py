"""Capacities over stage budgets: the published ones where both speak, monotone, strict with their input."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.catalog import load_catalog, load_models
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import DataGapError, InputError
from coral_core.perf import capacity_table
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.budgets import GRID, budget_table
from coral_core.workload import named_lengths
from tests.fakes.perf_cases import FREE, factors, gpu, lengths, model, node

NODES = [
    node("one", of=gpu(memory_bytes=10**9)),
    node("slow-link", count=2, nic=2e7),
    node("four", count=4, of=gpu(bandwidth=8e11)),
]


def arguments(phase=Phase.DECODE, *, slo=None, assumptions=FREE, request=None):
    return {
        "shape": model(),
        "variant": "bf16",
        "phase": phase,
        "slo": slo or Slo(ttft_s=0.4, tpot_s=0.02),
        "lengths": request or lengths(),
        "configs": NODES,
        "assumptions": assumptions,
        "factors": factors(),
    }


def check_monotone(table):
    assert (np.diff(table.throughput, axis=0) >= 0).all()
    assert (np.diff(table.throughput, axis=2) <= 0).all()
    assert ((table.throughput > 0) == (table.layout >= 0)).all()
    assert table.layout.max() < len(table.layouts)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(Phase)),
    st.floats(0.05, 3),
    st.floats(0.002, 0.1),
    st.floats(20, 4000),
    st.floats(5, 800),
)
def test_shares_of_the_published_split_have_the_published_capacities(phase, ttft_s, tpot_s, tokens_in, tokens_out):
    given_ = arguments(phase, slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s), request=lengths(tokens_in, tokens_out))
    published, free = capacity_table(max_stages=6, **given_), budget_table(**given_)
    assert free.throughput.shape == (60, len(NODES), 6)
    for stages in range(2, 7):
        at = 60 // stages - 1
        # Not below by construction; above only where the search over batches is a grid and a smaller budget did better.
        assert (free.throughput[at] >= published.throughput[stages - 1]).all()
        np.testing.assert_allclose(free.throughput[at], published.throughput[stages - 1], rtol=1e-3)
    check_monotone(free)


@pytest.mark.parametrize("phase", list(Phase))
def test_shares_of_the_published_split_are_exact_on_the_catalogue(phase):
    catalog = load_catalog("paper-core")
    given_ = {
        "shape": load_models()["qwen3-32b"],
        "variant": "bf16",
        "phase": phase,
        "slo": Slo(ttft_s=1.6, tpot_s=0.1),
        "lengths": named_lengths("azure-conv"),
        "configs": [catalog.configs[name] for name in sorted(catalog.configs)][:5],
    }
    published, free = capacity_table(max_stages=6, **given_), budget_table(**given_)
    assert free.throughput[-1].any()
    for stages in range(2, 7):
        at = GRID // stages - 1
        np.testing.assert_array_equal(free.throughput[at], published.throughput[stages - 1])
        names = np.array([*published.layouts, "none"])[published.layout[stages - 1]]
        assert (np.array([*free.layouts, "none"])[free.layout[at]] == names).all()
    check_monotone(free)


def test_prefill_depends_on_the_stage_s_own_budget_alone():
    slo = Slo(ttft_s=0.4, tpot_s=0.02)
    free = budget_table(**arguments(Phase.PREFILL, slo=slo), grid=12)
    for beta in range(1, 13):
        twice = Slo(ttft_s=2 * slo.ttft_s * beta / 12, tpot_s=slo.tpot_s)
        of_two = capacity_table(max_stages=2, **arguments(Phase.PREFILL, slo=twice)).throughput[1]
        np.testing.assert_allclose(free.throughput[beta - 1], of_two, rtol=1e-9)


def test_the_rest_of_the_slo_keeps_kv_in_memory():
    """Against a pipeline of two such stages: below half of the SLO the others take longer than it, above less."""
    slo = Slo(ttft_s=0.4, tpot_s=0.04)
    free = budget_table(**arguments(slo=slo))
    strictly = 0
    for beta in range(1, 61):
        twice = Slo(ttft_s=slo.ttft_s, tpot_s=2 * slo.tpot_s * beta / 60)
        of_two = capacity_table(max_stages=2, **arguments(slo=twice)).throughput[1]
        sign = 1 if beta >= 30 else -1
        assert (sign * (free.throughput[beta - 1] - of_two) >= -1e-3 * of_two).all()
        strictly += bool((sign * (free.throughput[beta - 1] - of_two) > 1e-3 * of_two).any())
    assert strictly > 10


def test_both_bounds_of_aggregated_shrink_with_the_budget():
    loose = budget_table(**arguments(Phase.AGGREGATED, slo=Slo(ttft_s=100.0, tpot_s=0.04)))
    tight = budget_table(**arguments(Phase.AGGREGATED, slo=Slo(ttft_s=0.05, tpot_s=0.04)))
    assert (tight.throughput <= loose.throughput).all()
    assert (tight.throughput < loose.throughput).any()


def test_headroom_scales_the_capacities():
    half = replace(FREE, max_utilization_frac=dict.fromkeys(Phase, 0.5))
    np.testing.assert_allclose(
        budget_table(**arguments(assumptions=half)).throughput, budget_table(**arguments()).throughput / 2
    )


@pytest.mark.parametrize("grid", [0, -1, 1001])
def test_a_senseless_grid_is_refused(grid):
    with pytest.raises(InputError, match="budgets"):
        budget_table(**arguments(), grid=grid)


def test_bad_input_and_gaps_are_named():
    with pytest.raises(InputError, match=r"slo\.tpot_s"):
        budget_table(**arguments(slo=Slo(ttft_s=1.0, tpot_s=float("nan"))))
    with pytest.raises(DataGapError, match="no measured profile of model toy on one, slow-link, four"):
        budget_table(**arguments(assumptions=CapacityAssumptions(allow_estimates=False)))
