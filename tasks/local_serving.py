"""Serving on this machine: tiny models, keys and files of coordinator and gateway, their processes, and a certain end.

All processes carry a mark in their environment, those of nodes and engines too, because they inherit it. A guard that
waits for its maker's end kills whatever still carries the mark then, however the maker ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from coral_core.catalog.models import package_models
from coral_core.clock import ListeningClock
from coral_core.cloud.local_processes import end_all, members
from coral_core.config.resolve import ResolvedScenario
from coral_core.domain.launch import Runtime
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, ServingError
from coral_core.serving.control.curve import KeyPair, write_allowed, write_private
from coral_core.serving.control.wire import new_pair
from coral_core.units import MIB
from tasks.direct_http import open_directly

CORAL: Final = (sys.executable, "-c", "from coral_core.cli.entry import main; main()")
ROOT: Final = Path(__file__).resolve().parents[1]
MARK: Final = "CORAL_LOCAL_SERVING"
FLEET_KEY: Final = "fleet.key"
SEEDS: Final = {"tiny-chat": 0, "tiny-split": 1}
"""The tiny models, and what their weights are drawn from."""
KV_CACHE_BYTES: Final = 64 * MIB
MAX_MODEL_LEN_TOKENS: Final = 2048
MAX_REQUESTS: Final = 16
BLOCK_TOKENS: Final = 32
_LOG_LINES: Final = 8
_LOOK_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServing:
    """A folder with everything that serving on this machine needs; `environment` is what commands and flows need to use it."""

    folder: Path
    gateway_file: Path
    coordinator_file: Path
    gateway_url: str
    admin_url: str
    environment: Mapping[str, str]

    def command(self, *arguments: str) -> tuple[str, ...]:
        """A `coral` command as a process starts it."""
        return (*CORAL, *arguments)

    @property
    def process_environment(self) -> dict[str, str]:
        """The environment of every process that belongs to it."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            **self.environment,
            MARK: str(self.folder),
            "SPT_NOENV": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }


