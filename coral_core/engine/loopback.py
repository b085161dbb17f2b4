"""An engine that computes nothing: OpenAI's streams of a stated number of chunks, for measuring what stands in front of it.

`python -m coral_core.engine.loopback --ports 2 --model tiny --chunks 48 --gap-ms 2` prints its URLs as one JSON line and
serves on loopback until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Final, cast

import uvloop

_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END: Final = b"0\r\n\r\n"


def stream_of(model: str, chunks: int) -> list[bytes]:
    """The events of one answer, each as one piece of HTTP's chunked coding: `chunks` tokens, usage, and the end."""
    base = {"id": "chatcmpl-loopback", "object": "chat.completion.chunk", "created": 0, "model": model}
    events = []
    for number in range(chunks):
        delta = {"content": f"token{number} "} if number else {"role": "assistant", "content": "token0 "}
        reason = "length" if number == chunks - 1 else None
        events.append({**base, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]})
    usage = {"prompt_tokens": 16, "completion_tokens": chunks, "total_tokens": 16 + chunks}
    events.append({**base, "choices": [], "usage": usage})
    lines = [b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events]
    return [_piece(line) for line in [*lines, b"data: [DONE]\n\n"]]


def _piece(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class _Connection(asyncio.Protocol):
    """One connection: requests one after another, each answered by the same stream."""

    def __init__(self, model: str, pieces: list[bytes], gap_s: float) -> None:
        self._model, self._pieces, self._gap_s = model, pieces, gap_s
        self._held = b""
        self._next: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._loop = cast("asyncio.Transport", transport), asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as in the base class
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, found, rest = self._held.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(rest) < length:
            return
        self._held = rest[length:]
        if head.startswith(b"POST"):
            self._transport.write(_HEAD)
            self._say(0)
        else:
            body = json.dumps({"object": "list", "data": [{"id": self._model, "object": "model"}]}).encode()
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )

    def _say(self, number: int) -> None:
        self._transport.write(self._pieces[number])
        if number + 1 < len(self._pieces):
            # Usage and [DONE] come with the last token, as an engine sends them.
            gap_s = self._gap_s if number + 3 < len(self._pieces) else 0.0
            later = self._loop.call_later(gap_s, self._say, number + 1) if gap_s else None
            self._next = later or self._loop.call_soon(self._say, number + 1)
        else:
            self._transport.write(_END)


async def serve(ports: int, model: str, chunks: int, gap_s: float) -> None:
    """Serve on `ports` free ports of loopback until standard input ends."""
    loop = asyncio.get_running_loop()
    pieces = stream_of(model, chunks)
    servers = [
        await loop.create_server(lambda: _Connection(model, pieces, gap_s), "127.0.0.1", 0, backlog=1024)
        for _ in range(ports)
    ]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    sys.stdout.write(json.dumps({"urls": urls}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        server.close()


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, default=2)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--chunks", type=int, default=48)
    parser.add_argument("--gap-ms", type=float, default=2.0)
    options = parser.parse_args()
    uvloop.run(serve(options.ports, options.model, options.chunks, options.gap_ms / 1e3))


if __name__ == "__main__":
    main()
