"""An HTTP proxy on loopback before a real S3 server that delays, breaks, refuses and forgets, as it is told.

Faults are taken in the order in which they were added; one that does not match a request waits for the next request. The
request goes on as it came (signatures stay valid); each fault says what happens to it or to its answer.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Fault(StrEnum):
    """What goes wrong."""

    REFUSED = "connection reset before the request is read"
    CUT_REQUEST = "connection reset in the middle of the request's body"
    ERROR_500 = "500 InternalError, request not passed on"
    SLOW_DOWN = "503 SlowDown, request not passed on"
    LOST_ANSWER = "request carried out, connection reset instead of the answer"
    ERROR_AFTER = "request carried out, 500 InternalError as the answer"
    CUT_ANSWER = "half of the answer's body, then the connection ends"
    SLOW = "answer held back"
    TRICKLE = "answer's body a piece at a time"
    SILENT = "request carried out, no answer for a long time"


@dataclass(slots=True, kw_only=True)
class Planned:
    """A fault for the next `times` requests of this method whose path matches."""

    fault: Fault
    method: str
    path: str
    times: int
    wait_s: float


@dataclass(slots=True, kw_only=True)
class FaultyProxy:
    """The faults to come, and what has been asked: (method, path, fault or None)."""

    endpoint: str
    planned: list[Planned] = field(default_factory=list)
    seen: list[tuple[str, str, Fault | None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def add(self, fault: Fault, method: str = "", path: str = "", *, times: int = 1, wait_s: float = 1.0) -> None:
        self.planned.append(Planned(fault=fault, method=method, path=path, times=times, wait_s=wait_s))

    def clear(self) -> None:
        with self.lock:
            self.planned.clear()
            self.seen.clear()

    def take(self, method: str, path: str) -> Planned | None:
        with self.lock:
            chosen = None
            for planned in self.planned:
                if planned.times and planned.method in ("", method) and re.search(planned.path, path):
                    planned.times -= 1
                    chosen = planned
                    break
            self.seen.append((method, path, chosen.fault if chosen else None))
            return chosen

    def asked(self, method: str, path: str) -> list[Fault | None]:
        """What became of the requests of this method to a matching path."""
        with self.lock:
            return [fault for m, p, fault in self.seen if m == method and re.search(path, p)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(upstream).netloc
        self.proxy = FaultyProxy(endpoint=f"http://127.0.0.1:{self.server_address[1]}")

    def handle_error(self, *_: object) -> None:
        """A client that went away, or a connection that was cut, is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: _Server

    def log_message(self, *_: object) -> None:
        """Nothing: `FaultyProxy.seen` has it."""

    def handle_any(self) -> None:
        proxy = self.server.proxy
        planned = proxy.take(self.command, self.path)
        fault, wait_s = (planned.fault, planned.wait_s) if planned else (None, 0.0)
        length = int(self.headers.get("Content-Length") or 0)
        body = b"" if fault is Fault.REFUSED else self.rfile.read(length // 2 if fault is Fault.CUT_REQUEST else length)
        match fault:
            case Fault.REFUSED | Fault.CUT_REQUEST:
                self.reset()
            case Fault.ERROR_500:
                self.answer(500, {}, _error("InternalError"))
            case Fault.SLOW_DOWN:
                self.answer(503, {}, _error("SlowDown"))
            case _:
                status, headers, content = self.passed_on(body)
                self.answer_with(fault, wait_s, status, headers, content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815 - the base class has these names

    def passed_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            found = connection.getresponse()
            hop = {"transfer-encoding", "connection", "keep-alive"}
            headers = {name: value for name, value in found.getheaders() if name.lower() not in hop}
            return found.status, headers, found.read()
        finally:
            connection.close()

    def answer_with(
        self, fault: Fault | None, wait_s: float, status: int, headers: dict[str, str], content: bytes
    ) -> None:
        if fault in (Fault.SLOW, Fault.SILENT):
            self.server.proxy.closing.wait(wait_s)
        match fault:
            case Fault.LOST_ANSWER | Fault.SILENT:
                self.reset()
            case Fault.ERROR_AFTER:
                self.answer(500, {}, _error("InternalError"))
            case Fault.CUT_ANSWER:
                self.answer(status, headers, content, pieces=2, stop_after=1)
                self.reset()
            case Fault.TRICKLE:
                self.answer(status, headers, content, pieces=10, pause_s=wait_s / 10)
            case _:
                self.answer(status, headers, content)

    def answer(
        self,
        status: int,
        headers: dict[str, str],
        content: bytes,
        *,
        pieces: int = 1,
        stop_after: int | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self.send_response_only(status)
        if self.command != "HEAD" and status not in (204, 304):
            headers = {n: v for n, v in headers.items() if n.lower() != "content-length"}
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        step = max(1, -(-len(content) // pieces))
        for start in list(range(0, len(content), step))[:stop_after]:
            self.wfile.write(content[start : start + step])
            self.wfile.flush()
            time.sleep(pause_s)

    def reset(self) -> None:
        """End the connection without farewell."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


@contextlib.contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy on a free port before the server at `upstream` (http://host:port)."""
    server = _Server(upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.proxy
    finally:
        server.proxy.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
