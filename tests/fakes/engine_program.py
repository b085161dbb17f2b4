"""A program that behaves as an engine does, as its process is seen from outside. Standard library alone; starts in 50 ms.

usage: engine_program.py PORT [deaf] [children] [dies] [exits CODE] [prints FILE] [never] [refuses] [writes FILE]

It says vLLM's lines and answers /health, /v1/models, /v1/completions and /metrics. /stop makes it stand still, /go lets it go on.
`deaf`: ignores SIGTERM. `children`: starts a deaf process in a session of its own, /child tells its id. `dies`: is killed
by a signal. `exits`: leaves with a code, after FILE was printed. `never`: stays silent. `refuses`: from /stop on, completions fail.
`writes`: /status puts FILE where an engine that can go on without nodes says what is left of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DEAF = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

go = threading.Event()
go.set()
figures = {"steps": 0, "running": 0}


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM does, as far as anybody asks."""

    child = 0
    refuses = False
    status = Path()

    def do_GET(self) -> None:
        match self.path:
            case "/stop":
                go.clear()
            case "/go":
                go.set()
            case "/status":
                new = Path(f"{os.environ['CORAL_STAGE_STATUS']}.new")
                new.write_bytes(self.status.read_bytes())
                new.replace(os.environ["CORAL_STAGE_STATUS"])
            case "/metrics":
                steps, running = figures["steps"], figures["running"]
                self.answer(
                    f'vllm:iteration_tokens_total_count{{engine="0"}} {steps}\n'
                    f'vllm:num_requests_running{{engine="0"}} {running}\n'
                )
                return
            case "/child":
                self.answer(str(self.child))
                return
        self.answer(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.refuses and not go.is_set():
            self.send_error(500)
            return
        # As a stopped engine core does not count what came after it stopped, neither is this counted.
        go.wait()
        figures["steps"] += 1
        self.answer(json.dumps({"usage": {"completion_tokens": 1}}))

    def answer(self, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    port, *words = sys.argv[1:]
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "children" in words:
        Handler.child = subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True).pid
    if "never" in words:
        time.sleep(600)
    if "prints" in words:
        sys.stdout.buffer.write(Path(words[words.index("prints") + 1]).read_bytes())
        sys.stdout.flush()
    if "dies" in words:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exits" in words:
        sys.exit(int(words[words.index("exits") + 1]))
    Handler.refuses = "refuses" in words
    if "writes" in words:
        Handler.status = Path(words[words.index("writes") + 1])
    say("(APIServer pid=1) INFO 01-01 00:00:00 [utils.py:1] non-default args: {}")
    say("(Worker pid=2) INFO 01-01 00:00:00 [loader.py:1] Loading weights took 0.01 seconds")
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
