"""Pipelines whose steps pass through all stages: an independent recursion as oracle, and what templates promise of them."""

from __future__ import annotations

import heapq

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
from coral_core.sim.inputs import SimInput, SimModel, SimOptions, SimRequests
from coral_core.sim.run import simulate
from coral_core.sim.timing import Served
from tests.fakes.sim_cases import instance, node, requests, simulation, stage

CONFIGS = load_catalog("paper-extended").configs


class Recursion:
    """Steps of requests of one prompt token, in max-plus; `stages` hold (fixed_s, token_s) of each node.

    A part begins when its node is through with earlier steps and all that feeds it has come. A step is over when its last
    part is, and none before an earlier one.
    """

    def __init__(self, stages, hop_s: float, under_way: int, arrivals, outputs) -> None:
        self.stages, self.hop_s, self.under_way = stages, hop_s, under_way
        self.outputs, self.left = outputs.tolist(), outputs.tolist()
        self.bound = [[r % len(row) for row in stages] for r in range(len(arrivals))]
        self.free_s = [[0.0] * len(row) for row in stages]
        self.waiting: list[int] = []
        self.back: list[int] = []
        self.steps, self.over_s = 0, 0.0
        self.finish_s = np.full(len(arrivals), np.nan)
        self.events = [(float(at), r, self.waiting.append, r) for r, at in enumerate(arrivals)]
        self.count = len(self.events)

    def finish(self) -> np.ndarray:
        """When each request is done."""
        while self.events:
            now_s, _, act, what = heapq.heappop(self.events)
            self.now_s = now_s
            act(what)
            if not (self.events and self.events[0][0] == now_s):
                while self.steps < self.under_way and self.form():
                    pass
        return self.finish_s

    def push(self, at_s: float, act, what) -> None:
        heapq.heappush(self.events, (at_s, self.count, act, what))
        self.count += 1

    def form(self) -> bool:
        live = [r for r, left in enumerate(self.left) if 0 < left < self.outputs[r]]
        chosen = []
        if len(self.back) * (self.under_way + 1) > len(live):
            for entry in range(len(self.stages[0])):
                most = max(-(-sum(self.bound[r][0] == entry for r in live) // self.under_way), 1)
                chosen += [r for r in self.back if self.bound[r][0] == entry][:most]
        self.back = [r for r in self.back if r not in chosen]
        chosen += self.waiting
        self.waiting.clear()
        if chosen:
            self.steps += 1
            through_s, in_order = self.through(chosen)
            self.over_s = max(self.over_s, through_s)
            self.push(self.over_s, self.merge, in_order)
        return bool(chosen)

    def through(self, chosen: list[int]) -> tuple[float, list[int]]:
        """When the step is through, and its requests in the order in which they come out."""
        came_s = dict.fromkeys(chosen, self.now_s)
        for s, row in enumerate(self.stages):
            for n, (fixed_s, token_s) in enumerate(row):
                mine = [r for r in chosen if self.bound[r][s] == n]
                if mine:
                    begun_s = max(self.free_s[s][n], *(came_s[r] for r in mine))
                    self.free_s[s][n] = begun_s + fixed_s + token_s * len(mine)
                    came_s |= dict.fromkeys(mine, self.free_s[s][n] + self.hop_s)
            chosen = sorted(chosen, key=came_s.__getitem__)
        return max(came_s.values()) - self.hop_s, chosen

    def merge(self, chosen: list[int]) -> None:
        for r in chosen:
            self.left[r] -= 1
            if self.left[r] == 0:
                self.finish_s[r] = self.now_s
        going = [r for r in chosen if self.left[r] > 0]
        if going:
            self.push(self.now_s + self.hop_s, self.resume, going)
        else:
            self.steps -= 1

    def resume(self, going: list[int]) -> None:
        self.steps -= 1
        self.back += going


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 2), (2, 3), (1, 3, 2), (2, 1, 1, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_every_finish_is_that_of_the_recursion(widths, seed):
    random = np.random.default_rng([seed, *widths])
    stages = [[tuple(random.uniform(0.5, 1.5, 2) * (0.02, 0.002)) for _ in range(width)] for width in widths]
    arrivals = np.sort(random.uniform(0, 4, 80))
    outputs = random.integers(1, 40, 80)
    hop_s, under_way = float(random.choice([0.0, 0.003])), int(random.integers(1, len(widths) + 2))
    nodes = [[node(fixed_s=fixed_s, token_s=token_s) for fixed_s, token_s in row] for row in stages]
    one = instance("i", *(stage(*row) for row in nodes), hop_s=hop_s, micro_batches=under_way)
    asked = requests(*((float(at), 1, int(n)) for at, n in zip(arrivals, outputs, strict=True)))
    found = simulate(simulation([one], asked)).requests.finish_s
    assert found == pytest.approx(Recursion(stages, hop_s, under_way, arrivals, outputs).finish(), rel=1e-9)


MODEL = package_models()["qwen3-32b"]
LENGTHS = Lengths(mean_input_tokens=600.0, mean_output_tokens=100.0, source="test")
SLO = Slo(ttft_s=1.0, tpot_s=0.1)
LOAD = 0.75
"""What is left serves for lengths and arrivals that differ: a plan's `max_utilization_frac`."""


@pytest.mark.parametrize(
    "nodes",
    [
        (("2xL40S",), ("2xL40S",)),
        (("2xL40S",), ("2xA10G",)),
        (("2xL40S", "2xA10G"), ("2xL40S",)),
        (("2xL40S",), ("2xL40S", "2xA10G")),
        (("2xL40S", "2xL40S"), ("2xL40S",)),
        (("2xL40S", "2xA10G"), ("2xL40S", "2xA10G")),
        (("4xL40S",), ("2xL40S", "4xA10G"), ("2xA10G",)),
        (("2xA10G",), ("2xL40S",), ("2xA10G",)),
        (("4xA10G",), ("1xL40S",), ("2xL40S", "2xL40S"), ("2xA10G",)),
    ],
)
def test_a_replica_serves_what_its_template_promises(nodes):
    """Planned against 0.9 of the bound and loaded with 0.75 of T, requests of random lengths keep the whole of it."""
    served = Served(
        shape=MODEL,
        variant=MODEL.default_variant,
        lengths=LENGTHS,
        assumptions=CapacityAssumptions(slo_frac=dict.fromkeys(Phase, 0.9)),
        factors=load_factors(),
    )
    names = sorted({name for row in nodes for name in row})
    table = capacity_table(
        shape=MODEL, variant=served.variant, phase=Phase.DECODE, slo=SLO, lengths=LENGTHS,
        configs=[CONFIGS[name] for name in names], max_stages=len(nodes), assumptions=served.assumptions,
    )  # fmt: skip
    template = best_template(table, nodes)
    decode = sim_instance("d", template, table, served, CONFIGS)
    prefill = instance(
        "p",
        stage(node(fixed_s=1e-6), layers=MODEL.layers),
        phase=Phase.PREFILL,
        model=MODEL.name,
        variant=decode.variant,
    )
    random, count = np.random.default_rng(len(nodes)), 1500
    rate = LOAD * template.throughput / LENGTHS.mean_output_tokens
    arrival_s = np.cumsum(random.exponential(1 / rate, count))
    output_tokens = np.rint(random.gamma(4.0, LENGTHS.mean_output_tokens / 4.0, count)).astype(np.int64) + 10
    asked = SimRequests(
        model=np.zeros(count, dtype=np.int64),
        arrival_s=arrival_s,
        input_tokens=np.maximum(random.poisson(LENGTHS.mean_input_tokens, count), 1),
        output_tokens=output_tokens - 9,
    )
    outcome = simulate(
        SimInput(
            models=(SimModel(name=MODEL.name),),
            instances=(prefill, decode),
            requests=asked,
            options=SimOptions(end_s=float(arrival_s[-1] + 1000), compiled=True),
        )
    ).requests
    several = asked.output_tokens > 1
    tpot_s = ((outcome.finish_s - outcome.decode_s) / np.maximum(asked.output_tokens - 1, 1))[several]
    assert (tpot_s <= SLO.tpot_s).mean() > 0.995, np.percentile(tpot_s, [50, 95, 99])


def best_template(table, nodes) -> ServingTemplate:
    """The most throughput over all ways to lay the layers over these stages: by trying every throughput there is."""
    curves = [sum(table.throughput[len(nodes) - 1, table.configs.index(name)] for name in row) for row in nodes]
    for rate in np.unique(np.concatenate(curves))[::-1]:
        held = [int((curve >= rate).sum()) for curve in curves]
        if sum(held) >= table.layers and min(held) > 0:
            for s in range(len(held)):
                held[s] -= min(sum(held) - table.layers, held[s] - 1)
            stages = tuple(Stage(layers=layers, nodes=row) for layers, row in zip(held, nodes, strict=True))
            return ServingTemplate(
                template_id="t", model=table.model, variant=table.variant, phase=table.phase, slo=table.slo,
                placement=Placement(stages=stages), throughput_tokens_per_s=float(rate), throughput_requests_per_s=None,
                method="brute force", source=CapacitySource.ESTIMATED,
            )  # fmt: skip
    raise AssertionError("this case is meant to be feasible")