def make_tiny_models(folder: Path, interpreter: Path) -> dict[str, Path]:
    """The tiny models by name, each in a folder of its own, written where they are missing. Raises ServingError."""
    shapes = package_models()
    found: dict[str, Path] = {}
    for name, seed in SEEDS.items():
        path, shape = folder / name, shapes[name]
        found[name] = path
        if (path / "config.json").exists():
            continue
        dimensions = {
            "--layers": shape.layers,
            "--hidden": shape.hidden,
            "--heads": shape.heads,
            "--kv-heads": shape.kv_heads,
            "--head-dim": shape.head_dim,
            "--ffn": shape.intermediate,
            "--vocab": shape.vocab,
            "--context": shape.max_context_tokens,
            "--seed": seed,
        }
        options = [str(part) for pair in dimensions.items() for part in pair]
        argv = [str(interpreter), "-m", "coral_core.engine.plugin.tiny_model", str(path), *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - as set
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise ServingError(
                f"the model {name} could not be made: {said[0]}",
                where=str(interpreter),
                fix="make the engines' environment anew with `make engine-cpu`",
            )
    return found


def write_serving(
    resolved: ResolvedScenario,
    scenario: str,
    folder: Path,
    *,
    models: Mapping[str, Path],
    interpreter: Path,
    store_url: str,
    fleet: str = "local",
    port: int = 0,
    gateway_limits: Mapping[str, object] | None = None,
    patience: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LocalServing:
    """Keys, token and the files of gateway, coordinator and engines in `folder`, which must hold none yet.

    Nodes have the runtimes that the scenario names (without: vLLM's own). `port` 0 is any free one; `environment` goes beside and before what commands are told. Raises InputError for a model without a folder among `models`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    admin_port, coordinator_port, *more = free_ports(2 if port else 3)
    gateway_port = port or more[0]
    keys = _write_keys(folder)
    token = folder / "admin.token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_urlsafe(32) + "\n", encoding="utf-8")
    gateway = {
        "listen": {"host": "127.0.0.1", "port": gateway_port},
        "admin": {"port": admin_port, "token_file": token.name},
        "models": [_served(model.shape.name, resolved) for model in resolved.models],
        "limits": dict(gateway_limits or {}),
    }
    coordinator = {
        "listen": {"host": "127.0.0.1", "port": coordinator_port},
        "keys_file": keys["coordinator"].name,
        "agents_file": keys["allowed"].name,
        "gateway": {"url": f"http://127.0.0.1:{admin_port}", "token_file": token.name},
        "scenario": scenario,
        "engine_file": "engine.yaml",
        "patience": dict(patience or {}),
    }
    found = LocalServing(
        folder=folder,
        gateway_file=_written(folder / "gateway.yaml", gateway),
        coordinator_file=_written(folder / "coordinator.yaml", coordinator),
        gateway_url=f"http://127.0.0.1:{gateway_port}",
        admin_url=f"http://127.0.0.1:{admin_port}",
        environment={
            "CORAL_STORE": store_url,
            "CORAL_FLEET": fleet,
            "CORAL_PROVIDER": "local",
            "CORAL_LOCAL": str(folder / "local"),
            "CORAL_LOCAL_COORDINATOR": f"tcp://127.0.0.1:{coordinator_port}",
            "CORAL_LOCAL_AGENT_KEYS": str(keys["agent"]),
            "CORAL_GATEWAY_ADMIN_URL": f"http://127.0.0.1:{admin_port}",
            "CORAL_GATEWAY_TOKEN_FILE": str(token),
            "CORAL_ENGINE_PYTHON": str(interpreter),
            "CORAL_MAX_NODES": "16",
            "CORAL_MAX_USD_PER_H": "10",
            **(environment or {}),
        },
    )
    _written(folder / "engine.yaml", _engine_document(resolved, models))
    return found


@dataclass(slots=True, kw_only=True)
class Programs:
    """Processes of a LocalServing by name; `with` ends them, in the order opposite to their start."""

    serving: LocalServing
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self.running)):
            self.stop(name)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a `coral` command in a session of its own; what it says goes into `<name>.log`."""
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(  # noqa: S603 - our own command
                self.serving.command(*arguments),
                env=self.serving.process_environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.running[name]

    def start_gateway(self) -> None:
        """Start the gateway and wait until it answers."""
        self.start("gateway", "gateway", "run", "--config", str(self.serving.gateway_file), "--json")
        self._await("gateway", lambda: answers(f"{self.serving.gateway_url}/health"))

    def start_coordinator(self) -> None:
        """Start the coordinator and wait until agents can reach it."""
        self.start("coordinator", "coordinator", "run", "--config", str(self.serving.coordinator_file), "--json")
        host, _, port = self.serving.environment["CORAL_LOCAL_COORDINATOR"].removeprefix("tcp://").rpartition(":")
        self._await("coordinator", lambda: _listens(host, int(port)))

    def stop(self, name: str, *, grace_s: float = 20.0) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log(self, name: str) -> Path:
        """Where a program's output is."""
        return self.serving.folder / f"{name}.log"

    def _await(self, name: str, true: Callable[[], bool], *, within_s: float = 120.0) -> None:
        waited_s = ListeningClock(time.monotonic, most_s=5.0)  # which asking may take
        while not true():
            if self.running[name].poll() is not None or waited_s() > within_s:
                said = "\n".join(
                    self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                )
                raise ServingError(f"the {name} did not start: {said}", where=str(self.log(name)))
            time.sleep(_LOOK_S)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """In this block a guard stands by: when this process is gone, in whatever way, all of `folder`'s processes end.

    At the end of the block they are ended too, those that an earlier one has left at its beginning.
    """
    end_all(folder, mark_name=MARK)
    code = f"import sys; sys.stdin.read(); from tasks.local_serving import end_serving; end_serving({str(folder)!r})"
    guard = subprocess.Popen(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        yield
    finally:
        if guard.stdin:
            guard.stdin.close()
        while guard.returncode is None:
            with contextlib.suppress(KeyboardInterrupt):  # nothing is left to be cut short
                guard.wait()


def end_serving(folder: str) -> int:
    """Kill all processes of a LocalServing; how many there were."""
    return end_all(Path(folder), mark_name=MARK)


def serving_processes(folder: Path) -> int:
    """How many processes of a LocalServing there are."""
    return len(members(folder, mark_name=MARK))


def free_ports(count: int) -> list[int]:
    """Ports on loopback that are free at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def require_free(port: int) -> None:
    """Raise InputError where somebody listens on the port."""
    if _listens("127.0.0.1", port):
        raise InputError(f"port {port} is taken", where="--port", fix="give another one")


def answers(url: str) -> bool:
    """Whether a GET is answered with success."""
    try:
        with open_directly(url, timeout=5) as response:
            return bool(response.status < 300)
    except (OSError, urllib.error.HTTPError):
        return False


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _write_keys(folder: Path) -> dict[str, Path]:
    """One pair for the coordinator, one that all nodes of this machine share."""
    paths = {name: folder / f"{name}.keys" for name in ("coordinator", "agent", "allowed")}
    coordinator, agent = new_pair(), new_pair()
    write_private(paths["coordinator"], KeyPair(public=coordinator[0], secret=coordinator[1]))
    write_private(paths["agent"], KeyPair(public=agent[0], secret=agent[1], server=coordinator[0]))
    write_allowed(paths["allowed"], {agent[0]: "local"})
    (folder / FLEET_KEY).touch(mode=0o600)
    (folder / FLEET_KEY).write_text(secrets.token_hex(32) + "\n", encoding="utf-8")
    return paths


def _served(name: str, resolved: ResolvedScenario) -> dict[str, object]:
    """A model as the gateway's file has it."""
    (model,) = [one for one in resolved.models if one.shape.name == name]
    phase = Phase.DECODE if Phase.DECODE in model.phases else Phase.AGGREGATED
    lengths = model.demand.lengths
    return {
        "name": name,
        "slo": {"ttft_s": model.demand.slo.ttft_s, "tpot_s": model.demand.slo.tpot_s},
        "mean_input_tokens": lengths.mean_input_tokens,
        "mean_output_tokens": lengths.mean_output_tokens,
        "planned_tpot_frac": resolved.scenario.capacity.slo_frac_of(name, phase),
    }


def _engine_document(resolved: ResolvedScenario, models: Mapping[str, Path]) -> dict[str, object]:
    terms: dict[str, object] = {}
    for model in resolved.models:
        if model.shape.name not in models:
            raise InputError(
                f"the model {model.shape.name} is not among those made here",
                where=f"scenario {resolved.scenario.name}",
                fix=f"use {' or '.join(models)}",
            )
        terms[model.shape.name] = {
            model.variant: {
                "path": str(models[model.shape.name]),
                "dtype": "float32",
                "max_model_len_tokens": min(MAX_MODEL_LEN_TOKENS, model.shape.max_context_tokens),
                "max_num_seqs": MAX_REQUESTS,
                "max_num_batched_tokens": MAX_MODEL_LEN_TOKENS,
                "block_size_tokens": BLOCK_TOKENS,
                "kv_cache_memory_bytes": KV_CACHE_BYTES,
            }
        }
    runtimes = resolved.scenario.runtimes or (Runtime.VLLM,)
    key = {"key_file": f"./{FLEET_KEY}"} if Runtime.CORAL in runtimes else {}
    return {"device": "cpu", "runtimes": [runtime.value for runtime in runtimes], **key, "models": terms}


def _written(path: Path, document: Mapping[str, object]) -> Path:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
