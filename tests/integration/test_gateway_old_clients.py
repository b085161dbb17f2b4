"""Clients of HTTP/1.0, such as a proxy's plain setting, which know no chunks; and those that would rather speak HTTP/2."""

from __future__ import annotations

import asyncio
import json

from tests.fakes.gateway_case import TEXT, events_in, gateway_case, text
from tests.fakes.waiting import PATIENT_S


async def _asked(url: str, body: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer, up to the connection's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    head = f"POST {TEXT} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    found = await asyncio.wait_for(reader.read(), PATIENT_S)
    writer.close()
    first, _, rest = found.partition(b"\r\n\r\n")
    return first.lower(), rest


def test_an_http_1_0_client_gets_streams_without_chunks_and_whole_answers_as_ever():
    async def go() -> None:
        async with gateway_case() as case:
            head, body = await _asked(case.url, json.dumps(text(stream=True)).encode())
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert events_in(body)[-1] == "[DONE]"
            head, body = await _asked(case.url, json.dumps(text()).encode())
            assert f"content-length: {len(body)}".encode() in head
            assert json.loads(body)["choices"]
            head, body = await _asked(case.url, b"{")
            assert head.startswith(b"http/1.1 400")
            assert json.loads(body)["error"]["code"] == "invalid_json"

    asyncio.run(go())


def test_a_client_that_offers_another_protocol_with_its_request_is_answered_in_this_one():
    """Java's own client offers HTTP/2 with each request to a plain address."""

    async def go() -> None:
        offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
        asked = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body = json.dumps(text()).encode()
        whole = f"{asked}{offer}content-length: {len(body)}\r\n\r\n".encode() + body
        chunks = f"{asked}{offer}transfer-encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
        last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: websocket\r\n\r\n"
        async with gateway_case() as case:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(case.url.rpartition(":")[2]))
            for data in (whole, whole + chunks, chunks * 20):
                writer.write(data[:300])
                await writer.drain()
                await asyncio.sleep(0.01)
                writer.write(data[300:])
            writer.write(last)
            found = await asyncio.wait_for(reader.read(), PATIENT_S)
            assert found.count(b"HTTP/1.1 200 OK") == found.count(b"HTTP/1.1") == 24
            assert found.count(b'"text": "t0 t1 t2 t3 "') == 23
            writer.close()

    asyncio.run(go())
