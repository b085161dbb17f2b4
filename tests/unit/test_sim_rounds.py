"""Rounds of a decoding pipeline: no more batches under way than micro-batches, and each round within the SLO."""

from __future__ import annotations

import numpy as np
import pytest

from coral_core.catalog.hardware import load_catalog
from coral_core.catalog.models import package_models
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.capacity import capacity_table
from coral_core.perf.factors import load_factors
from coral_core.sim.fleet import sim_instance
from coral_core.sim.run import simulate
from coral_core.sim.timing import Served
from tests.fakes.sim_cases import instance, node, requests, simulation, stage

CONFIGS = load_catalog("paper-extended").configs


def token_s(outcome, output_tokens):
    return (outcome.requests.finish_s - outcome.requests.first_token_s) / (output_tokens - 1)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_late_comers_join_a_batch_and_do_not_make_one_more(micro_batches):
    """Every step takes a second however many requests it has: a round is as long as there are batches under way."""
    stages = [stage(node(fixed_s=1.0)) for _ in range(micro_batches)]
    asked = requests(*((0.7 * k, 1, 200) for k in range(6)))
    outcome = simulate(simulation([instance("i", *stages, micro_batches=micro_batches)], asked, end_s=1e5))
    assert (outcome.requests.generated_tokens == 200).all()
    assert token_s(outcome, 200) == pytest.approx(np.full(6, float(micro_batches)), rel=0.05)


@pytest.mark.parametrize(
    ("arrivals_s", "most_tokens", "finish_s"),
    [
        # Who comes while a step is under way waits for its end, and then goes along in one step with everybody.
        ((0.0, 0.5), 100, (6.0, 8.0)),
        ((0.0, 0.0), 100, (6.0, 6.0)),
        # Only what one step cannot take makes a second one that is under way beside it.
        ((0.0, 0.0), 1, (6.0, 7.0)),
    ],
)
def test_steps_of_vllms_own_scheduler_wait_for_the_oldest(arrivals_s, most_tokens, finish_s):
    """Two stages of a second per step each; one prompt token and three answers."""
    stages = [stage(node(fixed_s=1.0)), stage(node(fixed_s=1.0))]
    one = instance("i", *stages, micro_batches=2, balanced_steps=False, max_batched_tokens=most_tokens)
    asked = requests(*((at, 1, 3) for at in arrivals_s))
    outcome = simulate(simulation([one], asked, end_s=1e3))
    assert outcome.requests.finish_s.tolist() == pytest.approx(finish_s, abs=1e-6)


@pytest.mark.parametrize("balanced_steps", [True, False])
def test_nothing_stalls_where_requests_end_at_different_times(balanced_steps):
    rng = np.random.default_rng(3)
    arrivals, tokens = np.sort(rng.uniform(0, 60, 80)), rng.integers(1, 40, 80)
    rows = [(float(at), 1, int(count)) for at, count in zip(arrivals, tokens, strict=True)]
    stages = [stage(node(fixed_s=0.1), node(fixed_s=0.1, weight=2.0)), stage(node(fixed_s=0.15))]
    one = instance("i", *stages, micro_batches=2, balanced_steps=balanced_steps)
    outcome = simulate(simulation([one], requests(*rows), end_s=1e4))
    assert (outcome.requests.status == 0).all()
    assert outcome.requests.finish_s.max() < 60 + 40 * 0.15 * 4


@pytest.mark.parametrize("layers", [(20, 20), (30, 10), (14, 13, 13)])
@pytest.mark.parametrize("tpot_s", [0.08, 0.15, 0.4])
def test_a_full_instance_keeps_its_slo_round_by_round(layers, tpot_s):
    served = Served(
        shape=package_models()["phi-4"],
        variant=package_models()["phi-4"].default_variant,
        lengths=Lengths(mean_input_tokens=300.0, mean_output_tokens=60.0, source="test"),
        assumptions=CapacityAssumptions(),
        factors=load_factors(),
    )
    slo = Slo(ttft_s=1.0, tpot_s=tpot_s)
    table = capacity_table(
        shape=served.shape, variant=served.variant, phase=Phase.DECODE, slo=slo, lengths=served.lengths,
        configs=[CONFIGS["1xA100"]], max_stages=3,
    )  # fmt: skip
    template = ServingTemplate(
        template_id="t", model="phi-4", variant=served.variant, phase=Phase.DECODE, slo=slo,
        placement=Placement(stages=tuple(Stage(layers=held, nodes=("1xA100",)) for held in layers)),
        throughput_tokens_per_s=1000.0, throughput_requests_per_s=None, method="lattice", source=CapacitySource.ESTIMATED,
    )  # fmt: skip
    one = sim_instance("i", template, table, served, CONFIGS)
    batch = one.max_running_requests / one.micro_batches
    steps_s = [
        part.nodes[0].timing.iteration_s(tokens=batch, rows=batch, kept_tokens=batch * served.kept_tokens)
        for part in one.stages
    ]
    assert one.micro_batches * max(steps_s) <= tpot_s
    assert sum(steps_s) + len(layers) * one.hop_s <= tpot_s
