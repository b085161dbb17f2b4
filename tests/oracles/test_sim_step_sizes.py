"""Prefill in stages of unequal budgets: the size of its steps against a search over all sizes, and what a full replica serves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from coral_core.catalog.hardware import load_catalog
from coral_core.catalog.models import package_models
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Lengths, Phase, Slo
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.budgets import budget_table
from coral_core.perf.capacity import capacity_table
from coral_core.perf.factors import load_factors
from coral_core.perf.network import activation_bytes_per_token
from coral_core.sim.fleet import sim_instance
from coral_core.sim.inputs import SimInput, SimModel, SimOptions, SimRequests
from coral_core.sim.run import simulate
from coral_core.sim.timing import Served
from tests.fakes.sim_cases import instance, node, stage

CONFIGS = load_catalog("paper-extended").configs
LENGTHS = Lengths(mean_input_tokens=1155.0, mean_output_tokens=211.0, source="test")
SLO = Slo(ttft_s=1.0, tpot_s=0.04)
CASES = [
    ("gpt-oss-120b", 0.2, ((35, ("2xH100",), 48), (1, ("2xL4",), 12))),
    ("gpt-oss-120b", 0.3, ((30, ("1xH100", "1xA100"), 40), (6, ("1xL40S",), 20))),
    ("phi-4", 0.6, ((28, ("1xA100",), 36), (12, ("1xL40S", "1xA100"), 24))),
]


def case(model: str, slo_frac: float, rows):
    shape = package_models()[model]
    what = Served(
        shape=shape,
        variant=shape.default_variant,
        lengths=LENGTHS,
        assumptions=CapacityAssumptions(slo_frac=dict.fromkeys(Phase, slo_frac)),
        factors=load_factors(),
    )
    names = sorted({name for _, nodes, _ in rows for name in nodes})
    asked = {
        "shape": shape, "variant": what.variant, "phase": Phase.PREFILL, "slo": SLO, "lengths": LENGTHS,
        "configs": [CONFIGS[name] for name in names], "assumptions": what.assumptions, "factors": what.factors,
    }  # fmt: skip
    table = replace(capacity_table(**asked, max_stages=len(rows)), budgets=budget_table(**asked))
    stages = tuple(Stage(layers=layers, nodes=nodes, budget_frac=share / 60) for layers, nodes, share in rows)
    template = ServingTemplate(
        template_id="t", model=model, variant=what.variant, phase=Phase.PREFILL, slo=SLO,
        placement=Placement(stages=stages), throughput_tokens_per_s=1000.0, throughput_requests_per_s=None,
        method="lattice-free", source=CapacitySource.ESTIMATED,
    )  # fmt: skip
    return what, sim_instance("p", template, table, what, CONFIGS)


def part_s(what: Served, one, tokens: float) -> float:
    """A node's time for its part of a step, by the timing alone."""
    prompts = tokens / LENGTHS.mean_input_tokens
    pairs = tokens * what.pairs_per_prompt_token
    return one.timing.iteration_s(tokens=tokens, rows=prompts, pairs=pairs)


def stage_s(what: Served, held, tokens: float, hop_s: float) -> float:
    """A stage's time for a step of so many tokens with its hop: its slowest node, each with its part by weight; replicas share a NIC."""
    weights = sum(one.weight for one in held.nodes)
    token_bytes = activation_bytes_per_token(what.shape, what.assumptions)
    by_machine = Counter(one.machine for one in held.nodes)
    sent_s = [
        by_machine[one.machine] * token_bytes / one.nic_bytes_per_s * tokens * one.weight / weights
        for one in held.nodes
    ]
    return max(
        one.timing.depth * part_s(what, one, tokens * one.weight / weights) + hop_s + sent
        for one, sent in zip(held.nodes, sent_s, strict=True)
    )


@pytest.mark.parametrize(("model", "slo_frac", "rows"), CASES)
def test_a_step_is_as_large_as_its_way_through_all_stages_allows(model, slo_frac, rows):
    what, one = case(model, slo_frac, rows)
    assert all(node.timing.depth == 1 for held in one.stages for node in held.nodes)
    slo_s = slo_frac * SLO.ttft_s
    sizes = range(1, 16385, 3)
    within = [size for size in sizes if sum(stage_s(what, held, size, one.hop_s) for held in one.stages) <= slo_s]
    largest = within[-1]
    assert len(within) == sizes.index(largest) + 1
    assert largest < sizes[-1], "the bound on tokens must not be what holds here"
    for held in one.stages:
        weights = sum(part.weight for part in held.nodes)
        for part in held.nodes:
            assert part.max_batched_tokens == pytest.approx(max(largest * part.weight / weights, 256), abs=4)


@pytest.mark.parametrize(("model", "slo_frac", "rows"), CASES)
def test_a_full_replica_serves_a_step_in_the_time_of_its_slowest_node(model, slo_frac, rows):
    """Closed form: with always a whole step waiting, tokens/s are those of a step over the slowest node's time for it."""
    what, prefill = case(model, slo_frac, rows)
    weights = [sum(node.weight for node in held.nodes) for held in prefill.stages]
    step = sum(node.max_batched_tokens for node in prefill.stages[0].nodes)
    slowest_s = max(
        part_s(what, node, step * node.weight / weight)
        for held, weight in zip(prefill.stages, weights, strict=True)
        for node in held.nodes
    )
    count, length = 600, round(LENGTHS.mean_input_tokens)
    asked = SimRequests(
        model=np.zeros(count, dtype=np.int64),
        arrival_s=np.zeros(count),
        input_tokens=np.full(count, length),
        output_tokens=np.full(count, 1),
    )
    decode = instance("d", stage(node(fixed_s=1e-6), layers=what.shape.layers), phase=Phase.DECODE, model=model)
    outcome = simulate(
        SimInput(
            models=(SimModel(name=model),),
            instances=(prefill, replace(decode, variant=prefill.variant)),
            requests=asked,
            options=SimOptions(end_s=1e4, compiled=True),
        )
    ).requests
    first = np.sort(outcome.first_token_s)
    middle = slice(count // 4, 3 * count // 4)
    rate = (count // 2 - 1) * length / (first[middle][-1] - first[middle][0])
    assert rate == pytest.approx(step / slowest_s, rel=0.1)
