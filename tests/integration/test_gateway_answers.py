"""The gateway in front of fake engines: whose answer comes, and what becomes of it when engines or clients fail."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from coral_core.domain.workload import Phase
from tests.fakes.fake_engine import Way
from tests.fakes.gateway_case import CHAT, TEXT, chat, events_in, gateway_case, spoken, text
from tests.fakes.waiting import PATIENT_S, coming

AGGREGATED, PREFILL, DECODE = Phase.AGGREGATED, Phase.PREFILL, Phase.DECODE
TWO = {"a": AGGREGATED, "b": AGGREGATED}
WHOLE_TEXT = "t0 t1 t2 t3 "


def test_answers_come_whole_and_as_streams_and_the_usage_only_to_who_asks():
    async def go():
        async with gateway_case() as case:
            engine = case.engines["a"]
            status, headers, found = await case.post(chat(), headers={"X-Request-Id": "mine-1"})
            assert (status, headers["x-request-id"]) == (200, "mine-1")
            assert found["choices"][0]["message"]["content"] == WHOLE_TEXT
            assert engine.headers[-1]["x-request-id"] == "mine-1"
            assert "stream_options" not in engine.asked[-1]
            assert (await case.post(text(), TEXT))[2]["choices"][0]["text"] == WHOLE_TEXT
            for document, path in ((chat(), CHAT), (text(), TEXT)):
                events = await case.events(document, path)
                assert (spoken(events), events[-1]) == (WHOLE_TEXT, "[DONE]")
                assert not any("usage" in event for event in events)
                assert engine.asked[-1]["stream_options"] == {"include_usage": True}
            events = await case.events(chat(stream_options={"include_usage": True}))
            assert events[-2]["usage"]["completion_tokens"] == 4
            assert (await case.post(chat(), headers={"X-Request-Id": "no good!"}))[1]["x-request-id"] != "no good!"
            assert engine.peers == 1  # one connection, used again and again
            assert (
                'tokens_total{direction="output",instance="a",model="tiny"} 24.0'
                in case.gateway.metrics.text().decode()
            )

    asyncio.run(go())


def test_requests_are_spread_by_weight():
    async def go():
        async with gateway_case(TWO, weights={"a": 3.0, "b": 1.0}) as case:
            for _ in range(8):
                assert (await case.post(chat()))[0] == 200
            assert [len(case.engines[name].asked) for name in "ab"] == [6, 2]

    asyncio.run(go())


@pytest.mark.servers
def test_before_the_first_byte_another_instance_answers_once():
    async def go():
        async with gateway_case(TWO, first_byte_s=1.0, eject_after=1000) as case:
            a, b = case.engines["a"], case.engines["b"]
            faults = [way for way in Way if way is not Way.WELL]
            for way in faults:
                for engine in (a, b):
                    engine.script.clear()
                    engine.asked.clear()
                failing = a if case.gateway.table.first("tiny").spec.name == "b" else b  # whose turn comes next
                failing.tell(way)
                events = await case.events(chat())
                assert (spoken(events), events[-1], len(a.asked), len(b.asked)) == (WHOLE_TEXT, "[DONE]", 1, 1), way
            for way in (Way.STATUS, Way.RESET, Way.CUT, Way.ENDS, Way.ABORTS, Way.GARBAGE):
                for engine in (a, b):
                    engine.script.clear()
                    engine.tell(way)
                status, _, found = await case.post(chat())
                assert (status, found["error"]["code"]) == (502, "engine_failed"), way
                for engine in (a, b):
                    engine.script.clear()
                a.tell(way)
                b.tell(Way.WELL)
                assert (await case.post(chat()))[0] == 200, way
            a.script.clear()
            b.script.clear()
            a.tell(Way.SILENT)
            b.tell(Way.SILENT)
            status, _, found = await case.post(chat(stream=True))
            assert (status, found["error"]["code"]) == (504, "engine_timeout")
            a.tell(Way.STATUS, status=429)
            b.tell(Way.STATUS, status=503)
            status, headers, found = await case.post(chat())
            assert (status, headers["retry-after"], found["error"]["code"]) == (503, "1", "engine_busy")
            assert all(one.in_flight == 0 for one in case.gateway.table.members)

    asyncio.run(go())


@pytest.mark.parametrize(("second", "left"), [(500, 2), (501, 1)])
def test_what_two_engines_answer_alike_is_not_held_against_both(second, left):
    async def go():
        weights = {"a": 10.0, "b": 10.0, "rare": 1e-6}
        async with gateway_case({**TWO, "rare": AGGREGATED}, weights=weights, eject_after=1) as case:
            case.engines["a"].tell(Way.STATUS, status=500)
            case.engines["b"].tell(Way.STATUS, status=second)
            assert (await case.post(chat()))[0] == 502
            assert sum(one.ready for one in case.gateway.table.members) == left

    asyncio.run(go())


@pytest.mark.servers
def test_after_the_first_byte_nothing_is_tried_again_and_the_stream_ends_with_an_error():
    async def go():
        async with gateway_case(TWO, stall_s=1.0, eject_after=1000) as case:
            a, b = case.engines["a"], case.engines["b"]
            for way in (Way.CUT, Way.ENDS, Way.ABORTS, Way.ERROR_EVENT, Way.GARBAGE, Way.STALLS):
                before = len(a.asked) + len(b.asked)
                for engine in (a, b):
                    engine.script.clear()
                    engine.tell(way, after=2, pause_s=0.01)
                events = await case.events(chat())
                assert spoken(events) == "t0 t1 ", way
                error = events[-1]["error"]
                assert (error["type"], error["code"]) == ("server_error", "engine_failed"), way
                assert len(a.asked) + len(b.asked) == before + 1, way
            assert 'requests_total{model="tiny",status="cut"} 6.0' in case.gateway.metrics.text().decode()

    asyncio.run(go())


def test_an_engine_that_does_not_say_done_has_answered_all_the_same():
    async def go():
        async with gateway_case() as case:
            case.engines["a"].tell(Way.ENDS, after=99)  # finish_reason comes, and [DONE]
            assert spoken(await case.events(chat())) == WHOLE_TEXT

    asyncio.run(go())


def test_what_the_engine_finds_wrong_is_told_as_it_says_it():
    async def go():
        async with gateway_case(TWO) as case:
            a, b = case.engines["a"], case.engines["b"]
            own = {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}
            for engine in (a, b):
                engine.tell(Way.STATUS, status=400, body=json.dumps(own).encode())
            assert (await case.post(chat()))[::2] == (400, own)
            assert len(a.asked) + len(b.asked) == 1
            for engine in (a, b):
                engine.script.clear()
                engine.tell(Way.STATUS, status=422, body=b"<html>")
            status, _, found = await case.post(chat(stream=True))
            assert (status, found["error"]["type"]) == (422, "invalid_request_error")

    asyncio.run(go())


def test_disaggregated_requests_go_from_prefill_to_decode_in_one_region():
    async def go():
        phases = {"p1": PREFILL, "d1": DECODE, "p2": PREFILL, "d2": DECODE, "p3": PREFILL}
        regions = {"p1": "east", "d1": "east", "p2": "west", "d2": "west", "p3": "north"}
        async with gateway_case(phases, regions=regions) as case:
            engines = case.engines
            for _ in range(6):
                assert spoken(await case.events(chat())) == WHOLE_TEXT
            assert [len(engines[name].asked) for name in phases] == [3, 3, 3, 3, 0]  # nobody decodes in the north
            first = engines["p1"].asked[0]
            assert (first["max_tokens"], first["stream"]) == (1, False)
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            assert engines["d1"].asked[0]["kv_transfer_params"]["remote_engine_id"] == "p1"
            assert engines["d2"].asked[0]["kv_transfer_params"]["remote_engine_id"] == "p2"
            assert engines["d2"].headers[0]["x-request-id"] == engines["p2"].headers[0]["x-request-id"]
            assert (await case.post(chat(max_completion_tokens=3)))[0] == 200
            assert max(len(e.asked) for e in engines.values()) == 4
            # Two answers need the cache twice, and it is there once: the decode instance computes the prompt itself.
            assert (await case.post(chat(n=2)))[0] == 200
            assert (await case.post(text(prompt=["one", "two"]), TEXT))[0] == 200
            assert sum(len(engines[name].asked) for name in ("p1", "p2")) == 7

    asyncio.run(go())


def test_where_a_transfer_fails_the_prompt_is_computed_anew():
    async def go():
        async with gateway_case({"p": PREFILL, "d": DECODE}, eject_after=1000) as case:
            p, d = case.engines["p"], case.engines["d"]
            d.tell(Way.STATUS)  # what an engine answers that could not fetch the cache
            assert spoken(await case.events(chat())) == WHOLE_TEXT
            assert ["kv_transfer_params" in asked for asked in d.asked] == [True, False]
            p.tell(Way.RESET)  # no prefill at all
            assert spoken(await case.events(chat())) == WHOLE_TEXT
            assert "kv_transfer_params" not in d.asked[-1]
            d.tell(Way.RESET)  # the only decode instance is not there: nobody else
            assert (await case.post(chat()))[0] == 502
            p.produces = False  # engines that share caches by other means
            assert (await case.post(chat()))[0] == 200
            assert "kv_transfer_params" not in d.asked[-1]
            assert case.gateway.table.pools["tiny"].handing == 0

    asyncio.run(go())


def test_a_failed_transfer_goes_to_an_aggregated_instance_where_there_is_one():
    async def go():
        phases = {"p": PREFILL, "d": DECODE, "a": AGGREGATED}
        async with gateway_case(phases, weights={"p": 1000.0, "d": 1000.0, "a": 0.001}) as case:
            case.engines["d"].tell(Way.STATUS)
            assert spoken(await case.events(chat())) == WHOLE_TEXT
            assert [len(case.engines[name].asked) for name in phases] == [1, 1, 1]

    asyncio.run(go())


def test_a_client_that_leaves_aborts_its_request_at_the_engine():
    async def go():
        async with gateway_case() as case:
            engine = case.engines["a"]
            for documents in (chat(stream=True), chat()):
                engine.tell(delay_s=60.0)
                waiting = asyncio.create_task(case.post(documents))
                await coming(lambda: engine.running == 1)
                waiting.cancel()
                await coming(lambda: engine.running == 0)
            engine.tell(Way.STALLS, after=2)
            async with case.session.post(case.url + CHAT, json=chat(stream=True)) as response:
                assert await response.content.readany()
            await coming(lambda: engine.aborted == 3)
            await coming(lambda: case.gateway.running == 0)
            assert case.gateway.table.members[0].in_flight == 0
            assert case.gateway.table.pools["tiny"].unheard == 0
            assert case.gateway.table.members[0].failures == 0
            await coming(lambda: 'status="499"} 3.0' in case.gateway.metrics.text().decode())

    asyncio.run(go())


def test_a_client_that_closes_its_sending_side_has_left():
    """From here both look the same, and an engine that works for nobody costs more than an answer to one who half closes."""

    async def go():
        async with gateway_case() as case:
            engine = case.engines["a"]
            engine.tell(delay_s=60.0)
            _, writer = await asyncio.open_connection(*case.url.removeprefix("http://").split(":"))
            body = json.dumps(chat()).encode()
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await coming(lambda: engine.running == 1)
            writer.write_eof()
            await coming(lambda: engine.running == 0)
            assert engine.aborted == 1
            writer.close()

    asyncio.run(go())


def test_a_client_that_leaves_once_it_has_all_was_served(monkeypatch):
    monkeypatch.setattr(
        "coral_core.serving.dispatch._LAST_BYTES_S", 1.0
    )  # so that it surely leaves before that is over

    async def go():
        async with gateway_case() as case:
            case.engines["a"].tell(linger_s=60.0)
            async with case.session.post(case.url + CHAT, json=chat(stream=True)) as response:
                heard = b""
                while not heard.endswith(b"data: [DONE]\n\n"):
                    heard += await response.content.readany()
                response.close()
            await coming(lambda: case.gateway.running == 0)
            found = case.gateway.metrics.text().decode()
            assert 'requests_total{model="tiny",status="200"} 1.0' in found
            assert 'status="499"' not in found

    asyncio.run(go())


@pytest.mark.servers
def test_a_client_that_does_not_read_is_given_up():
    async def go():
        async with gateway_case(stall_s=1.0) as case:
            engine = case.engines["a"]
            engine.tell(tokens=400_000)
            reader, writer = await asyncio.open_connection(*case.url.removeprefix("http://").split(":"), limit=1024)
            body = json.dumps(chat(stream=True)).encode()
            writer.write(
                b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            await coming(lambda: engine.running == 0)
            assert engine.aborted == 1
            await coming(lambda: 'status="499"} 1.0' in case.gateway.metrics.text().decode())
            writer.transport.abort()

    asyncio.run(go())


def test_an_engine_that_is_gone_gets_nothing_until_it_answers_again():
    async def go():
        async with gateway_case(TWO, probe_s=0.05) as case:
            table = case.gateway.table
            a = table.find("a")
            a.answers = True
            case.engines["a"].healthy = False
            await coming(lambda: not a.ready)
            for _ in range(4):
                assert (await case.post(chat()))[0] == 200
            assert not case.engines["a"].asked
            case.engines["a"].healthy = True
            await coming(lambda: a.ready)

    asyncio.run(go())


def test_a_stream_from_an_engine_that_is_gone_is_not_waited_for_as_long():
    async def go():
        async with gateway_case(probe_s=0.05, stall_s=30.0, gone_stall_s=1.0) as case:
            engine = case.engines["a"]
            engine.tell(Way.STALLS, after=2)
            engine.tell(pause_s=0.1, tokens=8)  # this one finishes what it has begun
            running = [asyncio.create_task(case.events(chat())) for _ in range(2)]
            await coming(lambda: engine.running == 2)
            await asyncio.sleep(0.1)
            engine.healthy = False
            stalled, finished = sorted(await asyncio.wait_for(asyncio.gather(*running), PATIENT_S), key=len)
            assert (spoken(stalled), stalled[-1]["error"]["code"]) == ("t0 t1 ", "engine_failed")
            assert spoken(finished) == "".join(f"t{n} " for n in range(8))
            assert not case.gateway.table.members[0].on_gone

    asyncio.run(go())


def test_an_engine_that_is_gone_at_the_moment_in_which_its_stream_is_over_its_time_is_no_bug():
    async def go():
        async with gateway_case(stall_s=30.0) as case:
            case.gateway.patience.end()
            case.engines["a"].tell(Way.STALLS, after=1)
            asked = asyncio.create_task(case.events(chat()))
            (member,) = case.gateway.table.members
            await coming(lambda: member.on_gone)
            limit = min(case.gateway.patience._limits, key=lambda one: one.when())
            seen = []

            def gone():
                seen.append(limit.expired())
                case.gateway.table.report("a", ready=False, failed="gone")
                seen.append("told")

            loop = asyncio.get_running_loop()
            limit.reschedule(loop.time())
            loop.call_at(loop.time() + 0.001, gone)
            time.sleep(0.002)  # noqa: ASYNC251 - both are due at once then, in this order
            assert (await asked)[-1]["error"]["code"] == "engine_failed"
            assert seen == [True, "told"]

    asyncio.run(go())


def test_an_address_where_nobody_listens_is_closed_at_once():
    async def go():
        async with gateway_case(TWO) as case:
            await case.admin(
                "PUT", "/instances/c", {"model": "tiny", "phase": "aggregated", "url": "http://127.0.0.1:9"}
            )
            await case.admin("PUT", "/instances/c/weight", {"weight": 1000.0})
            member = case.gateway.table.find("c")
            case.gateway.table.probed(member, answers=True, now_s=0.0)
            assert (await case.post(chat()))[0] == 200
            assert not member.ready

    asyncio.run(go())


def test_an_engine_that_dies_after_the_first_byte_again_and_again_is_set_aside():
    async def go():
        async with gateway_case(TWO, eject_after=2) as case:
            a, b = case.engines["a"], case.engines["b"]
            a.tell(Way.CUT, after=1, pause_s=0.01, times=9)
            for _ in range(8):
                await case.events(chat())
            assert (len(a.asked), len(b.asked)) == (2, 6)

    asyncio.run(go())


def test_a_request_has_its_time_and_no_more():
    async def go():
        async with gateway_case(request_s=1.0) as case:
            engine = case.engines["a"]
            engine.tell(delay_s=60.0, times=2)
            status, _, found = await case.post(chat())
            assert (status, found["error"]["code"]) in {(504, "timeout"), (504, "engine_timeout")}
            engine.script.clear()
            engine.tell(tokens=1000, pause_s=0.02)
            async with case.session.post(case.url + CHAT, json=chat(stream=True)) as response:
                events = events_in(await response.read())
            assert events[-1]["error"]["code"] == "timeout"
            await coming(lambda: engine.running == 0)

    asyncio.run(go())


def test_what_the_gateway_itself_slept_through_is_no_engines_fault():
    async def go():
        async with gateway_case(stall_s=1.0, first_byte_s=1.0) as case:
            engine, member = case.engines["a"], case.gateway.table.members[0]
            for turn in (
                {"pause_s": 0.1, "tokens": 8},
                {"delay_s": 0.3, "tokens": 8},
            ):  # in a stream, and before its first byte
                engine.tell(**turn)
                running = asyncio.create_task(case.events(chat()))
                await coming(lambda: engine.running == 1)
                await asyncio.sleep(0.2)
                time.sleep(2.0)  # noqa: ASYNC251 - gateway, engine and client stand still together
                assert spoken(await running) == "".join(f"t{n} " for n in range(8))
            assert member.failures == 0
            engine.tell(Way.STALLS, after=2)
            assert (await case.events(chat()))[-1]["error"]["code"] == "engine_failed"
            assert member.failures == 1

    asyncio.run(go())
