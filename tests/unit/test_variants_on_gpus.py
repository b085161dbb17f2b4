"""Which variants which GPUs can serve: a pair that cannot run has no capacity, hence no template."""

from __future__ import annotations

import pytest

from coral_core.catalog import load_gpus, load_models
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.perf import capacity_table
from coral_core.perf.capacity import runs_variant
from coral_core.perf.factors import load_factors

MODERN = {"A10G", "L4", "L40S", "A100-40", "A100-80", "H100", "H200", "B200", "RTX-PRO-6000"}
OLD = {"T4", "V100-16", "V100-32"}


def table(variant, *names, model="llama-3.1-8b", phase=Phase.DECODE):
    gpus = load_gpus()
    configs = [
        NodeConfig(
            name=name,
            gpu=gpus[name],
            gpu_count=1,
            nic_bytes_per_s=12.5e9,
            cloud="test",
            source="test",
            as_of=gpus[name].as_of,
        )
        for name in names
    ]
    return capacity_table(
        shape=load_models()[model],
        variant=variant,
        phase=phase,
        slo=Slo(ttft_s=2.0, tpot_s=0.2),
        lengths=Lengths(mean_input_tokens=500, mean_output_tokens=100, source="test"),
        configs=configs,
        max_stages=1,
    )


@pytest.mark.parametrize(
    ("model", "variant", "able"),
    [
        ("llama-3.1-8b", "bf16", MODERN | OLD),
        ("llama-3.1-8b", "fp8", MODERN),
        ("llama-3.1-8b", "int4", MODERN | OLD),
        ("gpt-oss-20b", "mxfp4", MODERN),
    ],
)
def test_a_gpu_that_cannot_run_a_variant_has_no_capacity_for_it(model, variant, able):
    gpus, shape = load_gpus(), load_models()[model]
    assert {name for name, gpu in gpus.items() if runs_variant(shape, variant, gpu)} == able
    names = sorted(gpus)
    # one layer fits everywhere, so only the variant can be what stops a GPU
    found = table(variant, *names, model=model).throughput[0, :, 0]
    assert {name for name, rate in zip(names, found, strict=True) if rate > 0} == able


@pytest.mark.parametrize(
    "model", sorted(n for n, shape in load_models().items() if shape.moe is None and n[:5] != "tiny-")
)
def test_every_dense_model_has_its_weights_in_16_8_and_4_bits(model):
    assert {"bf16", "fp8", "int4"} <= set(load_models()[model].variants)


def test_fp8_is_computed_as_such_where_hardware_and_factors_have_it_and_widened_elsewhere():
    factors, gpus = load_factors(), load_gpus()
    computed = {name: factors.compute_dtype(gpus[name], "fp8") for name in sorted(MODERN)}
    assert {name for name, dtype in computed.items() if dtype == "fp8"} == {
        "L40S",
        "H100",
        "H200",
        "B200",
        "RTX-PRO-6000",
    }
    assert {dtype for dtype in computed.values() if dtype != "fp8"} == {"bf16"}


@pytest.mark.parametrize("gpu", sorted(MODERN))
def test_smaller_weights_never_decode_slower_than_wide_ones(gpu):
    bf16, fp8, int4 = (table(variant, gpu).throughput[0, 0, -1] for variant in ("bf16", "fp8", "int4"))
    assert 0 < bf16 <= min(fp8, int4)


def test_a_table_without_capable_hardware_hashes_differently_from_one_that_knows_no_such_rule():
    assert table("fp8", "T4").inputs_hash != table("bf16", "T4").inputs_hash
    assert not table("fp8", "T4").throughput.any()
    assert (table("fp8", "T4").layout == -1).all()
