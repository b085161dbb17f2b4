"""Instances that come, change their weight, drain and go while requests run; the gateway's own end; demand in the store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import aiohttp
import pytest

from artifacts.demand import append_demand, read_demand
from artifacts.store import open_store
from coral_core.cloud.engine_port import Readiness
from coral_core.cloud.fleet_view import Instance
from coral_core.domain.fleet import Node, NodeState, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, ServingError, StoreError
from coral_core.serving.admin import Admin
from coral_core.serving.control.gateway_side import GatewaySide
from coral_core.serving.run import probe_all
from tasks.gateway_engine import GatewayEngine
from tests.fakes.fake_engine import Way, fake_engine
from tests.fakes.gateway_case import CHAT, MODEL, TOKEN, chat, events_in, gateway_case, spoken
from tests.fakes.waiting import PATIENT_S, coming

TWO = {"a": Phase.AGGREGATED, "b": Phase.AGGREGATED}


def instance(name: str) -> Instance:
    tags = NodeTags(
        instance_id=name,
        template_id="t",
        model=MODEL,
        phase=Phase.AGGREGATED,
        config="c",
        stage=0,
        node=0,
        nodes=1,
        epoch=1,
    )
    node = Node(
        node_id=f"{name}/0",
        region="east",
        zone="east-a",
        market=Market.ON_DEMAND,
        state=NodeState.RUNNING,
        launched_at=datetime(2026, 11, 29, tzinfo=UTC),
        tags=tags,
    )
    return Instance(instance_id=name, nodes=(node,))


def test_an_instance_drains_while_a_stream_ends_in_peace(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not shown the admin token

    async def go():
        async with gateway_case(TWO) as case:
            engine = GatewayEngine(url=case.admin_url, token=TOKEN)
            a, b = case.engines["a"], case.engines["b"]
            for one in (a, b):
                one.tell(pause_s=0.1, tokens=5)
            running = asyncio.create_task(case.events(chat()))
            await coming(lambda: a.running + b.running == 1)
            old, new = ("a", "b") if a.running else ("b", "a")
            case.engines[new].script.clear()
            await asyncio.to_thread(engine.set_weight, instance(old), 0.0)
            for _ in range(2):  # whatever is said twice is said once
                assert await asyncio.to_thread(engine.drain, instance(old)) is False
            for _ in range(4):
                assert (await case.post(chat()))[0] == 200
            assert len(case.engines[old].asked) == 1
            assert spoken(await running) == "t0 t1 t2 t3 t4 "
            assert await asyncio.to_thread(engine.drain, instance(old)) is True
            assert await asyncio.to_thread(engine.ready, instance(old)) is Readiness.READY
            await asyncio.to_thread(engine.set_weight, instance(old), 5.0)  # kept after all
            await asyncio.to_thread(engine.set_weight, instance(new), 5.0)
            for _ in range(2):
                assert (await case.post(chat()))[0] == 200
            assert len(case.engines[old].asked) == 2

    asyncio.run(go())


def test_nobody_waits_for_the_probe_of_one_that_is_given_up():
    """Its node is gone: nothing there says no, for as long as its instance is remembered."""

    async def go():
        async with gateway_case(TWO, probe_timeout_s=PATIENT_S) as case:
            silent = await asyncio.start_server(lambda *_: asyncio.sleep(PATIENT_S), "127.0.0.1", 0)
            port = silent.sockets[0].getsockname()[1]
            at = {"model": MODEL, "phase": "aggregated", "url": f"http://127.0.0.1:{port}", "weight": 1.0}
            assert (await case.admin("PUT", "/instances/lost", at))[0] == 200
            said = {"ready": False, "failed": "its agent has not been heard of for 10 s"}
            assert (await case.admin("PUT", "/instances/lost/readiness", said))[0] == 200
            case.engines["a"].healthy = False
            await asyncio.wait_for(probe_all(case.gateway), PATIENT_S / 2)
            assert [one.answers for one in case.gateway.table.members] == [False, True, False]
            silent.close()

    asyncio.run(go())


def test_one_that_is_given_up_gets_nothing_and_its_streams_do_not_hang():
    async def go():
        async with gateway_case(TWO, gone_stall_s=0.2) as case:
            engine = GatewayEngine(url=case.admin_url, token=TOKEN)
            for one in case.engines.values():
                one.tell(Way.STALLS, after=2)
            running = asyncio.create_task(case.events(chat()))
            await coming(lambda: any(one.running for one in case.engines.values()))
            failed = next(name for name, one in case.engines.items() if one.running)
            await coming(lambda: case.gateway.table.pools["tiny"].unheard == 0, "its first tokens")
            said = {"ready": False, "failed": "node 1: its rank is dead"}
            assert (await case.admin("PUT", f"/instances/{failed}/readiness", said))[0] == 200
            assert "error" in (await asyncio.wait_for(running, PATIENT_S))[-1]
            assert await asyncio.to_thread(engine.ready, instance(failed)) is Readiness.FAILED
            rows = (await case.admin("GET", "/instances"))[1]["instances"]
            row = next(row for row in rows if row["name"] == failed)
            assert (row["failed"], row["answers"], row["ready"]) == ("node 1: its rank is dead", True, False)
            wrong = {"ready": True, "failed": "both"}
            assert (await case.admin("PUT", f"/instances/{failed}/readiness", wrong))[0] == 400
            left = {"ready": True, "weight_frac": 0.5}
            assert (await case.admin("PUT", f"/instances/{failed}/readiness", left))[0] == 200
            rows = (await case.admin("GET", "/instances"))[1]["instances"]
            assert [row["weight_frac"] for row in rows if row["name"] == failed] == [0.5]
            assert await asyncio.to_thread(engine.ready, instance(failed)) is Readiness.DEGRADED
            wrong = {"ready": True, "weight_frac": 0}
            assert (await case.admin("PUT", f"/instances/{failed}/readiness", wrong))[0] == 400
            await case.admin("PUT", f"/instances/{failed}/readiness", {"ready": True})
            assert await asyncio.to_thread(engine.ready, instance(failed)) is Readiness.READY

    asyncio.run(go())


@pytest.mark.servers
def test_instances_come_and_go_without_a_lost_request():
    async def go():
        async with gateway_case(), fake_engine("late", MODEL) as late:
            pass
        async with gateway_case(probe_s=0.05) as case, fake_engine("late", MODEL) as late:
            engine = GatewayEngine(url=case.admin_url, token=TOKEN)
            assert await asyncio.to_thread(engine.ready, instance("late")) is Readiness.UNKNOWN
            async with aiohttp.ClientSession() as session:
                await GatewaySide(session, url=case.admin_url, token=TOKEN).rows()
            assert await asyncio.to_thread(engine.ready, instance("late")) is Readiness.NOT_READY
            case.gateway.coordinated_s -= 60.0  # it would have named the instance, but is gone
            assert await asyncio.to_thread(engine.ready, instance("late")) is Readiness.UNKNOWN
            with pytest.raises(ServingError, match="register it first"):
                await asyncio.to_thread(engine.set_weight, instance("late"), 1.0)
            await asyncio.to_thread(engine.set_weight, instance("late"), 0.0)
            assert await asyncio.to_thread(engine.drain, instance("late")) is True
            said = {"model": MODEL, "phase": "aggregated", "url": late.url}
            for _ in range(2):
                status, row = await case.admin("PUT", "/instances/late", said)
                assert (status, row["weight"], row["region"]) == (200, 0.0, "local")
            await case.admin("PUT", "/instances/late/readiness", {"ready": False})
            assert await asyncio.to_thread(engine.ready, instance("late")) is Readiness.STARTING
            await case.admin("PUT", "/instances/late/readiness", {"ready": True})
            await coming(lambda: case.gateway.table.find("late").ready)
            assert await asyncio.to_thread(engine.ready, instance("late")) is Readiness.READY
            await asyncio.to_thread(engine.set_weight, instance("late"), 10.0)

            async def clients() -> list[str]:
                return [spoken(await case.events(chat())) for _ in range(10)]

            running = [asyncio.create_task(clients()) for _ in range(4)]
            await coming(lambda: len(late.asked) > 2)
            await asyncio.to_thread(engine.set_weight, instance("a"), 0.0)
            assert await asyncio.to_thread(engine.drain, instance("a")) in {True, False}
            await coming(lambda: case.gateway.table.drain("a"))
            assert (await case.admin("DELETE", "/instances/a"))[0] == 200
            assert (await case.admin("DELETE", "/instances/a"))[0] == 200
            assert {text for texts in await asyncio.gather(*running) for text in texts} == {"t0 t1 t2 t3 "}
            assert 'instance="a"' not in case.gateway.metrics.text().decode()

    asyncio.run(go())


def test_what_the_admin_side_refuses():
    async def go():
        async with gateway_case() as case:
            good = {"model": MODEL, "phase": "aggregated", "url": "http://127.0.0.1:1"}
            wrong = [
                ("GET", "/nothing", None, 404),
                ("GET", "/instances/a/weight/more", None, 404),
                ("PATCH", "/instances/a", None, 404),
                ("PUT", "/instances/n", {**good, "phase": "both"}, 400),
                ("PUT", "/instances/n", {**good, "model": "tinny"}, 400),
                ("PUT", "/instances/n", {**good, "url": "ftp://x"}, 400),
                ("PUT", "/instances/n", {**good, "url": "http://x:1/path"}, 400),
                ("PUT", "/instances/n", {**good, "colour": "red"}, 400),
                ("PUT", "/instances/" + "n" * 200, good, 400),
                ("PUT", "/instances/a/weight", {"weight": -1}, 400),
                ("PUT", "/instances/a/weight", {"weight": "much"}, 400),
                ("PUT", "/instances/n/weight", {"weight": 1}, 404),
                ("PUT", "/instances/n/readiness", {"ready": True}, 404),
            ]
            for method, path, document, status in wrong:
                found = await case.admin(method, path, document)
                assert found[0] == status, (path, document, found)
                assert found[1]["error"]["message"]
            assert (await case.admin("GET", "/instances", token="x" * 40))[0] == 401
            assert (await case.admin("PUT", "/instances/a/readiness", {"ready": False}))[0] == 200
            assert (await case.post(chat()))[0] == 503
            async with case.session.get(case.admin_url + "/health") as response:
                assert response.status == 200
            async with case.session.get(
                case.admin_url + "/metrics", headers={"Authorization": f"bearer {TOKEN}"}
            ) as response:
                assert "coral_gateway_instance_ready" in await response.text()
            with pytest.raises(ServingError, match="the admin token is missing or not right"):
                await asyncio.to_thread(GatewayEngine(url=case.admin_url, token="no").drain, instance("a"))
            with pytest.raises(InputError, match="32 characters"):
                Admin(gateway=case.gateway, token="short")

    asyncio.run(go())


def test_a_gateway_that_cannot_be_asked_condemns_nobody():
    engine = GatewayEngine(url="http://127.0.0.1:9", token=TOKEN, timeout_s=1.0)
    assert engine.ready(instance("a")) is Readiness.UNKNOWN
    with pytest.raises(ServingError, match="does not answer"):
        engine.drain(instance("a"))


def test_the_gateway_ends_when_what_runs_is_done():
    async def go():
        async with gateway_case() as case:
            case.engines["a"].tell(pause_s=0.1, tokens=6)
            running = asyncio.create_task(case.events(chat()))
            await coming(lambda: case.engines["a"].running == 1)
            status, found = await case.admin("POST", "/drain")
            assert (status, found) == (200, {"drained": False, "in_flight": 1})
            assert (await case.post(chat()))[0] == 503
            case.stop.set()
            assert spoken(await running) == "t0 t1 t2 t3 t4 t5 "
            await asyncio.wait_for(case.served, PATIENT_S)

    asyncio.run(go())


@pytest.mark.servers
def test_what_outlasts_the_drain_is_broken_off_with_an_error():
    async def go():
        async with gateway_case(drain_s=1.0) as case:
            case.engines["a"].tell(Way.STALLS, after=1)
            async with case.session.post(case.url + CHAT, json=chat(stream=True)) as response:
                first = await response.content.readany()
                case.stop.set()
                rest = await response.read()
            assert events_in(first + rest)[-1]["error"]["code"] == "gateway_unavailable"
            await asyncio.wait_for(case.served, PATIENT_S)

    asyncio.run(go())


def test_demand_is_told_to_the_store_in_the_form_that_plans_read(tmp_path):
    store = open_store(tmp_path.as_uri())
    failures = [StoreError("not now"), StoreError("nor now")]

    def sink(samples):
        if failures:
            raise failures.pop()
        return append_demand(store, "demo", samples, source="gateway-test")

    async def go():
        async with gateway_case(sink=sink, demand_every_s=0.2) as case:
            for _ in range(6):
                assert (await case.post(chat()))[0] == 200
            await coming(lambda: not failures)
            assert (await case.post(chat()))[0] == 200

    begun_s = datetime.now(UTC).timestamp()
    asyncio.run(go())
    found = read_demand(store, "demo", [(begun_s - 1, datetime.now(UTC).timestamp() + 1)])
    assert not found.faults
    assert sum(s.requests_per_s * s.duration_s for s in set(found.samples)) == pytest.approx(7)
    assert {s.mean_input_tokens for s in found.samples} <= {7.0, None}
