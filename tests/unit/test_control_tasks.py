"""Who a node is, what it is told to run, and the commands around both."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from artifacts.library import open_library
from artifacts.store import open_store
from artifacts.templates import row_to_template
from coral_core.cli.entry import run
from coral_core.config.agent import AgentSpec
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.fleet import spec_of
from coral_core.domain.launch import Device, EngineTerms, ModelTerms, NodeLaunch, NodePlace
from coral_core.engine.stage_status import STATUS_FILE
from coral_core.errors import InputError, NoSolutionError, ServingError
from coral_core.serving.control.held import AskPlan
from coral_core.serving.control.messages import NodeState
from coral_core.serving.control.state_file import alone_in, write_state
from tasks.coordinator import launcher
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario
from tasks.node_agent import hello_of, take_share, who_am_i
from tests.fakes.control_processes import ROOT, free_ports
from tests.fakes.control_world import World
from tests.fakes.gateway_case import TOKEN
from tests.fakes.waiting import PATIENT_S, until

TAGS = {
    "coral:instance": "a-1",
    "coral:template": "a",
    "coral:model": "tiny",
    "coral:phase": "aggregated",
    "coral:config": "c",
    "coral:stage": "0",
    "coral:node": "0",
    "coral:nodes": "2",
    "coral:epoch": "7",
    "Name": "f/a-1/0",
}


def agent_spec(**changes) -> AgentSpec:
    return AgentSpec(**{"coordinator": "tcp://h:1", "keys_file": "k", **changes})


# ---- who the node is


class Metadata(BaseHTTPRequestHandler):
    """EC2's metadata service, version 2, as far as an agent asks it."""

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
        self.answer("a-token" if self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        facts = {"instance-id": "i-1", "placement/region": "us-east-1", "local-ipv4": "10.0.0.7"}
        facts |= {f"tags/instance/{name}": value for name, value in TAGS.items()}
        facts["tags/instance/"] = "\n".join(TAGS)
        known = self.headers["X-aws-ec2-metadata-token"] == "a-token"
        self.answer(facts.get(self.path.removeprefix("/latest/meta-data/")) if known else None)

    def answer(self, text: str | None) -> None:
        body = (text or "").encode()
        self.send_response(404 if text is None else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_rented_node_learns_who_it_is_from_its_cloud(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # for the world outside: it would tell who the proxy is
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        spec = agent_spec(metadata={"url": f"http://127.0.0.1:{server.server_address[1]}"})
        who = who_am_i(spec)
        server.shutdown()
        thread.join()
    assert (who.node_id, who.region, who.host) == ("i-1", "us-east-1", "10.0.0.7")
    assert (who.tags.instance_id, who.tags.nodes, who.tags.epoch) == ("a-1", 2, 7)
    said = hello_of(spec, who)
    assert (said.host, said.first_port, said.ports) == ("10.0.0.7", spec.first_port, spec.ports)
    assert said.agent_epoch <= hello_of(spec, who).agent_epoch


def test_a_node_that_nobody_knows_is_told(monkeypatch):
    [port] = free_ports(1)
    monkeypatch.setattr("tasks.node_agent._PAUSE_S", 0.01)
    with pytest.raises(ServingError, match="allow tags in instance metadata"):
        who_am_i(agent_spec(metadata={"url": f"http://127.0.0.1:{port}"}), patience_s=0.02)
    node = {"node_id": "n", "tags": TAGS}
    assert who_am_i(agent_spec(node=node)).tags.template_id == "a"
    for change, complaint in (
        ({"coral:nodes": ""}, "lacks the tag coral:nodes .the agent's file"),
        ({"coral:nodes": "", "coral:model": ""}, "lacks the tags coral:model, coral:nodes"),
        ({"coral:phase": "x"}, "no phase"),
        ({"coral:node": "2"}, "node 2 of 2"),
    ):
        with pytest.raises(InputError, match=complaint):
            who_am_i(agent_spec(node={**node, "tags": TAGS | change}))


def test_cpus_of_its_own():
    before = os.sched_getaffinity(0)
    try:
        take_share(agent_spec(metadata={}, cpus=()))
        assert os.sched_getaffinity(0) == before
        for cpus in ([4000], [min(before), 4000]):
            with pytest.raises(InputError, match="cannot have CPUs 4000"):
                take_share(agent_spec(metadata={}, cpus=cpus))
            assert os.sched_getaffinity(0) == before
        take_share(agent_spec(metadata={}, cpus=[min(before)]))
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


# ---- what it is told to run


@pytest.fixture(scope="module")
def built():
    resolved = resolve_scenario(load_scenario("local"))
    store = open_store(f"memory://{uuid.uuid4().hex}")
    spec = build_spec_from_scenario(resolved)
    for models in (spec.models, spec.models[:1]):  # the newest version lacks a model
        build_library(replace(spec, models=models), store, InlineExecutor(processes=1))
    return resolved, store


def terms(resolved) -> EngineTerms:
    models = {
        (model.shape.name, variant): ModelTerms(path=f"./{model.shape.name}", kv_cache_memory_bytes=2**26)
        for model in resolved.models
        for variant in model.variants
    }
    return EngineTerms(device=Device.CPU, models=models)


def question(template, **changes) -> AskPlan:
    slots = spec_of(template).slots
    places = tuple(
        NodePlace(node=str(i), config=slot.config, host="127.0.0.1", first_port=20000 + 100 * i, ports=50)
        for i, slot in enumerate(slots)
    )
    facts = {"template_id": template.template_id, "model": template.model, "phase": template.phase, "places": places}
    return AskPlan(**{"instance_id": "one", **facts, **changes})


def templates_of(store, version=None):
    rows = open_library(store, resolve_scenario(load_scenario("local")).scenario.library_name, version).read()
    return {row["template_id"]: row_to_template(row) for row in rows.to_pylist()}


def test_a_template_of_the_library_is_what_its_nodes_run(built):
    resolved, store = built
    launch = launcher(store, resolved, terms(resolved))
    single = next(t for t in templates_of(store).values() if len(spec_of(t).slots) == 1)
    plan = launch(question(single))
    assert (plan.instance_id, plan.model, plan.url) == ("one", single.model, "http://127.0.0.1:20000")
    assert [node.serves for node in plan.nodes] == [True]
    assert f"./{single.model}" in plan.nodes[0].argv
    assert launch(question(single)) == plan


def test_a_template_that_only_an_older_version_has_is_found_and_one_that_none_has_is_not(built):
    resolved, store = built
    launch = launcher(store, resolved, terms(resolved))
    older, newest = templates_of(store, 1), templates_of(store)
    gone = [t for name, t in older.items() if name not in newest and len(spec_of(t).slots) == 1]
    assert gone
    assert launch(question(gone[0])).model == gone[0].model
    single = next(t for t in newest.values() if len(spec_of(t).slots) == 1)
    with pytest.raises(InputError, match=r"no template nothing of .* in its newest 5 versions"):
        launch(question(single, template_id="nothing"))
    with pytest.raises(InputError, match="no template"):
        launch(question(single, model="unknown"))
    fewer = replace(resolved, models=resolved.models[:0])
    with pytest.raises(InputError, match="nothing to build"):
        launcher(store, fewer, terms(resolved))
    others = replace(resolved, models=tuple(m for m in resolved.models if m.shape.name != single.model))
    with pytest.raises(InputError, match="does not serve"):
        launcher(store, others, terms(resolved))(question(single))


def test_gpus_without_bf16_are_not_told_to_compute_in_it(built):
    """Capacities take fp16 there; vLLM would not start."""
    resolved, store = built
    old = [
        replace(config, gpu=replace(config.gpu, name="T4", compute_flops_per_s={"fp32": 8e12, "fp16": 65e12}))
        for config in resolved.configs
    ]
    single = next(t for t in templates_of(store).values() if len(spec_of(t).slots) == 1)

    def launched(dtype, configs, device=Device.CUDA):
        given = terms(resolved)
        models = {key: replace(model, dtype=dtype) for key, model in given.models.items()}
        asked = replace(given, device=device, models=models)
        return launcher(store, replace(resolved, configs=tuple(configs)), asked)(question(single)).nodes[0].argv

    with pytest.raises(NoSolutionError, match=r"T4 cannot compute in bfloat16"):
        launched("bfloat16", old)
    assert "float16" in launched("float16", old)
    assert "bfloat16" in launched("bfloat16", resolved.configs)
    assert "bfloat16" in launched("bfloat16", old, Device.CPU)


# ---- the commands


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("CORAL_STORE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("CORAL_ENGINE_PYTHON", sys.executable)
    keys = str(tmp_path / "keys")
    assert run(["keys", "new", "coordinator", keys]) == run(["keys", "new", "agent", "fleet", keys]) == 0
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    models = {
        model.shape.name: {variant: {"path": "./m", "kv_cache_memory_bytes": 2**26} for variant in model.variants}
        for model in resolve_scenario(load_scenario("local")).models
    }
    coordinator = {
        "listen": {"port": 0},
        "keys_file": "keys/coordinator.keys",
        "agents_file": "keys/agents.allowed",
        "gateway": {"url": "http://127.0.0.1:9", "token_file": "token"},
        "scenario": "local",
        "engine_file": "engine.yaml",
        "patience": {"lost_s": 8.0},
    }
    agent = {
        "coordinator": "tcp://127.0.0.1:9",
        "keys_file": "keys/agent-fleet.keys",
        "node": {"node_id": "n", "tags": TAGS},
    }
    for name, document in (
        ("engine", {"device": "cpu", "models": models}),
        ("coordinator", coordinator),
        ("agent", agent),
    ):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(document), encoding="utf-8")
    return tmp_path


def test_files_are_checked_before_anything_is_started(files, capsys):
    capsys.readouterr()
    for name in ("coordinator", "agent"):
        arguments = [name, "run", "--config", str(files / f"{name}.yaml"), "--check"]
        assert run(arguments) == 0, capsys.readouterr().err
        assert f"{name}.yaml is right" in capsys.readouterr().out
        assert run([*arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["folder"].endswith(name)
    (files / "token").unlink()
    assert run(["coordinator", "run", "--config", str(files / "coordinator.yaml"), "--check"]) == 2
    assert "cannot read the gateway's admin token" in capsys.readouterr().err
    (files / "keys" / "agent-fleet.keys").chmod(0o644)
    assert run(["agent", "run", "--config", str(files / "agent.yaml"), "--check"]) == 2
    assert "chmod 600" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"), [({"cpus": [4000]}, "cpus: cannot have CPUs 4000"), ({"memory_bytes": 2**60}, "memory_bytes: ")]
)
def test_what_the_machine_lacks_is_told_when_files_are_checked(files, capsys, asked, said):
    document = json.loads((files / "agent.yaml").read_text(encoding="utf-8"))
    (files / "agent.yaml").write_text(json.dumps(document | asked), encoding="utf-8")
    assert run(["agent", "run", "--config", str(files / "agent.yaml"), "--check"]) == 2
    told = capsys.readouterr().err
    assert f"agent.yaml: {said}" in told
    assert "there are" in told


def test_an_engine_of_its_own_file_is_taken_first(files, capsys):
    document = json.loads((files / "agent.yaml").read_text(encoding="utf-8"))
    (files / "agent.yaml").write_text(json.dumps(document | {"engine_python": "none"}), encoding="utf-8")
    assert run(["agent", "run", "--config", str(files / "agent.yaml"), "--check"]) == 2
    assert str(files / "none") in capsys.readouterr().err


def test_status_shows_what_was_written_down(files, capsys):
    arguments = ["coordinator", "status", "--config", str(files / "coordinator.yaml")]
    assert run(arguments) == 8
    assert "no coordinator has run here" in capsys.readouterr().err
    world = World({"one": 1, "two": 2, "wide": 3}, wide=("wide",))
    world.advance(10)
    world.rows["wide"] = replace(world.rows["wide"], weight=4.0)
    world.fault("two", 1, "its rank is dead")
    world.fault("wide", 1, "its part has died")
    world.advance(2)
    counts = dict.fromkeys(("refused_keys", "withdrawn_keys", "other_versions", "garbage"), 0)
    document = {**world.written, **counts, "gateway_trouble": "", "agents_file_trouble": ""}
    write_state(files / "coordinator", document | {"at": datetime.now(UTC).isoformat()})
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert "node 1: its rank is dead" in shown.out
    assert "4 x 0.67" in shown.out
    assert "degraded, 67% of its throughput is left" in " ".join(shown.out.split())
    assert "does not run" not in shown.err
    late = {"at": (datetime.now(UTC) - timedelta(minutes=5)).isoformat(), "garbage": 3, "gateway_trouble": "it is away"}
    write_state(files / "coordinator", document | late)
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert "turned away: 0 refused keys, 0 withdrawn keys, 0 other versions, 3 garbage" in shown.out
    assert "it is away" in shown.err
    assert "has not written for 300 s: it does not run" in shown.err
    assert run([*arguments, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["running"] is False
    assert [one["stage"] for one in read["instances"]] == ["ready", "failed", "ready"]
    write_state(files / "coordinator", document | {"at": datetime.now(UTC).isoformat(), "instances": []})
    assert run(arguments) == 0
    assert "no agent has registered" in capsys.readouterr().out


def test_what_coordinator_and_agent_say_when_they_have_started_and_ended(files, capsys, monkeypatch):
    async def coordinated(plan, _clock, *, stop, say, started):
        assert (plan.terms.lost_s, plan.terms.unheard_grace_s, stop.is_set()) == (8.0, 20.0, False)
        started("tcp://127.0.0.1:5600")
        say("ready", "one: ready", instance="one")

    async def attended(said, runner, *, endpoint, keys_file, terms, clock, ending, say, started):
        assert (said.tags.instance_id, endpoint, runner.folder) == ("a-1", "tcp://127.0.0.1:9", files / "agent")
        assert terms.heartbeat_s == 1.0
        assert not ending.asked.is_set()
        started()

    monkeypatch.setattr("coral_core.serving.control.coordinator.coordinate", coordinated)
    monkeypatch.setattr("coral_core.serving.control.agent.attend", attended)
    capsys.readouterr()
    for name, lines in (
        ("coordinator", ["agents are met on tcp://127.0.0.1:5600", "one: ready", "stopped: what serves serves on"]),
        ("agent", ["agent of node 0 of a-1 (n)", "stopped: the engine has ended"]),
    ):
        assert run([name, "run", "--config", str(files / f"{name}.yaml")]) == 0
        assert capsys.readouterr().out.splitlines() == lines
        assert run([name, "run", "--config", str(files / f"{name}.yaml"), "--json"]) == 0
        events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
        assert (events[0], events[-1]) == ("started", "stopped")


def test_an_agent_does_not_end_the_engine_of_another_that_has_its_folder(files, capsys):
    capsys.readouterr()
    with alone_in(files / "agent", "agent"):
        assert run(["agent", "run", "--config", str(files / "agent.yaml")]) == ServingError.exit_code
    told = capsys.readouterr()
    assert "another agent runs here" in told.err
    assert str(files / "agent") in told.err
    assert told.out == ""


@pytest.mark.servers
def test_what_a_node_has_left_behind_is_found_by_its_folder(tmp_path):
    """Two fleets on one machine may both have a node of an id; `#` is what marks cannot carry."""
    from tasks.engine_runner import EngineRunner

    program = str(ROOT / "tests" / "fakes" / "engine_program.py")
    runners = []
    for name in ("fleet#1", "fleet#2", "fleet#1"):
        (tmp_path / name).mkdir(exist_ok=True)
        runners.append(EngineRunner(interpreter=sys.executable, folder=tmp_path / name))
    one, other, again = runners
    [port] = free_ports(1)
    one.start(
        NodeLaunch(node="0", argv=(program, str(port)), env={}, ports=(port,), serves=True), f"http://127.0.0.1:{port}"
    )
    try:
        until(lambda: one.report().state is NodeState.READY, "it is ready")
        other.recover()
        assert one.report().state is NodeState.READY
        again.recover()
        until(lambda: one.report().state is NodeState.FAILED, "its end is noticed")
    finally:
        one.stop(1.0)


@pytest.mark.servers
def test_an_engine_as_an_agent_sees_it(tmp_path):
    from tasks.engine_runner import LOG_FILE, EngineRunner

    [port] = free_ports(1)
    program = str(ROOT / "tests" / "fakes" / "engine_program.py")

    def launch(*words: str) -> NodeLaunch:
        return NodeLaunch(node="0", argv=(program, str(port), *words), env={}, ports=(port,), serves=True)

    runner = EngineRunner(interpreter=sys.executable, folder=tmp_path)
    assert runner.report().state is NodeState.IDLE
    runner.recover()
    runner.stop(1.0)
    runner = replace_runner(runner)
    (tmp_path / STATUS_FILE).write_text('{"state": "failed", "weight_frac": 0, "nodes": {}}', encoding="utf-8")
    runner.start(launch("writes", str(tmp_path / "status.text")), f"http://127.0.0.1:{port}")
    until(lambda: runner.report().state is NodeState.READY, "it is ready")
    until(lambda: runner.report().sample is not None, "it is scraped")
    assert runner.report().sample.running_requests == 0
    assert runner.report().alive
    assert (tmp_path / LOG_FILE).exists()
    assert (runner.report().weight_frac, runner.report().lost_nodes) == (None, {})  # nothing left of an earlier engine
    said = {"state": "degraded", "weight_frac": 0.5, "nodes": {"0": {"lost": None}, "1": {"lost": "gone"}}}
    (tmp_path / "status.text").write_text(json.dumps(said), encoding="utf-8")
    urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=PATIENT_S).close()
    assert (runner.report().weight_frac, runner.report().lost_nodes) == (0.5, {"1": "gone"})
    runner.stop(2.0)
    assert (runner.report().state, runner.report().alive) == (NodeState.ENDED, False)
    failing = replace_runner(runner)
    failing.start(launch("exits", "3"), f"http://127.0.0.1:{port}")
    until(lambda: failing.report().state is NodeState.FAILED, "it has failed")
    assert failing.report().reason
    failing.stop(1.0)
    assert not failing.report().alive
    time.sleep(0.1)


def replace_runner(runner):
    from tasks.engine_runner import EngineRunner

    return EngineRunner(interpreter=runner.interpreter, folder=runner.folder)
