"""Load for OpenAI streams over few kept connections, at the least cost of its own: closed loops and a fixed rate.

`python -m coral_core.engine.stream_load --url ... --connections 64 --seconds 10 [--rate R]` prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

import uvloop

_PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a run of load heard, measured at the client. Latencies are of finished requests, from the moment when each was due.

    `unfinished` were under way when time was up, and are no errors.
    """

    finished: int
    errors: int
    unfinished: int
    elapsed_s: float
    first_event_s: tuple[float, ...]
    whole_s: tuple[float, ...]
    first_error: str


class _Client(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self.transport: asyncio.Transport | None = None
        self._busy = False
        self._tail = b""
        self._due_s = 0.0
        self._first_s: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._load.idle(self)

    def ask(self, due_s: float) -> None:
        """Send the request that was due at `due_s`."""
        assert self.transport is not None
        self._busy, self._tail, self._due_s, self._first_s = True, b"", due_s, None
        self.transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            return
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(data[:200].decode(errors="replace"))
            return
        if self._first_s is None and b"data:" in data:
            self._first_s = time.perf_counter()
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._busy = False
            if b"[DONE]" not in self._tail or self._first_s is None:
                self._fail("the stream ended without [DONE]")
                return
            self._load.finished(self._first_s - self._due_s, time.perf_counter() - self._due_s)
            self._load.idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._busy = False
            self._load.failed(f"connection lost: {exc}")
        self._load.gone()

    def _fail(self, why: str) -> None:
        self._busy = False
        self._load.failed(why)
        assert self.transport is not None
        self.transport.abort()


class _Load:
    """All connections of a run. In a closed loop an idle connection asks at once; at a rate, when a request is due."""

    def __init__(self, url: str, request: bytes, *, rate: float | None, seconds: float) -> None:
        self.request = request
        self._url, self._rate, self._seconds = url, rate, seconds
        self._idle: deque[_Client] = deque()
        self._due: deque[float] = deque()
        self._first: list[float] = []
        self._whole: list[float] = []
        self._errors = 0
        self._why = ""
        self._under_way = 0
        self._began_s = math.inf
        self._over = False
        self._all_sent = False
        self._all_heard = asyncio.Event()

    async def run(self, connections: int) -> Heard:
        """Open the connections, send for `seconds`, then leave."""
        loop = asyncio.get_running_loop()
        where = urlsplit(self._url)
        clients = [
            (await loop.create_connection(lambda: _Client(self), where.hostname or "", where.port or 80))[0]
            for _ in range(connections)
        ]
        self._began_s = time.perf_counter()
        if self._rate is None:
            for client in list(self._idle):
                self._ask(client, time.perf_counter())
            self._idle.clear()
            await asyncio.sleep(self._seconds)
        else:
            await self._at_rate(self._rate)
        self._over = True
        elapsed_s = time.perf_counter() - self._began_s
        unfinished = self._under_way + len(self._due)
        for transport in clients:
            transport.abort()
        await asyncio.sleep(0)
        return Heard(
            finished=len(self._whole),
            errors=self._errors,
            unfinished=unfinished,
            elapsed_s=elapsed_s,
            first_event_s=tuple(self._first),
            whole_s=tuple(self._whole),
            first_error=self._why,
        )

    async def _at_rate(self, rate: float) -> None:
        """Requests evenly spaced; one that finds no idle connection waits, and its wait counts."""
        total = max(1, round(rate * self._seconds))
        for number in range(total):
            due_s = self._began_s + number / rate
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            if self._idle:
                self._ask(self._idle.popleft(), due_s)
            else:
                self._due.append(due_s)
        self._all_sent = True
        if self._under_way or self._due:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_heard.wait(), _PATIENCE_S)

    def idle(self, client: _Client) -> None:
        if self._over:
            return
        if self._rate is None and self._began_s != math.inf:
            self._ask(client, time.perf_counter())
        elif self._due:
            self._ask(client, self._due.popleft())
        else:
            self._idle.append(client)

    def finished(self, first_s: float, whole_s: float) -> None:
        self._first.append(first_s)
        self._whole.append(whole_s)
        self._ended()

    def failed(self, why: str) -> None:
        if not self._over:
            self._errors += 1
            self._why = self._why or why
        self._ended()

    def gone(self) -> None:
        """A connection that ends before the run does will be missed; the error that ended it has been counted."""
        if not self._over and not self._errors:
            self._errors, self._why = 1, "an idle connection was closed"

    def _ended(self) -> None:
        self._under_way -= 1
        if self._all_sent and not self._under_way and not self._due:
            self._all_heard.set()

    def _ask(self, client: _Client, due_s: float) -> None:
        self._under_way += 1
        client.ask(due_s)


def request_bytes(url: str, model: str, *, tokens: int, key: str | None = None) -> bytes:
    """A streamed chat request of about a hundred words, as it goes over the wire."""
    words = " ".join(f"word{number}" for number in range(100))
    document = {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "stream": True,
        "max_tokens": tokens,
    }
    body = json.dumps(document).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    return (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body


async def load(url: str, request: bytes, *, connections: int, seconds: float, rate: float | None = None) -> Heard:
    """Send `request` over `connections` kept connections for `seconds`; without a rate, each as soon as it is free."""
    return await _Load(url, request, rate=rate, seconds=seconds).run(connections)


def main() -> None:
    """Read the options, send, print what was heard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=None)
    parser.add_argument("--out", type=Path, default=None, help="write the JSON line here instead of printing it")
    options = parser.parse_args()
    request = request_bytes(options.url, options.model, tokens=options.tokens)
    heard = uvloop.run(
        load(options.url, request, connections=options.connections, seconds=options.seconds, rate=options.rate)
    )
    line = json.dumps(asdict(heard)) + "\n"
    if options.out is not None:
        options.out.write_text(
            line, encoding="utf-8"
        )  # a pipe may be left non-blocking, and then takes only part of it
    else:
        sys.stdout.write(line)


if __name__ == "__main__":
    main()
