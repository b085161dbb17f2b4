"""What the gateway refuses, with which status, and what it makes of bytes that are no request."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from coral_core.domain.workload import Phase
from coral_core.serving.limits import KeyTerms
from coral_core.serving.sparing_log import MOST
from tests.fakes.fake_engine import Way
from tests.fakes.gateway_case import CHAT, KEY, TEXT, Case, chat, gateway_case, spoken, terms_of, text
from tests.fakes.waiting import PATIENT_S, coming

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


async def raw(case: Case, data: bytes) -> bytes:
    """All that comes back for these bytes until the gateway ends the connection."""
    reader, writer = await asyncio.open_connection(*case.url.removeprefix("http://").split(":"))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), PATIENT_S)
    finally:
        writer.close()


def head(length: object, *lines: str) -> bytes:
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", "Host: x", f"Content-Length: {length}", *lines, "", ""]).encode()


def test_what_is_wrong_with_a_request_is_named():
    async def go():
        async with gateway_case(max_body_bytes=2000) as case:
            wrong = [
                (chat(model="other"), CHAT, 404, "model", "model_not_found"),
                (chat(model=""), CHAT, 400, "model", "missing_required_parameter"),
                (chat(model=7), CHAT, 400, "model", "invalid_type"),
                ({"model": "tiny"}, CHAT, 400, "messages", "missing_required_parameter"),
                (chat(messages=[]), CHAT, 400, "messages", "missing_required_parameter"),
                (chat(messages=["hello"]), CHAT, 400, "messages[0]", None),
                (chat(messages={"role": "user"}), CHAT, 400, "messages", "invalid_type"),
                (chat(max_tokens=0), CHAT, 400, "max_tokens", None),
                (chat(max_tokens=True), CHAT, 400, "max_tokens", "invalid_type"),
                (chat(max_completion_tokens=1.5), CHAT, 400, "max_completion_tokens", "invalid_type"),
                (chat(n=-1), CHAT, 400, "n", None),
                (chat(stream="yes"), CHAT, 400, "stream", "invalid_type"),
                (chat(stream_options={"include_usage": True}), CHAT, 400, "stream_options", None),
                (
                    chat(kv_transfer_params={"remote_host": "x"}),
                    CHAT,
                    400,
                    "kv_transfer_params",
                    "unsupported_parameter",
                ),
                (
                    text(n=2, vllm_xargs={"kv_transfer_params": "x"}),
                    TEXT,
                    400,
                    "kv_transfer_params",
                    "unsupported_parameter",
                ),
                (chat(ec_transfer_params={}), CHAT, 400, "ec_transfer_params", "unsupported_parameter"),
                (text(prompt={"a": 1}), TEXT, 400, "prompt", "invalid_type"),
                (text(prompt=[1, "a"]), TEXT, 400, "prompt", None),
                (text(prompt=[[1], []]), TEXT, 400, "prompt", None),
                (chat(user="x" * 3000), CHAT, 413, None, "request_too_large"),
                ([1, 2], CHAT, 400, None, "invalid_json"),
            ]
            for document, path, status, param, code in wrong:
                found = await case.post(document, path)
                error = found[2]["error"]
                assert (found[0], error["param"], error["code"]) == (status, param, code), document
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == "invalid_request_error"
            for data in (b"", b"{", b"\xff\xfe", b'{"model": NaN}', b"[" * 1500):
                async with case.session.post(case.url + CHAT, data=data) as response:
                    assert response.status == 415
                kind = {"Content-Type": "application/json; charset=utf-8"}
                async with case.session.post(case.url + CHAT, data=data, headers=kind) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_json"), data
            assert not case.engines["a"].asked
            metrics = case.gateway.metrics.text().decode()
            assert "other" not in metrics
            assert 'requests_total{model="",status="404"} 1.0' in metrics

    asyncio.run(go())


def test_paths_methods_models_and_health():
    async def go():
        async with gateway_case() as case:
            asked = [
                ("GET", "/v1/models", 200),
                ("GET", "/v1/models/tiny", 200),
                ("GET", "/v1/models/other", 404),
                ("GET", "/health", 200),
                ("GET", "/metrics", 200),
                ("GET", CHAT, 405),
                ("POST", "/health", 405),
                ("GET", "/", 404),
                ("GET", "/v1/../admin", 404),
            ]
            for method, path, status in asked:
                async with case.session.request(method, case.url + path, headers={"X-Request-Id": "r.1"}) as response:
                    assert (response.status, response.headers["X-Request-Id"]) == (status, "r.1"), path
            async with case.session.get(case.url + "/v1/models") as response:
                assert [one["id"] for one in (await response.json())["data"]] == ["tiny"]
            case.gateway.draining = True
            async with case.session.get(case.url + "/health") as response:
                assert response.status == 503
            status, headers, found = await case.post(chat())
            assert (status, headers["retry-after"], found["error"]["code"]) == (503, "10", "gateway_unavailable")

    asyncio.run(go())


@pytest.mark.servers
def test_bytes_that_are_no_request_get_an_error_of_the_same_shape():
    async def go():
        async with gateway_case(header_s=1.0, body_s=1.0, max_body_bytes=1000) as case:
            for data in (
                b"hello\r\n\r\n",
                head(-1),
                b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 200_000 + b"\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n",
            ):
                answer = await raw(case, data)
                assert answer.startswith(b"HTTP/1.1 400 "), data[:20]
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
            assert (await raw(case, head(10**12))).startswith(b"HTTP/1.1 413 ")
            chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            assert (await raw(case, chunked + b"400\r\n" + b" " * 1024 + b"\r\n")).startswith(b"HTTP/1.1 413 ")
            assert await raw(case, b"POST /v1/chat") == b""  # headers that never end
            assert (await raw(case, head(100) + b"{")).startswith(b"HTTP/1.1 408 ")  # nor the body
            assert (await raw(case, head(8000) + b" " * 8000)).startswith(b"HTTP/1.1 413 ")
            async with case.session.get(case.url + "/health") as response:
                assert response.status == 200
            reader, writer = await asyncio.open_connection(*case.url.removeprefix("http://").split(":"))
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.write(b"GET /hea")  # a second request that never ends
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), PATIENT_S)
            writer.close()
            assert case.gateway.running == 0

    asyncio.run(go())


@pytest.mark.servers
def test_a_flood_of_nonsense_does_not_fill_the_log(caplog):
    async def go():
        async with gateway_case() as case:
            for _ in range(3 * MOST):
                assert (await raw(case, b"hello\r\n\r\n")).startswith(b"HTTP/1.1 400 ")

    asyncio.run(go())
    assert len([one for one in caplog.records if "Invalid HTTP request" in one.message]) <= MOST


def test_keys_and_their_limits():
    async def go():
        terms = KeyTerms(requests_per_s=0.001, burst_requests=3, concurrent_requests=1)
        async with gateway_case(key=terms) as case:
            engine = case.engines["a"]
            for headers in (
                {},
                {"Authorization": "Bearer no"},
                {"Authorization": f"Basic {KEY}"},
                {"Authorization": "Bearer"},
            ):
                status, answered, found = await case.post(chat(), headers=headers)
                assert (status, found["error"]["code"], answered["www-authenticate"]) == (
                    401,
                    "invalid_api_key",
                    "Bearer",
                )
                assert found["error"]["type"] == "authentication_error"
            for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
                async with case.session.get(case.url + path) as response:
                    assert response.status == status
            engine.tell(delay_s=60.0)
            running = asyncio.create_task(case.post(chat(), headers=AUTHORIZED))
            await coming(lambda: engine.running == 1)
            status, answered, found = await case.post(chat(), headers=AUTHORIZED)
            assert (status, found["error"]["code"], answered["retry-after"]) == (429, "concurrency_limit", "1")
            engine.release.set()
            assert (await running)[0] == 200
            for _ in range(2):
                assert (await case.post(chat(), headers=AUTHORIZED))[0] == 200
            status, answered, found = await case.post(chat(), headers=AUTHORIZED)
            assert (status, found["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 500 < int(answered["retry-after"]) <= 1000
            assert found["error"]["type"] == "rate_limit_error"
            assert len(engine.asked) == 3

    asyncio.run(go())


def test_a_request_for_several_answers_counts_as_so_many():
    async def go():
        terms = KeyTerms(requests_per_s=0.001, burst_requests=4, concurrent_requests=9)
        async with gateway_case(key=terms, max_choices=10) as case:
            for many in (text(prompt=["a"] * 11), text(prompt=["a", "b"], n=6), text(best_of=11)):
                status, _, found = await case.post(many, TEXT, headers=AUTHORIZED)
                assert (status, found["error"]["param"]) == (400, "n")
                assert "at most 10" in found["error"]["message"]
            status, _, found = await case.post(chat(n=10), headers=AUTHORIZED)
            assert (status, "may have 9 running" in found["error"]["message"]) == (400, True)
        async with gateway_case(key=terms) as case:
            limiter = case.gateway.keys.limiter(AUTHORIZED["Authorization"].encode())
            assert (await case.post(chat(n=5), headers=AUTHORIZED))[0] == 200
            status, _, found = await case.post(chat(), headers=AUTHORIZED)
            assert (status, found["error"]["code"]) == (429, "rate_limit_exceeded")
            assert limiter.running == 0

    asyncio.run(go())


@pytest.mark.servers
def test_a_long_request_that_is_refused_at_once_gets_one_answer_and_the_next_one_its_own():
    """Its body comes after the answer, and is no head that grows too long."""

    async def go():
        async with gateway_case(key=KeyTerms()) as case:
            reader, writer = await asyncio.open_connection(*case.url.removeprefix("http://").split(":"))
            body = b" " * 300_000
            writer.write(head(len(body)))
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENT_S)).startswith(b"HTTP/1.1 401 ")
            writer.write(body + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            _, _, after = (await asyncio.wait_for(reader.read(), PATIENT_S)).partition(b"HTTP/1.1 ")
            assert after.startswith(b"200 OK")
            assert b"HTTP/1.1" not in after
            writer.close()

    asyncio.run(go())


@pytest.mark.servers
def test_what_the_gateway_itself_slept_through_makes_no_body_late():
    async def go():
        async with gateway_case(body_s=1.0) as case:
            reader, writer = await asyncio.open_connection(*case.url.removeprefix("http://").split(":"))
            body = json.dumps(chat()).encode()
            writer.write(head(len(body)) + body[:9])
            await coming(lambda: case.gateway.running == 1)
            time.sleep(2.0)  # noqa: ASYNC251 - gateway and client stand still together
            writer.write(body[9:])
            assert (await asyncio.wait_for(reader.readline(), PATIENT_S)) == b"HTTP/1.1 200 OK\r\n"
            writer.close()

    asyncio.run(go())


def test_a_queue_beyond_the_slo_turns_requests_away_and_they_count_as_demand():
    async def go():
        model = terms_of(ttft_s=0.5)
        async with gateway_case(models=(model,), weights={"a": 4.0}) as case:
            engine = case.engines["a"]
            engine.tell(delay_s=60.0, times=9)
            # One is at work; two more are done within 0.5 s at 4 requests/s, a fourth is not.
            running = [asyncio.create_task(case.events(chat())) for _ in range(4)]
            await coming(lambda: engine.running == 4)
            status, headers, found = await case.post(chat(stream=True))
            assert (status, headers["retry-after"], found["error"]["code"]) == (429, "1", "model_overloaded")
            assert 'waiting_requests{for="first_token",model="tiny"} 4.0' in case.gateway.metrics.text().decode()
            engine.release.set()
            assert {spoken(one) for one in await asyncio.gather(*running)} == {"t0 t1 t2 t3 "}
            assert (await case.post(chat()))[0] == 200
            [sample] = case.gateway.meter.cut()
            assert sample.requests_per_s * sample.duration_s == pytest.approx(6)
            assert (sample.mean_input_tokens, sample.mean_output_tokens) == (7.0, 4.0)

    asyncio.run(go())


def test_a_known_model_without_an_instance_is_not_ready():
    async def go():
        async with gateway_case(models=(terms_of(), terms_of("later"))) as case:
            status, headers, found = await case.post(chat(model="later"))
            assert (status, headers["retry-after"], found["error"]["code"]) == (503, "10", "model_not_ready")
            case.gateway.table.report("a", ready=False)
            assert (await case.post(chat()))[0] == 503
            case.gateway.table.report("a", ready=True)
            assert (await case.post(chat()))[0] == 200

    asyncio.run(go())


def test_who_gets_nothing_is_told_why_nobody_serves():
    async def go():
        async with gateway_case({"a": Phase.AGGREGATED, "p": Phase.PREFILL}) as case:
            table = case.gateway.table

            async def why() -> str:
                status, _, found = await case.post(chat())
                assert (status, found["error"]["code"]) == (503, "model_not_ready")
                return found["error"]["message"]

            table.set_weight("a", 0.0)
            assert await why() == "no instance of tiny that decodes takes requests"
            table.set_weight("p", 0.0)
            assert await why() == "no instance of tiny takes requests: those that are ready drain or have weight 0"
            table.drain("a")
            table.drain("p")
            assert await why() == "no instance of tiny takes requests: those that are ready drain"
            table.report("a", ready=False)
            table.report("p", ready=False)
            assert await why() == "no instance of tiny is ready"

    asyncio.run(go())


def test_the_gateway_has_its_own_limit_on_requests():
    async def go():
        async with gateway_case(max_requests=1) as case:
            engine = case.engines["a"]
            engine.tell(delay_s=60.0)
            running = asyncio.create_task(case.post(chat()))
            await coming(lambda: engine.running == 1)
            assert (await case.post(chat()))[2]["error"]["code"] == "gateway_unavailable"
            engine.release.set()
            assert (await running)[0] == 200

    asyncio.run(go())


def test_a_bug_is_logged_and_answered_in_shape(caplog, monkeypatch):
    async def go():
        async with gateway_case() as case:
            monkeypatch.setattr("coral_core.serving.gateway.parse_request", lambda *_: 1 / 0)
            status, _, found = await case.post(chat())
            assert (status, found["error"]["code"]) == (500, "internal_error")
            assert "ZeroDivisionError" in caplog.text

    asyncio.run(go())


def test_an_answer_that_is_too_long_is_no_answer():
    async def go():
        async with gateway_case({"a": Phase.AGGREGATED}, max_answer_bytes=100) as case:
            status, _, found = await case.post(chat())
            assert (status, found["error"]["message"]) == (502, "the engine's answer is longer than 100 bytes")
            case.engines["a"].tell(Way.WELL)
            assert spoken(await case.events(chat())) == "t0 t1 t2 t3 "

    asyncio.run(go())
