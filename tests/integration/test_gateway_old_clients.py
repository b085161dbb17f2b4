"""Clients of HTTP/1.0, such as a proxy's plain setting: they know no chunks."""

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
