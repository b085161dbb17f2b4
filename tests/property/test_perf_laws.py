"""Laws of stage capacity on random models, GPUs, nodes and SLOs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.domain.capacity import CapacityTable
from coral_core.domain.hardware import Gpu, NodeConfig
from coral_core.domain.models import ModelShape, Moe, SlidingWindow
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import capacity_table, node_capacity
from coral_core.perf.explain import explain_capacity
from coral_core.perf.search import Budgets, Question
from tests.fakes.perf_cases import factors, gpu, lengths, model, node

# Every batch is tried below this limit, so the laws hold exactly.
GIVEN = CapacityAssumptions(workspace_bytes=5e7, max_batch_requests=48)
FACTORS = factors()
EXAMPLES = settings(max_examples=60)


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    config: NodeConfig
    phase: Phase
    slo: Slo
    lengths: Lengths
    assumptions: CapacityAssumptions = GIVEN

    def table(self, **changes: object) -> CapacityTable:
        case = replace(self, **changes)  # type: ignore[arg-type]  # the names are checked at run time
        return capacity_table(
            shape=case.shape,
            variant="bf16",
            phase=case.phase,
            slo=case.slo,
            lengths=case.lengths,
            configs=[case.config],
            max_stages=3,
            assumptions=case.assumptions,
            factors=FACTORS,
        )


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    layers = draw(st.integers(1, 12))
    moe = draw(st.none() | st.builds(Moe, experts=st.just(8), top_k=st.integers(1, 8), intermediate=st.just(512)))
    window = draw(
        st.none() | st.builds(SlidingWindow, window_tokens=st.sampled_from([16, 128]), layers=st.integers(0, layers))
    )
    return model(layers=layers, kv_heads=draw(st.sampled_from([1, 2, 4, 8])), moe=moe, window=window)


GPUS = st.builds(
    gpu,
    memory_bytes=st.integers(10**8, 3 * 10**9),
    bandwidth=st.floats(1e10, 1e12),
    flops=st.floats(1e12, 1e14),
    link=st.floats(1e9, 1e11),
)
NODES = st.builds(node, count=st.sampled_from([1, 2, 4, 6, 8]), nic=st.floats(1e6, 1e10), of=GPUS)
CASES = st.builds(
    Case,
    shape=shapes(),
    config=NODES,
    phase=st.sampled_from(list(Phase)),
    slo=st.builds(Slo, ttft_s=st.floats(0.05, 5), tpot_s=st.floats(0.005, 0.5)),
    lengths=st.builds(lengths, st.floats(10, 3000), st.floats(1, 500)),
)


@EXAMPLES
@given(CASES)
def test_capacity_never_grows_with_layers_and_every_positive_one_has_a_layout(case: Case) -> None:
    table = case.table()
    assert np.all(np.isfinite(table.throughput))
    assert np.all(table.throughput >= 0)
    assert np.all(np.diff(table.throughput, axis=2) <= 0)
    assert np.array_equal(table.layout >= 0, table.throughput > 0)
    gpus = case.config.gpu_count
    for text in table.layouts:
        tp, pp, dp = (int(part[2:]) for part in text.split())
        assert tp * pp * dp == gpus


@EXAMPLES
@given(CASES, st.floats(1, 10))
def test_a_laxer_slo_never_costs_capacity(case: Case, factor: float) -> None:
    laxer = case.table(slo=Slo(ttft_s=case.slo.ttft_s * factor, tpot_s=case.slo.tpot_s * factor))
    # With several stages a laxer SLO also lets the other stages take longer, and requests hold KV for longer.
    assert np.all(laxer.throughput[0] >= case.table().throughput[0] * (1 - 1e-9))


@EXAMPLES
@given(CASES, st.floats(0.05, 1), st.floats(0.05, 1))
def test_more_headroom_never_gives_more_capacity_where_memory_does_not_bind(
    case: Case, slo_frac: float, utilization: float
) -> None:
    roomy = replace(case, config=replace(case.config, gpu=replace(case.config.gpu, memory_bytes=10**15)))
    held_back = replace(
        GIVEN,
        slo_frac=dict.fromkeys(Phase, slo_frac),
        max_utilization_frac=dict.fromkeys(Phase, utilization),
    )
    table = roomy.table(assumptions=held_back)
    assert np.all(table.throughput <= utilization * roomy.table().throughput * (1 + 1e-9))
    assert table.slo == case.slo
    by_hand = roomy.table(slo=Slo(ttft_s=slo_frac * case.slo.ttft_s, tpot_s=slo_frac * case.slo.tpot_s))
    np.testing.assert_allclose(table.throughput, utilization * by_hand.throughput, rtol=1e-12)


@EXAMPLES
@given(CASES, st.floats(0.05, 1), st.floats(1, 5))
def test_a_larger_share_of_the_same_pipeline_never_costs_capacity(case: Case, share: float, factor: float) -> None:
    total = case.slo.ttft_s if case.phase is Phase.PREFILL else case.slo.tpot_s
    parts = np.array([share, min(share * factor, 1.0)])
    budgets = Budgets(
        stage_s=total * parts,
        rest_s=total * (1 - parts),
        first_token_s=case.slo.ttft_s * parts,
        hops=np.array([True, True]),
    )
    question = Question(
        shape=case.shape,
        variant="bf16",
        phase=case.phase,
        lengths=case.lengths,
        assumptions=GIVEN,
        factors=FACTORS,
    )
    rate = node_capacity(question, case.config, budgets).rate
    assert np.all(rate[1] >= rate[0] * (1 - 1e-9))


def scaled(config: NodeConfig, what: str, factor: float) -> NodeConfig:
    if what == "nic":
        return replace(config, nic_bytes_per_s=config.nic_bytes_per_s * factor)
    changes: dict[str, dict[str, object]] = {
        "memory": {"memory_bytes": int(config.gpu.memory_bytes * factor)},
        "bandwidth": {"memory_bandwidth_bytes_per_s": config.gpu.memory_bandwidth_bytes_per_s * factor},
        "compute": {
            "compute_flops_per_s": {k: v * factor for k, v in config.gpu.compute_flops_per_s.items()},
        },
        "link": {"link_bytes_per_s": config.gpu.link_bytes_per_s * factor},
    }
    better: Gpu = replace(config.gpu, **changes[what])  # type: ignore[arg-type]  # fields of Gpu, each of its type
    return replace(config, gpu=better)


@EXAMPLES
@given(CASES, st.sampled_from(["nic", "memory", "bandwidth", "compute", "link"]), st.floats(1, 10))
def test_more_of_any_resource_never_costs_capacity(case: Case, what: str, factor: float) -> None:
    better = case.table(config=scaled(case.config, what, factor)).throughput
    assert np.all(better >= case.table().throughput * (1 - 1e-9))


@EXAMPLES
@given(CASES, st.integers(1, 3), st.integers(1, 12))
def test_an_explanation_agrees_with_the_table(case: Case, stages: int, layers: int) -> None:
    layers = min(layers, case.shape.layers)
    found = explain_capacity(
        shape=case.shape,
        variant="bf16",
        phase=case.phase,
        slo=case.slo,
        lengths=case.lengths,
        config=case.config,
        stages=stages,
        layers=layers,
        assumptions=GIVEN,
        factors=FACTORS,
    )
    table = case.table()
    value = table.throughput[stages - 1, 0, layers - 1]
    if found is None:
        assert value == 0
        return
    assert found.throughput == value
    assert found.layout == table.layouts[table.layout[stages - 1, 0, layers - 1]]
    assert found.operating_layers >= layers
    assert found.latency_s + found.hop_s <= found.budget_s
    assert found.weight_bytes + found.kv_bytes + found.activation_bytes <= found.usable_bytes * (1 + 1e-9)
    assert 0 <= found.nic_frac <= 1
    assert (found.hop_s > 0) == (stages > 1)
