"""Agents and a coordinator over real sockets in one process: keys, versions, garbage, silence, and an orderly end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coral_core.clock import SystemClock
from coral_core.domain.launch import LaunchPlan, NodeLaunch, Runtime
from coral_core.errors import InputError, ServingError, StoreUnreachableError
from coral_core.serving.control.agent import AgentTerms, Ending, attend
from coral_core.serving.control.coordinator import CoordinatorPlan, coordinate
from coral_core.serving.control.curve import AllowedKeys, KeyPair, read_private, write_allowed, write_private
from coral_core.serving.control.held import AskPlan, ControlTerms
from coral_core.serving.control.instances import Instances
from coral_core.serving.control.messages import (
    PROTOCOL,
    Heartbeat,
    Hello,
    NodeReport,
    NodeState,
    Refused,
    WhoAreYou,
    framed,
    from_coordinator,
)
from coral_core.serving.control.runner import RunnerReport
from coral_core.serving.control.state_file import read_state, write_state
from coral_core.serving.control.wire import AgentEnd, CoordinatorEnd, new_pair, public_of
from tests.fakes.control_world import hello
from tests.fakes.gateway_case import MODEL, TOKEN, Case, gateway_case
from tests.fakes.waiting import PATIENT_S, coming

TERMS = ControlTerms(lost_s=2.0, unheard_grace_s=0.5, resend_s=0.3)
QUICK = AgentTerms(heartbeat_s=0.2, drain_s=3.0, stop_grace_s=0.1)


@dataclass
class Runner:
    """Runs nothing; its state is set by the test."""

    state: NodeState = NodeState.IDLE
    reason: str = ""
    alive: bool = False
    launched: list[NodeLaunch] = field(default_factory=list)
    recovered: bool = False
    refuses: bool = False
    becomes: NodeState = NodeState.READY

    def recover(self) -> None:
        self.recovered = True

    def start(self, launch: NodeLaunch, url: str) -> None:
        if self.refuses:
            raise InputError("no such interpreter", where=url)
        self.launched.append(launch)
        self.state, self.alive = self.becomes, True

    def report(self) -> RunnerReport:
        return RunnerReport(state=self.state, reason=self.reason, alive=self.alive, log=("last line",))

    def stop(self, grace_s: float) -> None:
        self.alive = False
        if self.state is not NodeState.FAILED and self.launched:
            self.state = NodeState.ENDED


@dataclass
class Control:
    """A coordinator (and a gateway) with the keys of agents in a folder."""

    folder: Path
    endpoint: str
    gateway: Case
    events: list[tuple[str, dict]]
    stop: asyncio.Event
    task: asyncio.Task

    def row(self, name: str) -> dict[str, Any]:
        """What the coordinator last wrote of an instance."""
        try:
            rows = read_state(self.folder / "coordinator")["instances"]
        except ServingError:
            return {}
        return next((row for row in rows if row["instance"] == name), {})

    def stage(self, name: str) -> str:
        return self.row(name).get("stage", "")

    def told(self) -> list[str]:
        return [event for event, _ in self.events]

    async def restart(self) -> None:
        self.stop.set()
        await self.task
        self.stop, (self.task, _) = asyncio.Event(), (None, None)
        self.task, self.endpoint = await begin(self, int(self.endpoint.rpartition(":")[2]))


@dataclass
class Attended:
    runner: Runner
    ending: Ending
    task: asyncio.Task
    events: list[tuple[str, str]]

    def told(self) -> list[str]:
        return [event for event, _ in self.events]

    async def end(self) -> None:
        self.ending.asked.set()
        self.ending.at_once.set()
        await self.task


def keys_in(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    server, agent = new_pair(), new_pair()
    write_private(folder / "coordinator.keys", KeyPair(public=server[0], secret=server[1]))
    write_private(folder / "agent.keys", KeyPair(public=agent[0], secret=agent[1], server=server[0]))
    write_allowed(folder / "agents.allowed", {agent[0]: "fleet"})
    assert public_of(agent[1]) == agent[0]


async def begin(case: Control, port: int = 0) -> tuple[asyncio.Task, str]:
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine_url = case.gateway.engines["a"].url

    def launch(question: AskPlan) -> LaunchPlan:
        if question.template_id == "bug":
            raise ZeroDivisionError
        if question.template_id == "away" and case.told().count("note") < 2:  # the first is of the start
            raise StoreUnreachableError("the store cannot be reached")
        nodes = tuple(
            NodeLaunch(node=place.node, argv=("serve",), env={}, ports=(), serves=place.node == "0")
            for place in question.places
        )
        return LaunchPlan(
            instance_id=question.instance_id,
            model=question.model,
            phase=question.phase,
            runtime=Runtime.VLLM,
            url=engine_url,
            nodes=nodes,
        )

    plan = CoordinatorPlan(
        host="127.0.0.1",
        port=port,
        pair=read_private(case.folder / "coordinator.keys"),
        allowed=AllowedKeys(case.folder / "agents.allowed"),
        gateway_url=case.gateway.admin_url,
        gateway_token=TOKEN,
        folder=case.folder / "coordinator",
        terms=TERMS,
        launch=launch,
    )

    def say(event: str, text: str, **facts: object) -> None:
        assert text
        case.events.append((event, facts))

    task = asyncio.create_task(coordinate(plan, SystemClock(), stop=case.stop, say=say, started=found.set_result))
    await asyncio.wait([task, found], timeout=PATIENT_S, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    return task, await found


@asynccontextmanager
async def control(folder: Path) -> AsyncIterator[Control]:
    keys_in(folder)
    async with gateway_case(probe_s=0.1, drain_s=1.0) as gateway:
        case = Control(folder, "", gateway, [], asyncio.Event(), None)
        case.task, case.endpoint = await begin(case)
        try:
            yield case
        finally:
            case.stop.set()
            await case.task


def attended(case: Control, said: Hello, *, runner: Runner | None = None, keys: str = "agent.keys") -> Attended:
    found = Attended(runner or Runner(), Ending(asked=asyncio.Event(), at_once=asyncio.Event()), None, [])
    found.task = asyncio.create_task(
        attend(
            said,
            found.runner,
            endpoint=case.endpoint,
            keys_file=case.folder / keys,
            terms=QUICK,
            clock=SystemClock(),
            ending=found.ending,
            say=lambda event, text, **_facts: found.events.append((event, text)),
        )
    )
    return found


def test_a_pipeline_comes_up_is_taken_over_and_fails_whole(tmp_path):
    async def go():
        async with control(tmp_path) as case:
            first, second = (attended(case, hello(node=node, nodes=2)) for node in range(2))
            table = case.gateway.gateway.table
            await coming(lambda: table.find("i") is not None and table.find("i").ready)
            assert first.runner.recovered
            assert [one.runner.launched[0].node for one in (first, second)] == ["0", "1"]
            table.set_weight("i", 4.0)
            await case.restart()
            await coming(lambda: case.stage("i") == "ready" and first.told().count("welcome") == 1)
            await coming(lambda: case.row("i").get("weight") == 4.0)
            table.remove("i")  # as if the gateway had started anew
            await coming(lambda: table.find("i") is not None and table.find("i").ready)
            assert table.find("i").weight == 4.0
            table.drain("i")
            await coming(lambda: case.row("i").get("draining"))
            table.set_weight("i", 4.0)
            second.runner.state, second.runner.reason = NodeState.FAILED, "its rank is dead"
            await coming(lambda: table.find("i").failed == "node 1: its rank is dead")
            await coming(lambda: not first.runner.alive and not second.runner.alive)
            assert "stop" in first.told()
            await coming(lambda: case.stage("i") == "failed")
            for one in (first, second):
                await one.end()
            assert case.told().count("failed") == 1

    asyncio.run(go())


def test_who_is_not_known_or_not_understood(tmp_path):
    async def go():
        async with control(tmp_path) as case:
            pair = read_private(tmp_path / "agent.keys")
            stranger = new_pair()
            write_private(
                tmp_path / "stranger.keys", KeyPair(public=stranger[0], secret=stranger[1], server=pair.server)
            )
            strange = attended(case, hello("strange"), keys="stranger.keys")
            with AgentEnd(case.endpoint, pair) as end:
                await coming(lambda: end.send([b"noise"]))
                end.send([PROTOCOL, b"noise"])
                end.send([b"HTTP/1.1", b"GET /"])
                end.send(framed(Heartbeat(report=NodeReport())))
                assert from_coordinator(await end.receive(PATIENT_S)) == WhoAreYou()
                end.send([b"coral-control/2", framed(hello())[1]])
                refusal = from_coordinator(await end.receive(PATIENT_S))
                assert isinstance(refusal, Refused)
                assert "the peer speaks coral-control/2" in refusal.reason
                assert "same version" in refusal.fix
                end.send(framed(hello(region="x" * 201)))
                assert await end.receive(0.2) is None
            host, port = case.endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            good = attended(case, hello())
            await coming(lambda: case.stage("i") == "ready")
            state = read_state(tmp_path / "coordinator")
            await coming(lambda: read_state(tmp_path / "coordinator")["refused_keys"] > 0)
            assert (state["garbage"], state["other_versions"]) == (4, 1)
            assert "welcome" not in strange.told()
            assert strange.task.done() is False
            write_allowed(tmp_path / "agents.allowed", {})
            await coming(lambda: "refused" in good.told())
            await coming(lambda: case.stage("i") == "failed")
            await coming(lambda: case.gateway.gateway.table.find("i").failed)
            for one in (strange, good):
                await one.end()

    asyncio.run(go())


@pytest.mark.servers
def test_an_agent_serves_on_alone_and_takes_new_keys(tmp_path, monkeypatch):
    monkeypatch.setattr("coral_core.serving.control.agent._LOST_S", 0.6)

    async def go():
        async with control(tmp_path) as case:
            one = attended(case, hello())
            await coming(lambda: case.stage("i") == "ready")
            case.stop.set()
            await case.task
            await coming(lambda: "lost" in one.told())
            assert one.runner.alive
            for name in ("coordinator.keys", "agent.keys"):
                (tmp_path / name).unlink()
            (tmp_path / "agent.keys").write_text("{", encoding="utf-8")
            await coming(lambda: ("keys", "the keys file has changed, and is wrong now") in one.events)
            (tmp_path / "agent.keys").unlink()
            keys_in(tmp_path)
            await coming(lambda: one.told().count("keys") == 2)
            case.stop = asyncio.Event()
            case.task, _ = await begin(case, int(case.endpoint.rpartition(":")[2]))
            await coming(lambda: "found" in one.told())
            await asyncio.sleep(1.0)
            assert one.runner.alive
            assert case.stage("i") == "ready"
            one.ending.asked.set()  # nothing runs: it is drained and told to stop
            await one.task
            assert not one.runner.alive
            await coming(lambda: case.stage("i") == "ended")

    asyncio.run(go())


def test_what_cannot_be_started_or_is_not_served_is_told(tmp_path):
    async def go():
        async with control(tmp_path) as case:
            broken = attended(case, hello("broken"), runner=Runner(refuses=True))
            unknown = hello("other", tags=replace(hello("other").tags, model="unknown"))
            other = attended(case, unknown, runner=Runner(becomes=NodeState.STARTING))
            await coming(lambda: case.stage("broken") == "failed")
            assert (
                "failed",
                "cannot start the engine: " + case.gateway.engines["a"].url + ": no such interpreter",
            ) in (broken.events)
            await coming(lambda: "rejected" in case.told())
            await asyncio.sleep(2.5)  # the gateway is seen to every second
            assert case.told().count("rejected") == 1
            [why] = [facts["reason"] for event, facts in case.events if event == "rejected"]
            assert "unknown model" in why
            for one in (broken, other):
                await one.end()

    asyncio.run(go())


def test_an_instance_waits_for_a_store_that_is_away_for_a_moment(tmp_path):
    async def go():
        async with control(tmp_path) as case:
            one = attended(case, hello("waits", tags=replace(hello("waits").tags, template_id="away")))
            await coming(lambda: case.stage("waits") == "ready")
            [_, why] = [facts["reason"] for event, facts in case.events if event == "note"]
            assert "cannot be reached" in why
            assert "failed" not in case.told()
            await one.end()

    asyncio.run(go())


def test_a_bug_takes_one_message_or_one_instance_and_not_the_coordinator(tmp_path, caplog, monkeypatch):
    async def go():
        async with control(tmp_path) as case:
            heard = Instances.hello

            def stumbles(self, connection, key_name, said, now_s):
                if said.tags.instance_id == "bad":
                    raise ZeroDivisionError
                return heard(self, connection, key_name, said, now_s)

            monkeypatch.setattr(Instances, "hello", stumbles)
            bad = attended(case, hello("bad"))
            odd = attended(case, hello("odd", tags=replace(hello("odd").tags, template_id="bug")))
            good = attended(case, hello("good"))
            await coming(lambda: case.stage("good") == "ready")
            await coming(lambda: case.stage("odd") == "failed")
            await coming(lambda: read_state(tmp_path / "coordinator")["bugs"] > 0)
            assert "bad" not in {row["instance"] for row in read_state(tmp_path / "coordinator")["instances"]}
            for one in (bad, odd, good):
                await one.end()

    asyncio.run(go())
    assert "because of a bug" in caplog.text


@pytest.mark.servers
def test_a_gateway_that_is_away_is_told_once_and_is_not_needed(tmp_path):
    async def go():
        async with control(tmp_path) as case:
            case.stop.set()
            await case.task
            with socket.create_server(("127.0.0.1", 0)) as nobody:
                port = nobody.getsockname()[1]
            away = Control(tmp_path, "", case.gateway, [], asyncio.Event(), None)
            away.gateway = replace(case.gateway, admin_url=f"http://127.0.0.1:{port}")
            away.task, away.endpoint = await begin(away)
            one = attended(away, hello())
            await coming(lambda: away.stage("i") == "ready")
            await coming(lambda: "gateway" in away.told())
            await asyncio.sleep(1.2)
            assert away.told().count("gateway") == 1
            assert "does not answer" in read_state(tmp_path / "coordinator")["gateway_trouble"]
            one.ending.asked.set()
            await asyncio.sleep(0.5)
            assert one.runner.alive  # nobody says that its requests have ended
            await one.task  # until it is out of patience
            away.stop.set()
            await away.task

    asyncio.run(go())


def test_an_address_that_is_taken_and_a_damaged_state_are_told(tmp_path):
    async def go():
        async with control(tmp_path) as case:
            port = int(case.endpoint.rpartition(":")[2])
            keys_in(tmp_path / "other")
            with pytest.raises(ServingError, match="cannot listen"):
                await begin(replace(case, folder=tmp_path / "other"), port)
            with pytest.raises(ServingError, match="another coordinator runs here"):
                await begin(case, port)
            case.stop.set()
            await case.task
            write_state(tmp_path / "coordinator", {"format": 1, "instances": [{"stage": "ready"}]})
            case.stop = asyncio.Event()
            case.task, _ = await begin(case)
            assert any("damaged" in str(facts.get("reason")) for event, facts in case.events if event == "note")

    asyncio.run(go())


def test_a_peer_that_reads_nothing_fills_no_memory(tmp_path):
    async def go():
        keys_in(tmp_path)
        pair = read_private(tmp_path / "agent.keys")
        end = CoordinatorEnd(
            "127.0.0.1", 0, read_private(tmp_path / "coordinator.keys"), AllowedKeys(tmp_path / "agents.allowed")
        )
        with AgentEnd(end.endpoint, pair) as agent:
            await coming(lambda: agent.send(framed(Heartbeat(report=NodeReport()))))
            received = await end.receive(PATIENT_S)
            big = framed(Refused(reason="x" * 2000))
            for _ in range(12_000):
                end.send(received.connection, big)
            assert end.dropped > 1_000
        assert await end.receive(0.0) is None
        end.close()

    asyncio.run(go())


def test_models_of_the_fakes_agree():
    assert hello().tags.model == MODEL
    assert msgspec.msgpack.decode(framed(hello())[1])["type"] == "hello"
