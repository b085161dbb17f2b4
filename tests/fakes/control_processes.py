"""Gateway, coordinator and agents as processes on loopback, to be killed and started again; engines are fake ones."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

import psutil

from coral_core.cli.entry import run as run_coral
from tests.fakes.gateway_case import MODEL, TOKEN
from tests.fakes.waiting import PATIENT_S, until

ROOT = Path(__file__).resolve().parents[2]
CORAL = [sys.executable, "-c", "from coral_core.cli.entry import main; main()"]
LOST_S = 4.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, of those that are given to no outgoing connection: they are bound later, and again."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


class Processes:
    """All of them; leaving the context kills whatever is left, engines included."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gateway_port, self.admin_port, self.port = free_ports(3)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.engine_ports: dict[tuple[str, int], int] = {}
        keys = folder / "keys"
        assert run_coral(["keys", "new", "coordinator", str(keys)]) == 0
        assert run_coral(["keys", "new", "agent", "fleet", str(keys)]) == 0
        (folder / "token").write_text(TOKEN, encoding="utf-8")
        model = {
            "name": MODEL,
            "slo": {"ttft_s": 30.0, "tpot_s": 5.0},
            "mean_input_tokens": 10.0,
            "mean_output_tokens": 10.0,
        }
        gateway = {
            "listen": {"port": self.gateway_port},
            "admin": {"port": self.admin_port, "token_file": "token"},
            "limits": {"probe_s": 0.5},
            "models": [model],
        }
        (folder / "gateway.yaml").write_text(json.dumps(gateway), encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)
        for process in self.engines():
            process.kill()

    # ---- starting and ending

    def start_gateway(self) -> None:
        self._start("gateway", [*CORAL, "gateway", "run", "--config", str(self.folder / "gateway.yaml"), "--json"])
        until(lambda: self.rows() is not None, "the gateway's admin side")

    def start_coordinator(self) -> None:
        program = [sys.executable, str(ROOT / "tests" / "fakes" / "coordinator_program.py")]
        facts = [str(self.folder), str(self.port), f"http://127.0.0.1:{self.admin_port}", str(LOST_S)]
        self._start("coordinator", [*program, *facts])

    def start_agent(
        self, instance: str, node: int = 0, nodes: int = 1, *, node_id: str = "", keys: str = "fleet", **changes: Any
    ) -> str:
        name = node_id or f"{instance}-{node}"
        port = self.engine_ports.setdefault((instance, node), free_ports(1)[0])
        tags = {"instance": instance, "template": "t", "model": MODEL, "phase": "aggregated", "config": "c"}
        tags |= {"stage": str(node), "node": str(node), "nodes": str(nodes), "epoch": "1"} | changes
        document = {
            "coordinator": f"tcp://127.0.0.1:{self.port}",
            "keys_file": f"keys/agent-{keys}.keys",
            "node": {"node_id": name, "tags": {f"coral:{key}": value for key, value in tags.items()}},
            "engine_python": sys.executable,
            "folder": f"agent-{name}",
            "first_port": port,
            "ports": 1,
            "heartbeat_s": 0.5,
            "drain_s": 20.0,
            "stop_grace_s": 3.0,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(document), encoding="utf-8")
        self._start(name, [*CORAL, "agent", "run", "--config", str(path), "--json"])
        return name

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(PATIENT_S)

    def _start(self, name: str, argv: list[str]) -> None:
        environment = {**os.environ, "CORAL_STORE": (self.folder / "store").as_uri(), "PYTHONPATH": str(ROOT)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, cwd=self.folder)

    # ---- looking

    def said(self, name: str) -> list[dict[str, Any]]:
        """What a process has told so far, over all its lives."""
        path = self.folder / f"{name}.log"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def events(self, name: str) -> list[str]:
        return [line["event"] for line in self.said(name)]

    def admin(self, method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENT_S) as response:
            return json.load(response)

    def rows(self) -> dict[str, Any] | None:
        try:
            return {row["name"]: row for row in self.admin("GET", "/instances")["instances"]}
        except (OSError, ValueError):
            return None

    def row(self, name: str) -> dict[str, Any]:
        return (self.rows() or {}).get(name, {})

    def state(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "coordinator" / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {"instances": []}

    def stage(self, name: str) -> str:
        return next((one["stage"] for one in self.state()["instances"] if one["instance"] == name), "")

    def write_status(self, name: str, state: str, weight_frac: float, **lost: str | None) -> None:
        """Have the engine of the instance's first node say what is left of it, node numbers as `n0`."""
        nodes = {node.removeprefix("n"): {"stage": 0, "lost": why} for node, why in lost.items()}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.engine_ports[name, 0]}/status",
            data=json.dumps({"state": state, "weight_frac": weight_frac, "nodes": nodes, "pid": 1}).encode(),
        )
        with urllib.request.urlopen(request, timeout=PATIENT_S) as response:
            assert response.status == 200

    def ask(self) -> int:
        """The status of one request to the gateway; 0: it does not answer."""
        body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.gateway_port}/v1/completions", data=body, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENT_S) as response:
                return response.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def engines(self, instance: str = "") -> list[psutil.Process]:
        """Processes of fake engines (of one instance) of these agents."""
        ports = {str(port) for (name, _), port in self.engine_ports.items() if instance in ("", name)}
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if len(line) > 2 and line[1].endswith(("control_engine.py", "engine_program.py")) and line[2] in ports:
                found.append(process)
        return found
