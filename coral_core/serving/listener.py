"""The HTTP server under the applications: uvicorn, with a time limit on headers and errors of the API's shape."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coral_core.errors import ServingError
from coral_core.serving.asgi import Message
from coral_core.serving.refusals import bad_request
from coral_core.serving.sparing_log import spare

if sys.platform != "win32":
    import resource

    import uvloop

_MOST_HEADER_BYTES: Final = 64 * 1024
_IDLE_S: Final = 30
_BACKLOG: Final = 1024
_LINGER_S: Final = 1.0
_DEAF_MS: Final = 180_000


class _TooLongError(Exception):
    """Raised inside the parser, which makes a parser error of it."""


class _Patient(HttpToolsProtocol):
    """One connection. It is closed when its request line and headers do not come within `header_s`, refused where they are too long."""

    header_s = 10.0
    refused = False
    _head_bytes = 0
    _waiting_bytes = 0
    _in_body = False
    _fed = _left_over = b""

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - as in the base class
        super().connection_made(transport)
        self._overdue = self.loop.call_later(self.header_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        if self._is_idle and not self._in_body:  # the body of a request that was refused at once is no head
            self._waiting_bytes += len(data)
        self._left_over = data
        while self._left_over:
            self._fed, self._left_over = self._left_over, b""
            super().data_received(self._fed)
        self._fed = b""
        if not self._is_idle:
            self._waiting_bytes = 0
            self._overdue.cancel()
        elif self._waiting_bytes > _MOST_HEADER_BYTES and not self.refused:
            self.send_400_response("")
        elif self._overdue.cancelled() and not self.refused:  # the next request on this connection has begun to come
            self._overdue = self.loop.call_later(self.header_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._overdue.cancel()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_body = True
        cycle: Any = self.cycle
        if cycle is not None and cycle.scope is self.scope and self.scope["http_version"] == "1.0":
            _end_with_the_connection(cycle)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > _MOST_HEADER_BYTES:
            raise _TooLongError

    def _should_upgrade(self) -> bool:
        return True  # to whatever protocol; see below

    def handle_websocket_upgrade(self) -> None:
        """Go on as if the client had offered no other protocol: some offer HTTP/2 with each request, and do without.

        Called where the parser stops behind the head: it takes what follows, the body too, for that protocol.
        """
        if self.scope["method"] == "CONNECT":
            self.send_400_response("")
            return
        stopped = sys.exception()
        assert isinstance(stopped, httptools.HttpParserUpgrade)
        head = [b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self._left_over = b"".join([*head, b"\r\n", self._fed[stopped.args[0] :]])
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # as the base class has it, also of earlier versions
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    @property
    def _is_idle(self) -> bool:
        cycle: Any = self.cycle  # none before the first request, whatever the base class says
        return cycle is None or cycle.response_complete

    def _too_slow(self) -> None:
        self._overdue.cancel()
        if self._is_idle:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base class's text is for a plain answer
        body = bad_request("this is no HTTP request, or its headers are too long", code="invalid_http").body
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # To close while the client still sends would reset the connection, and take the answer back.
        self.refused = True
        self._overdue.cancel()
        self._overdue = self.loop.call_later(_LINGER_S, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _end_with_the_connection(cycle: Any) -> None:  # noqa: ANN401 - uvicorn's, untyped where it matters
    """Answer as HTTP/1.0 has it, which knows no chunks: a stream's end is the connection's. It has not begun yet."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def plainly(message: Message) -> None:
        if message["type"] == "http.response.body":  # as much is due as comes, and more while more is to come
            cycle.expected_content_length = len(message.get("body", b"")) + bool(message.get("more_body"))
        await send(message)

    cycle.send = plainly


class Listener(uvicorn.Server):
    """One application on one socket. Whoever runs it sets `should_exit`; signals are not its business."""

    def __init__(self, app: Any, *, header_s: float, drain_s: float) -> None:  # noqa: ANN401 - an ASGI application
        spare("uvicorn.error", "asyncio")
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Patient", (_Patient,), {"header_s": header_s}),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def break_off(self) -> None:
        """Do not wait for what runs, when asked to exit."""
        self.force_exit = True


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket; ServingError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ServingError(
            f"cannot listen: {error.strerror or error}", where=f"{host}:{port}", fix="is another process there already?"
        ) from None
    found.settimeout(0)
    # Connections inherit it. asyncio would set it itself, but not on sockets made without naming TCP as their protocol;
    # without it the last events of every answer wait 40 ms for the client's acknowledgement.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(
        socket, "TCP_USER_TIMEOUT"
    ):  # connections inherit it: one whose client reads nothing is not kept for ever
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAF_MS)
    return found


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end on uvloop, which passes about half more requests in the same CPU time; on Windows on asyncio's own loop.

    With as many open files as the process may have: a request takes two, and shells and services begin with 1024 in all.
    """
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(OSError, ValueError):  # some systems say more than they grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        uvloop.run(main)
