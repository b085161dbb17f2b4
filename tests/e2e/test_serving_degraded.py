"""A stage of two nodes loses one, then the other, on real engines: degraded first, failed whole then.

Runtime `coral`, stages (2, 1): five layers on nodes 0 (which runs the engine) and 1, three on node 2.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pytest
import yaml

from artifacts.canonical import sha256_hex
from artifacts.library import commit
from artifacts.schemas import TEMPLATE_SCHEMA
from artifacts.shards import ShardKey, write_shard
from artifacts.store import open_store
from artifacts.templates import template_rows
from coral_core.cloud.apply import apply_plan, preview_plan
from coral_core.cloud.local_processes import members
from coral_core.cloud.ports import ApplyPolicy, ApplyStatus, FleetEvent, Ports
from coral_core.cloud.steps import Action, Due, ReconcilePolicy
from coral_core.config.resolve import ResolvedScenario, resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.fleet import FleetId, FleetLimits, FleetPlan, Wanted, spec_of
from coral_core.domain.hardware import Market
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Phase
from tasks.library import build_spec_from_scenario
from tasks.local_serving import MARK
from tasks.node_throughputs import node_throughputs
from tasks.providers import open_provider
from tests.fakes.artifact_cases import draft_of
from tests.fakes.local_fleet import PROMPTS, LocalFleet, kill, local_fleet, wait_for
from tests.fakes.openai_streams import LongAnswer, LongStream, tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NOTICED_S = 15.0
LONG_TOKENS = 600
MODEL, CONFIG = "tiny-chat", "local-small"
THROUGHPUT = 4.0
SCENARIO = {
    "name": "wide",
    "catalog": "local",
    "regions": ["local"],
    "models": [
        {
            "model": MODEL,
            "phases": ["aggregated"],
            "requests_per_s": 1,
            "lengths": {"mean_input_tokens": 64, "mean_output_tokens": 32},
            "slo": {"ttft_s": 10.0, "tpot_s": 0.5},
        }
    ],
    "runtimes": ["coral"],
    "library": {"name": "wide"},
}


def wide_template(resolved: ResolvedScenario) -> ServingTemplate:
    (model,) = resolved.models
    return ServingTemplate(
        template_id="a-wide",
        model=MODEL,
        variant=model.variant,
        phase=Phase.AGGREGATED,
        slo=model.demand.slo,
        placement=Placement(stages=(Stage(layers=5, nodes=(CONFIG, CONFIG)), Stage(layers=3, nodes=(CONFIG,)))),
        throughput_tokens_per_s=None,
        throughput_requests_per_s=THROUGHPUT,
        method="lattice",
        source=CapacitySource.ESTIMATED,
    )


def publish(url: str, template: ServingTemplate) -> None:
    """A library of this template alone, as the coordinator looks it up."""
    store = open_store(url)
    layouts = [["tp1 pp1 dp1"] * len(stage.nodes) for stage in template.placement.stages]
    rows = [{**row, "stage_layouts": layouts} for row in template_rows([template]).to_pylist()]
    key = ShardKey(
        model=template.model,
        variant=template.variant,
        phase=template.phase,
        ttft_s=template.slo.ttft_s,
        tpot_s=template.slo.tpot_s,
        method=template.method,
        part=0,
        parts=1,
        inputs_hash=sha256_hex(b"wide"),
    )
    shard = write_shard(store, "wide", key, pa.Table.from_pylist(rows, schema=TEMPLATE_SCHEMA), statistics={})
    commit(store, draft_of([shard], library="wide"))


def left_without_node_1(resolved: ResolvedScenario, template: ServingTemplate) -> float:
    """By what the nodes can do: the weaker stage of what is left, by the weaker one before."""
    spec = build_spec_from_scenario(resolved)
    (model,) = spec.models
    node_0, node_1, node_2 = node_throughputs(template, spec, model)
    return min(node_0, node_2) / min(node_0 + node_1, node_2)


@dataclass
class Wide:
    """One instance of the template on three nodes of this machine, and runs that want it; `left_frac` without node 1."""

    fleet: LocalFleet
    template: ServingTemplate
    left_frac: float

    def run(self, count: int, doing: Any = apply_plan) -> Any:
        provider = open_provider(self.fleet.settings)
        events: list[FleetEvent] = []
        wanted = Wanted(spec=spec_of(self.template), region="local", market=Market.ON_DEMAND, count=count)
        fleet = FleetId(name="local", account=provider.provisioner.account())
        return doing(
            FleetPlan(fleet=fleet, plan_id="wide", epoch=1, wanted=(wanted,)),
            regions=["local"],
            limits=FleetLimits(
                max_nodes=8, max_usd_per_h=10.0, price_usd_per_h={("local", CONFIG, Market.ON_DEMAND): 0.05}
            ),
            policy=ApplyPolicy(
                reconcile=ReconcilePolicy(zones={("local", CONFIG, Market.ON_DEMAND): ("local-a",)}),
                settle_s=0.0,
                poll_s=0.5,
                deadline_s=500.0,
            ),
            ports=Ports(
                provisioner=provider.provisioner,
                engine=provider.engine,
                clock=provider.clock,
                sleep=provider.sleep,
                guard=lambda: 1e9,
                record=events.append,
            ),
        )

    @property
    def row(self) -> dict[str, Any]:
        (row,) = self.fleet.rows()
        return row

    def processes(self) -> set[int]:
        """What runs beside gateway and coordinator."""
        programs = {program.pid for program in self.fleet.programs.running.values()}
        return {one.pid for one in members(self.fleet.serving.folder, mark_name=MARK)} - programs


@pytest.fixture(scope="module")
def wide(tmp_path_factory, engine_python) -> Iterator[Wide]:
    folder = tmp_path_factory.mktemp("wide")
    path = folder / "wide.yaml"
    path.write_text(yaml.safe_dump(SCENARIO))
    resolved = resolve_scenario(load_scenario(str(path)))
    template = wide_template(resolved)
    with local_fleet(folder / "fleet", engine_python, path) as fleet:
        publish(fleet.serving.environment["CORAL_STORE"], template)
        found = Wide(fleet=fleet, template=template, left_frac=left_without_node_1(resolved, template))
        report = found.run(1)
        assert report.status is ApplyStatus.CONVERGED, f"{report.reason}\n{fleet.logs()}"
        yield found


@pytest.fixture(scope="module")
def client(wide):
    url = wide.fleet.serving.gateway_url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def begun(stack: ExitStack, answer: LongAnswer) -> LongAnswer:
    """An answer that has begun: in turn each node of the first stage gets one."""
    stack.enter_context(answer)
    assert answer.begun.wait(60)
    return answer


def own_part(engine_node: Path, fleet: LocalFleet) -> list[int]:
    """The process that computes the engine's own node's share, not the engine's."""
    found = [
        pid
        for pid in fleet.engines(engine_node)
        if b"coral_core.engine.plugin.stage_node" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    assert found, f"no part of its own\n{fleet.logs()}"
    return found


def test_a_stage_that_loses_a_node_serves_on_with_less_and_without_nodes_fails_whole(wide: Wide, client):
    fleet, name = wide.fleet, wide.row["name"]
    answers = fleet.answers()[MODEL]
    assert [tokens(client, MODEL, prompt) for prompt in PROMPTS[MODEL]] == answers
    assert (wide.row["weight"], wide.row["weight_frac"]) == (THROUGHPUT, 1.0)
    first, second, third = fleet.node_folders(name)

    # One of two: the machine is gone, its agent and its engine's part.
    with ExitStack() as stack:
        streams = [begun(stack, LongStream(client, MODEL, most_tokens=LONG_TOKENS)) for _ in range(4)]
        wholes = [begun(stack, LongAnswer(client, MODEL, most_tokens=300)) for _ in range(2)]
        kill_s = time.monotonic()
        kill(fleet.agent(second), *fleet.engines(second))
        wait_for("the weight", lambda: wide.row["weight_frac"] == pytest.approx(wide.left_frac), within_s=NOTICED_S)
        noticed_s = time.monotonic() - kill_s
        assert [tokens(client, MODEL, prompt) for prompt in PROMPTS[MODEL]] == answers, "new requests are answered"
    broken = [stream for stream in streams if not stream.whole]
    assert len(broken) == 2, [stream.ended[-1] for stream in streams]
    longest = max((stream.tokens for stream in streams), key=len)
    assert len(longest) == LONG_TOKENS
    for answer in (*streams, *wholes):
        assert answer.tokens == longest[: len(answer.tokens)], "no wrong token, also where it breaks off"
        if not answer.whole:
            assert isinstance(answer.ended[-1], openai.APIError)
            assert answer.ended_s - kill_s < NOTICED_S
    row = wide.row
    assert (row["ready"], row["weight"], row["weight_frac"]) == (True, THROUGHPUT, pytest.approx(wide.left_frac))
    assert 0.5 <= wide.left_frac < 0.9
    assert noticed_s < NOTICED_S

    # The fleet would bring another one first.
    preview = wide.run(1, preview_plan)
    steps = [(step.action, step.instance_id == name, step.due) for step in preview.todo.steps]
    assert steps == [
        (Action.START, False, Due.NOW),
        (Action.WEIGHT, True, Due.NOW),
        (Action.WEIGHT, True, Due.REPLACEMENT),
        (Action.DRAIN, True, Due.REPLACEMENT),
        (Action.STOP, True, Due.DRAINED),
    ]

    # The last one of the stage: the engine's own part.
    with LongStream(client, MODEL) as stream:
        assert stream.begun.wait(60)
        kill_s = time.monotonic()
        kill(*own_part(first, fleet))
        wait_for("the failure", lambda: wide.row["failed"], within_s=NOTICED_S)
        wait_for("the engine's end", lambda: not fleet.engines(first) + fleet.engines(third), within_s=NOTICED_S)
    assert isinstance(stream.ended[-1], openai.APIError)
    assert stream.ended_s - kill_s < NOTICED_S
    with pytest.raises(openai.APIStatusError) as refused:
        tokens(client, MODEL, PROMPTS[MODEL][0])
    assert refused.value.status_code == 503
    assert float(refused.value.response.headers["retry-after"]) > 0

    assert wide.run(0).status is ApplyStatus.CONVERGED
    wait_for("the end of every process", lambda: not wide.processes(), within_s=30)
