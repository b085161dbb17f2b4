"""Instances made from templates take the planner's times, memory and limits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from coral_core.catalog.hardware import load_catalog
from coral_core.catalog.models import package_models
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.errors import DataGapError, InputError, NoSolutionError
from coral_core.perf import memory
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.budgets import budget_table
from coral_core.perf.capacity import capacity_table
from coral_core.perf.factors import load_factors
from coral_core.perf.roofline import attended_tokens_per_prompt_token, layer_time, mean_context_tokens, step_of
from coral_core.perf.search import Layout
from coral_core.sim.fleet import sim_instance
from coral_core.sim.inputs import SimRequests
from coral_core.sim.run import simulate
from coral_core.sim.timing import Served, kv_blocks, node_timing, sim_model
from tests.fakes.sim_cases import simulation

CONFIGS = load_catalog("paper-extended").configs
LENGTHS = Lengths(mean_input_tokens=1155.0, mean_output_tokens=211.0, source="test")
SLO = Slo(ttft_s=1.2, tpot_s=0.06)


def served(model: str = "phi-4", **assumptions) -> Served:
    shape = package_models()[model]
    return Served(
        shape=shape,
        variant=shape.default_variant,
        lengths=LENGTHS,
        assumptions=CapacityAssumptions(**assumptions),
        factors=load_factors(),
    )


def table_of(what: Served, phase: Phase, names, *, slo: Slo = SLO, stages: int = 2):
    return capacity_table(
        shape=what.shape,
        variant=what.variant,
        phase=phase,
        slo=slo,
        lengths=what.lengths,
        configs=[CONFIGS[name] for name in names],
        max_stages=stages,
        assumptions=what.assumptions,
        factors=what.factors,
    )


def template_of(
    what: Served, phase: Phase, *stages: Stage, throughput: float = 1000.0, slo: Slo = SLO
) -> ServingTemplate:
    is_aggregated = phase is Phase.AGGREGATED
    return ServingTemplate(
        template_id="t",
        model=what.shape.name,
        variant=what.variant,
        phase=phase,
        slo=slo,
        placement=Placement(stages=stages),
        throughput_tokens_per_s=None if is_aggregated else throughput,
        throughput_requests_per_s=throughput if is_aggregated else None,
        method="test",
        source=CapacitySource.ESTIMATED,
    )


@pytest.mark.parametrize("model", ["phi-4", "gpt-oss-20b", "qwen3-235b"])
@pytest.mark.parametrize(
    ("config", "layout"), [("1xH100", Layout(tp=1, pp=1, dp=1)), ("4xL40S", Layout(tp=4, pp=1, dp=1))]
)
@pytest.mark.parametrize("phase", list(Phase))
def test_batches_of_mean_lengths_take_the_planners_time(model, config, layout, phase):
    what = served(model)
    timing = node_timing(what, CONFIGS[config], 7, layout)
    batch = np.array([1.0, 3.0, 10.0, 14.0] if phase is Phase.PREFILL else [1.0, 3.0, 10.0, 47.0, 200.0])
    step = step_of(phase, batch, LENGTHS)
    expected = layer_time(
        shape=what.shape,
        variant=what.variant,
        gpu=CONFIGS[config].gpu,
        tp=layout.tp,
        step=step,
        lengths=LENGTHS,
        factors=what.factors,
        assumptions=what.assumptions,
    )
    pairs = attended_tokens_per_prompt_token(what.shape, LENGTHS.mean_input_tokens)
    found = [
        timing.iteration_s(
            tokens=step.tokens[k],
            rows=step.decode_requests[k] + step.prompts[k],
            kept_tokens=step.decode_requests[k] * what.kept_tokens,
            pairs=step.prefill_tokens[k] * pairs,
        )
        for k in range(len(batch))
    ]
    # Between the tables' points, 12% apart, straight lines stand for the kinks of memory-bound kernels; fractions of a
    # sampled row (aggregated) have no time of their own there.
    np.testing.assert_allclose(found, 7 * expected.total_s + what.assumptions.step_overhead_s, rtol=0.02)


def test_internal_pipelines_hold_a_share_of_the_layers_and_deliver_later():
    what = served()
    whole = node_timing(what, CONFIGS["4xL40S"], 8, Layout(tp=1, pp=1, dp=4))
    parted = node_timing(what, CONFIGS["4xL40S"], 8, Layout(tp=1, pp=4, dp=1))
    overhead_s = what.assumptions.step_overhead_s
    assert parted.depth == 4
    assert whole.depth == 1
    for size in (1, 64, 3000):
        quarter_s = (whole.iteration_s(tokens=size, rows=size) - overhead_s) / 4
        assert parted.iteration_s(tokens=size, rows=size) == pytest.approx(quarter_s + overhead_s)


def test_kv_is_what_weights_and_activations_leave():
    what, config = served(), CONFIGS["2xA100"]
    layout = Layout(tp=2, pp=1, dp=1)
    blocks = kv_blocks(what, config, 40, layout, batch_tokens=2048, rows=64, block_tokens=16)
    free = memory.usable_bytes(config.gpu, what.assumptions)
    free -= 40 * memory.weight_bytes_per_gpu_layer(what.shape, what.variant, 2)
    token_bytes = 40 * 2 * (10 / 2) * 128 * 2  # 10 KV heads of 128, K and V, 16 bit, over two GPUs
    assert blocks * 16 * token_bytes < free
    assert blocks * 16 * token_bytes > 0.97 * free
    assert kv_blocks(what, CONFIGS["1xL4"], 40, Layout(tp=1, pp=1, dp=1), batch_tokens=1, rows=1, block_tokens=16) == 0


def test_what_a_model_sends_and_keeps():
    plain, sliding = sim_model(served()), sim_model(served("gpt-oss-20b"), max_wait_s=2.0)
    assert plain.kv_bytes_per_token == 2 * 10 * 128 * 2
    assert plain.activation_bytes_per_token == 5120 * 2 * 2
    assert math.isinf(plain.window_tokens)
    assert (sliding.window_tokens, sliding.window_frac, sliding.max_wait_s) == (128.0, 0.5, 2.0)


@pytest.mark.parametrize("phase", list(Phase))
def test_an_instance_has_the_templates_shape_and_keeps_its_slo(phase):
    what = served()
    table = table_of(what, phase, ["2xL40S", "1xA100"])
    template = template_of(
        what, phase, Stage(layers=12, nodes=("2xL40S",)), Stage(layers=28, nodes=("1xA100", "1xA100"))
    )
    one = sim_instance("i", template, table, what, CONFIGS, region="r", boot_s=3.0, ready_at_start=False)
    layout = Layout.parse(table.layouts[table.layout[1, 0, 11]])
    assert [part.layers for part in one.stages] == [12, 28]
    assert len(one.stages[0].nodes) == layout.dp
    assert len(one.stages[1].nodes) == 2 * Layout.parse(table.layouts[table.layout[1, 1, 27]]).dp
    assert sum(n.weight for n in one.stages[0].nodes) == pytest.approx(table.throughput[1, 0, 11])
    per_request = {Phase.PREFILL: 1155.0, Phase.DECODE: 211.0, Phase.AGGREGATED: 1.0}[phase]
    assert one.weight == pytest.approx(1000.0 / per_request)
    assert (one.region, one.template, one.boot_s, one.ready_at_start) == ("r", "t", 3.0, False)
    assert one.micro_batches >= 2
    assert one.hop_s == what.assumptions.hop_latency_s
    # One request on an idle instance is within the SLO of its phase.
    tokens_in, tokens_out = (1155, 1) if phase is Phase.PREFILL else (10, 50)
    alone = SimRequests(
        model=np.zeros(1, dtype=np.int64), arrival_s=np.zeros(1),
        input_tokens=np.array([tokens_in]), output_tokens=np.array([tokens_out]),
    )  # fmt: skip
    ready = replace(one, ready_at_start=True, phase=Phase.AGGREGATED)
    outcome = simulate(replace(simulation([ready], alone), models=(sim_model(what),)))
    assert outcome.requests.first_token_s[0] < SLO.ttft_s
    if tokens_out > 1:
        assert (outcome.requests.finish_s - outcome.requests.first_token_s)[0] / (tokens_out - 1) < SLO.tpot_s


def test_free_stage_shares_of_the_slo_are_followed():
    what = served()
    budgets = budget_table(
        shape=what.shape, variant=what.variant, phase=Phase.DECODE, slo=SLO, lengths=LENGTHS,
        configs=[CONFIGS["1xL40S"], CONFIGS["1xA100"]], assumptions=what.assumptions, factors=what.factors,
    )  # fmt: skip
    table = table_of(what, Phase.DECODE, ["1xL40S", "1xA100"])
    shares = (
        Stage(layers=12, nodes=("1xL40S",), budget_frac=0.25),
        Stage(layers=28, nodes=("1xA100",), budget_frac=0.75),
    )
    template = template_of(what, Phase.DECODE, *shares)
    one = sim_instance("i", template, replace(table, budgets=budgets), what, CONFIGS)
    assert one.stages[0].nodes[0].weight == pytest.approx(budgets.throughput[14, 0, 11])
    assert one.stages[1].nodes[0].weight == pytest.approx(budgets.throughput[44, 1, 27])
    with pytest.raises(InputError, match="free stage budgets"):
        sim_instance("i", template, table, what, CONFIGS)


def test_a_tighter_budget_means_smaller_batches():
    what = served()
    table = table_of(what, Phase.DECODE, ["1xA100"])
    template = template_of(what, Phase.DECODE, Stage(layers=40, nodes=("1xA100",)))
    whole = sim_instance("i", template, table, what, CONFIGS)
    tight = sim_instance("i", template, table, what, CONFIGS, budget_frac=0.6)
    assert tight.max_running_requests < whole.max_running_requests
    # The largest batch takes what the SLO allows, one more request does not.
    timing, size = whole.stages[0].nodes[0].timing, whole.max_running_requests
    kept = what.kept_tokens
    assert timing.iteration_s(tokens=size, rows=size, kept_tokens=size * kept) <= SLO.tpot_s
    assert timing.iteration_s(tokens=size + 1, rows=size + 1, kept_tokens=(size + 1) * kept) > SLO.tpot_s


def test_what_cannot_be_simulated_is_said():
    what = served()
    table = table_of(what, Phase.DECODE, ["1xA100", "1xL4"])
    with pytest.raises(InputError, match="no capacity of configuration '1xH100'"):
        sim_instance("i", template_of(what, Phase.DECODE, Stage(layers=40, nodes=("1xH100",))), table, what, CONFIGS)
    with pytest.raises(InputError, match="40 layers on 1xL4: the configuration has no capacity there"):
        sim_instance("i", template_of(what, Phase.DECODE, Stage(layers=40, nodes=("1xL4",))), table, what, CONFIGS)
    with pytest.raises(DataGapError, match="tp2xpp1"):
        Layout.parse("tp2xpp1")
    # A table made when the workspace was smaller.
    cramped = replace(what, assumptions=CapacityAssumptions(workspace_bytes=48e9))
    with pytest.raises(NoSolutionError, match="leave no KV"):
        sim_instance("i", template_of(what, Phase.DECODE, Stage(layers=40, nodes=("1xA100",))), table, cramped, CONFIGS)


def test_context_means_are_the_planners():
    what = served("gpt-oss-20b")
    context = mean_context_tokens(LENGTHS)
    assert what.kept_tokens == pytest.approx(0.5 * 128 + 0.5 * context)
