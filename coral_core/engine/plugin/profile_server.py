"""Serves measurements on a node: one engine after another, each of a truncated model, and the times of its steps.

`python -m coral_core.engine.plugin.profile_server --host H --port P MODEL FLAGS...` is started by the node's agent like any
engine, and answers what an agent asks an engine (`/health`, `/v1/models`, `/metrics`, and a completion, which it makes of
nothing: that it listens is all that there is to know). Whoever profiles posts JSON:

    /open {"tp": 1, "layers": 2}    ends the engine before, starts this one, answers when it has started
    /measure {...}                  a question of `profile_steps`, and its answer
    /close                          ends the engine

An engine that cannot start or dies is answered with status 500 and its last lines.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEPS = ("-m", "coral_core.engine.plugin.profile_steps")
MODEL = "profile"
LAST_LINES = 12
END_GRACE_S = 15.0


class GoneError(RuntimeError):
    """The engine is not there, or did not start."""


class Steps:
    """At most one engine at a time, one question at a time."""

    def __init__(self, flags: list[str]) -> None:
        self.flags = flags
        self.lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._said: collections.deque[str] = collections.deque(maxlen=LAST_LINES)

    def open(self, tp: int, layers: int) -> dict[str, Any]:
        """Start an engine; what it says of itself, and `start_s`, the seconds from its process to its readiness."""
        self.close()
        began_s = time.perf_counter()
        self._said.clear()
        self._process = subprocess.Popen(  # noqa: S603 - our own program with the flags that the launch states
            [sys.executable, *STEPS, "--layers", str(layers), *self.flags, "--tensor-parallel-size", str(tp)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._keep_lines, args=(self._process,), daemon=True).start()
        return {**self._answer(self._process), "start_s": time.perf_counter() - began_s}

    def measure(self, question: dict[str, Any]) -> dict[str, Any]:
        """The engine's answer."""
        process = self._process
        if process is None or process.stdin is None:
            raise GoneError("no engine is open")
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        except OSError:
            raise GoneError(self._last_words(process)) from None
        return self._answer(process)

    def close(self) -> None:
        """End the engine, with all that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        line = process.stdout.readline() if process.stdout is not None else ""
        try:
            return dict(json.loads(line))
        except ValueError:
            raise GoneError(self._last_words(process)) from None

    def _last_words(self, process: subprocess.Popen[str]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        time.sleep(0.1)  # for the thread that reads its last lines
        return f"the engine ended with {process.returncode}: {' | '.join(self._said)}"

    def _keep_lines(self, process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            self._said.append(line.rstrip())
            sys.stderr.write(line)


class Handler(BaseHTTPRequestHandler):
    """One request. `steps` is set on a subclass."""

    steps: Steps
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """What an agent asks."""
        answers = {"/health": {}, "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model"}]}}
        if self.path in answers:
            self._reply(200, answers[self.path])
        elif self.path == "/metrics":
            self._send(200, b"", "text/plain")
        else:
            self._reply(404, {"error": f"no {self.path} here"})

    def do_POST(self) -> None:
        """What an agent asks, and what whoever profiles asks."""
        try:
            asked = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))) or b"{}")
            self._reply(200, self._answer(asked))
        except (ValueError, KeyError, TypeError) as error:
            self._reply(400, {"error": f"{type(error).__name__}: {error}"})
        except GoneError as error:
            self._reply(500, {"error": str(error)})

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/v1/completions":
            return {"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
        with self.steps.lock:
            if self.path == "/open":
                return self.steps.open(int(asked["tp"]), int(asked["layers"]))
            if self.path == "/measure":
                return self.steps.measure(asked)
            if self.path == "/close":
                self.steps.close()
                return {}
        raise KeyError(self.path)

    def _reply(self, status: int, document: dict[str, Any]) -> None:
        self._send(status, json.dumps(document).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing: an agent asks every second."""


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    given, flags = parser.parse_known_args()
    steps = Steps(flags)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    handler = type("Bound", (Handler,), {"steps": steps})
    try:
        with ThreadingHTTPServer((given.host, given.port), handler) as server:
            server.serve_forever()
    finally:
        steps.close()


if __name__ == "__main__":
    main()
