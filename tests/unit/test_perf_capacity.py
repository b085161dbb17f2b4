"""Capacity tables: labels, hashes, bad input, data gaps, dtypes, and the shipped factors."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date
from itertools import pairwise

import numpy as np
import pytest

from coral_core.domain import model_math
from coral_core.domain.capacity import CapacityTable
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape, Moe
from coral_core.domain.templates import CapacitySource
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import CoralError, DataGapError, InputError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import capacity_table
from coral_core.perf.explain import Limit, explain_capacity
from coral_core.perf.factors import GEMM_TOKENS, Factors, load_factors
from coral_core.perf.search import Layout, Question, layouts
from tests.fakes.perf_cases import FREE, IDEAL, factors, gpu, lengths, model, node

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def build(
    *,
    shape: ModelShape | None = None,
    variant: str = "bf16",
    phase: Phase = Phase.DECODE,
    slo: Slo = SLO,
    request: Lengths | None = None,
    configs: list[NodeConfig] | None = None,
    max_stages: int = 2,
    assumptions: CapacityAssumptions = FREE,
    using: Factors | None = None,
) -> CapacityTable:
    return capacity_table(
        shape=shape or model(),
        variant=variant,
        phase=phase,
        slo=slo,
        lengths=request or lengths(),
        configs=[node()] if configs is None else configs,
        max_stages=max_stages,
        assumptions=assumptions,
        factors=using or factors(),
    )


def test_a_table_says_what_it_is() -> None:
    table = build(configs=[node("a"), node("b", count=2)], max_stages=3)
    assert (table.model, table.variant, table.phase, table.slo) == ("toy", "bf16", Phase.DECODE, SLO)
    assert table.configs == ("a", "b")
    assert table.throughput.shape == table.layout.shape == (3, 2, 6)
    assert table.max_stages == 3
    assert table.sources == (CapacitySource.ESTIMATED,) * 2
    assert table.error_frac == (None, None)
    assert table.memory_bytes.tolist() == table.usable_memory_bytes.tolist() == [4e9, 8e9]
    assert table.model_bytes == model_math.weight_bytes(model(), "bf16")
    assert np.all(table.throughput > 0)


def test_a_node_that_cannot_hold_a_layer_has_no_capacity() -> None:
    table = build(configs=[node(of=gpu(memory_bytes=10**6))], assumptions=replace(FREE, workspace_bytes=2e6))
    assert not table.throughput.any()
    assert (table.layout == -1).all()
    assert table.usable_memory_bytes.tolist() == [0.0]


def test_utilisation_scales_the_throughput_of_its_phase() -> None:
    half = replace(FREE, max_utilization_frac={Phase.PREFILL: 0.9, Phase.DECODE: 0.5, Phase.AGGREGATED: 0.9})
    assert build(assumptions=half).throughput == pytest.approx(0.5 * build().throughput)


def test_the_hash_covers_what_matters_and_nothing_else() -> None:
    same = [
        build(),
        build(configs=[node(source="elsewhere")]),
        build(shape=replace(model(), source="other", as_of=date(2020, 1, 1), published_params=1.0)),
        build(request=replace(lengths(), source="other")),
    ]
    assert len({table.inputs_hash for table in same}) == 1
    other = [
        build(shape=model(hidden=2048)),
        build(variant="fp8"),
        build(phase=Phase.PREFILL),
        build(slo=Slo(ttft_s=1.0, tpot_s=0.2)),
        build(request=lengths(501)),
        build(configs=[node(nic=3e9)]),
        build(configs=[node(of=gpu(bandwidth=5e11))]),
        build(max_stages=3),
        build(assumptions=replace(FREE, step_overhead_s=1e-3)),
        build(using=factors(IDEAL)),
        build(using=factors(bus=1e9)),
    ]
    assert len({table.inputs_hash for table in [*same, *other]}) == 1 + len(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slo": Slo(ttft_s=math.nan, tpot_s=0.1)}, "slo.ttft_s: nan is not a positive"),
        ({"slo": Slo(ttft_s=1, tpot_s=-0.1)}, "slo.tpot_s: -0.1"),
        ({"request": lengths(0.0)}, "lengths.mean_input_tokens: 0.0"),
        ({"request": lengths(1.0, math.inf)}, "lengths.mean_output_tokens: inf"),
        ({"request": lengths(200_000.0)}, "lengths: mean input and output are 200100 tokens, model toy takes 100000"),
        ({"max_stages": 0}, "max_stages: 0"),
        ({"configs": []}, "configs: no node configuration"),
        ({"configs": [node("a"), node("b"), node("a")]}, "configs: configurations given twice: a"),
        ({"configs": [node("a", nic=0)]}, r"configs\[a\].nic_bytes_per_s: 0"),
        ({"configs": [node("a", of=gpu(flops=math.nan))]}, r"configs\[a\].gpu.compute_flops_per_s\[bf16\]: nan"),
        ({"variant": "int3"}, "model toy has no variant 'int3'"),
    ],
)
def test_bad_input_names_its_place(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(**changes)  # type: ignore[arg-type]  # each is an argument of `build`


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"usable_memory_frac": 0.0}, "usable_memory_frac"),
        ({"nic_usable_frac": math.nan}, "nic_usable_frac"),
        ({"workspace_bytes": -1.0}, "workspace_bytes"),
        ({"step_overhead_s": math.inf}, "step_overhead_s"),
        ({"max_batch_requests": 0}, "max_batch_requests"),
        ({"hop_tensors": 0}, "hop_tensors"),
        ({"max_utilization_frac": {Phase.PREFILL: 1.0, Phase.DECODE: 1.5}}, "max_utilization_frac.decode"),
        ({"max_utilization_frac": {Phase.PREFILL: 1.0}}, "max_utilization_frac.decode"),
    ],
)
def test_bad_assumptions_name_their_field(changes: dict[str, object], where: str) -> None:
    with pytest.raises(InputError, match=f"assumptions.{where}"):
        CapacityAssumptions(**changes)  # type: ignore[arg-type]  # wrong on purpose


def test_an_unknown_gpu_is_a_gap_that_says_what_to_add() -> None:
    with pytest.raises(DataGapError, match=r"GPU Z9 is known for bf16 or fp16 .*gpu_efficiency.csv.*known GPUs: toy"):
        build(configs=[node(of=gpu("Z9"))])


def test_a_dtype_wider_than_16_bit_without_a_row_is_a_gap() -> None:
    with pytest.raises(DataGapError, match="GPU toy is known for fp32"):
        build(variant="fp32")


def test_no_estimates_allowed_is_a_gap() -> None:
    with pytest.raises(DataGapError, match="no measured profile of model toy on node"):
        build(assumptions=replace(FREE, allow_estimates=False))


def test_weight_only_quantisation_reads_fewer_bytes_and_computes_in_16_bit() -> None:
    # The toy GPU has no fp8 units: prefill is no faster than bf16, decode reads half the weights.
    prefill = [build(variant=name, phase=Phase.PREFILL, using=factors(IDEAL)) for name in ("bf16", "fp8")]
    assert prefill[1].throughput[0] == pytest.approx(prefill[0].throughput[0])
    decode = [build(variant=name, slo=Slo(ttft_s=1, tpot_s=0.001)) for name in ("bf16", "fp8")]
    assert decode[1].throughput[0, 0, -1] > decode[0].throughput[0, 0, -1]


def test_fp8_units_are_used_where_their_efficiency_is_known() -> None:
    both = replace(factors(IDEAL), efficiency={("toy", "bf16"): IDEAL, ("toy", "fp8"): IDEAL})
    with_units = [node(nic=1e15, of=gpu(dtypes=("bf16", "fp8"), bandwidth=1e15))]
    slow = build(variant="bf16", phase=Phase.PREFILL, configs=with_units, using=both)
    fast = build(variant="fp8", phase=Phase.PREFILL, configs=with_units, using=both)
    assert fast.throughput[0, 0, -1] > 1.5 * slow.throughput[0, 0, -1]


def test_bf16_falls_back_to_fp16() -> None:
    old = gpu(dtypes=("fp16",))
    assert build(configs=[node(of=old)], using=factors(dtype="fp16")).throughput == pytest.approx(build().throughput)
    assert factors(dtype="fp16").compute_dtype(old, "bf16") == "fp16"


def question(shape: ModelShape, using: Factors | None = None) -> Question:
    return Question(
        shape=shape,
        variant="bf16",
        phase=Phase.DECODE,
        lengths=lengths(),
        assumptions=FREE,
        factors=using or factors(),
    )


def tensor_sizes(shape: ModelShape, count: int, using: Factors | None = None) -> set[int]:
    return {layout.tp for layout in layouts(question(shape, using), node(count=count))}


def test_layouts_divide_what_they_split() -> None:
    assert {str(item) for item in layouts(question(model()), node(count=4))} == {
        "tp1 pp1 dp4",
        "tp1 pp2 dp2",
        "tp1 pp4 dp1",
        "tp2 pp1 dp2",
        "tp2 pp2 dp1",
        "tp4 pp1 dp1",
    }
    ten_kv_heads = model(heads=40, kv_heads=10, hidden=5120, intermediate=17920)  # the shape of Phi-4
    assert tensor_sizes(ten_kv_heads, 8) == {1, 2}
    assert tensor_sizes(model(kv_heads=4), 8) == {1, 2, 4, 8}  # 8: every KV head twice
    assert tensor_sizes(model(intermediate=4098), 8) == {1, 2}
    assert tensor_sizes(model(moe=Moe(experts=8, top_k=2, intermediate=514)), 4) == {1, 2}
    assert tensor_sizes(model(), 4, replace(factors(), all_reduce={})) == {1}
    assert Layout(tp=1, pp=8, dp=1) not in layouts(question(model(layers=6)), node(count=8))


def test_an_explanation_names_the_binding_limit() -> None:
    def limit(
        phase: Phase = Phase.DECODE, slo: Slo = SLO, *, config: NodeConfig | None = None, batch: int = 64
    ) -> Limit:
        found = explain_capacity(
            shape=model(),
            variant="bf16",
            phase=phase,
            slo=slo,
            lengths=lengths(),
            config=config or node(),
            stages=1,
            layers=6,
            assumptions=replace(FREE, max_batch_requests=batch),
            factors=factors(),
        )
        assert found is not None
        return found.limit

    lax = Slo(ttft_s=100.0, tpot_s=10.0)
    assert limit(slo=lax, batch=1, config=node(nic=1e15)) is Limit.BATCH
    assert limit(config=node(nic=1e5)) is Limit.NIC
    assert limit(slo=Slo(ttft_s=1, tpot_s=0.0012), config=node(nic=1e15), batch=1000) is Limit.LATENCY
    tight = node(nic=1e15, of=gpu(memory_bytes=int(model_math.weight_bytes(model(), "bf16")) + 10**8))
    assert limit(slo=lax, config=tight, batch=1000) is Limit.MEMORY
    assert limit(Phase.PREFILL, slo=lax, config=tight, batch=1000) is Limit.MEMORY
    assert limit(Phase.PREFILL, slo=lax, config=node(nic=1e15, of=gpu(memory_bytes=10**12))) is Limit.COMPUTE


def test_an_explanation_of_what_cannot_be_asked_or_served() -> None:
    def explain(layers: int, memory_bytes: int) -> object:
        return explain_capacity(
            shape=model(),
            variant="bf16",
            phase=Phase.DECODE,
            slo=SLO,
            lengths=lengths(),
            config=node(of=gpu(memory_bytes=memory_bytes)),
            stages=1,
            layers=layers,
            factors=factors(),
        )

    assert explain(1, 10**6) is None
    with pytest.raises(InputError, match=r"layers: 7 is not within 1\.\.6"):
        explain(7, 10**9)


def test_a_long_prompt_runs_alone_and_small_balanced_steps_are_allowed() -> None:
    few = replace(FREE, max_prefill_tokens=100)
    assert build(phase=Phase.PREFILL, assumptions=few, request=lengths(500)).throughput[0].max() > 0
    assert build(phase=Phase.AGGREGATED, assumptions=few, request=lengths(5000, 10)).throughput[0].max() > 0


def test_shipped_factors_are_shares_of_peaks_and_grow_slower_than_their_gemm() -> None:
    shipped = load_factors()
    assert {"T4", "V100-16", "A10G", "L4", "L40S", "A100-40", "A100-80", "H100", "H200"} <= {
        name for name, _ in shipped.efficiency
    }
    for row in shipped.efficiency.values():
        shares = (
            row.gemm_bandwidth_frac,
            *row.gemm_peak_frac,
            row.attention_bandwidth_frac,
            *row.attention_peak_frac,
        )
        assert all(0 < share <= 1 for share in shares)
        # Else a GEMM with more rows would take less time, and laws of the search would fail.
        points = list(zip(GEMM_TOKENS, row.gemm_peak_frac, strict=True))
        assert all(b / a < y / x for (x, a), (y, b) in pairwise(points))
    for kernel in shipped.experts.values():
        assert all(0 < share <= 1 for share in (kernel.bandwidth_frac, kernel.peak_frac))
        assert 0 <= kernel.fixed_s < 1e-3
        assert 0 <= kernel.activation_passes < 20
    for gpu_name, _ in shipped.efficiency:
        assert (gpu_name, "full") in shipped.experts
        assert all((gpu_name, size) in shipped.all_reduce for size in (2, 4, 8))


def test_factors_between_and_beyond_the_tabulated_points() -> None:
    row = replace(IDEAL, gemm_peak_frac=(0.1, 0.4, 0.4, 0.4), attention_peak_frac=(0.2, 0.4, 0.5))
    at = row.gemm_peak_frac_at(np.array([1.0, 128.0, 256.0, 512.0, 1e6]))
    assert at == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.4])
    assert row.attention_peak_frac_at(2048) == pytest.approx(math.sqrt(0.2 * 0.4))


def test_every_expected_failure_is_one_line() -> None:
    with pytest.raises(CoralError) as caught:
        build(configs=[node(of=gpu("Z9"))])
    assert "\n" not in str(caught.value)
