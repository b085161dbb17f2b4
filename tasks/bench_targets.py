"""The processes of a gateway bench: engines that compute nothing, and each gateway in front of them, on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from coral_core.errors import MeasurementError

TargetName = Literal["direct", "coral", "vllm-router", "litellm"]

MODEL: Final = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What load is sent to; `process` is the one whose CPU time counts (of `direct`, the engines')."""

    name: TargetName
    url: str
    process: subprocess.Popen[str]


@contextmanager
def running_targets(rivals: Mapping[TargetName, Path], *, chunks: int, gap_s: float) -> Iterator[list[Target]]:
    """Two engines that compute nothing, and in front of them our gateway and each rival; all are ended.

    Raises MeasurementError where the engines do not start; whether the others answer is for the caller to see.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coral-bench-")))
        yield list(_started(stack, folder, rivals, chunks, gap_s))


def _started(
    stack: ExitStack, folder: Path, rivals: Mapping[TargetName, Path], chunks: int, gap_s: float
) -> Iterator[Target]:
    words = [sys.executable, "-m", "coral_core.engine.loopback", "--ports", "2", "--model", MODEL]
    words += ["--chunks", str(chunks), "--gap-ms", str(gap_s * 1e3)]
    engine = stack.enter_context(_running(words, folder / "engine.log", stdout=subprocess.PIPE))
    assert engine.stdout is not None
    line = engine.stdout.readline()
    if not line:
        raise MeasurementError("the engines that compute nothing did not start", where=_end_of(folder / "engine.log"))
    urls: list[str] = json.loads(line)["urls"]
    yield Target(name="direct", url=urls[0], process=engine)
    programs: dict[TargetName, Path] = {"coral": Path(sys.executable).with_name("coral"), **rivals}
    for name, program in programs.items():
        port = _free_port()
        words, more = _COMMANDS[name](program, port, urls, folder)
        process = stack.enter_context(_running(words, folder / f"{name}.log", more=more))
        yield Target(name=name, url=f"http://127.0.0.1:{port}", process=process)


Command = tuple[list[str], dict[str, str]]


def _coral(program: Path, port: int, urls: Sequence[str], folder: Path) -> Command:
    # An SLO that turns nobody away: what is measured is the way through, not admission's refusals.
    document = {
        "listen": {"host": "127.0.0.1", "port": port},
        "models": [
            {
                "name": MODEL,
                "slo": {"ttft_s": 3600.0, "tpot_s": 60.0},
                "mean_input_tokens": 128.0,
                "mean_output_tokens": 48.0,
            }
        ],
        "instances": [
            {"name": f"engine-{n}", "model": MODEL, "phase": "aggregated", "url": url, "weight": 1.0}
            for n, url in enumerate(urls)
        ],
    }
    (folder / "gateway.yaml").write_text(json.dumps(document), encoding="utf-8")
    return [str(program), "gateway", "run", "--config", str(folder / "gateway.yaml"), "--json"], {}


def _vllm_router(program: Path, port: int, urls: Sequence[str], _folder: Path) -> Command:
    words = [str(program), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    return [*words, "--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(_free_port())], {}


def _litellm(program: Path, port: int, urls: Sequence[str], folder: Path) -> Command:
    entries = [
        {
            "model_name": MODEL,
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for url in urls
    ]
    (folder / "litellm.yaml").write_text(json.dumps({"model_list": entries}), encoding="utf-8")
    words = [str(program), "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    # It stays on loopback and for the length of the bench; without these it asks the network for prices, and a key.
    more = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    return [*words, "--num_workers", "1"], more


_COMMANDS: Final[Mapping[TargetName, Callable[[Path, int, Sequence[str], Path], Command]]] = {
    "coral": _coral,
    "vllm-router": _vllm_router,
    "litellm": _litellm,
}


@contextmanager
def _running(
    words: list[str], log: Path, *, more: Mapping[str, str] | None = None, stdout: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own, ended with all that it started."""
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(  # noqa: S603 - a program of ours, or one that the user named
            words,
            stdin=subprocess.PIPE,
            stdout=stdout or out,
            stderr=out,
            text=True,
            env={**os.environ, **(more or {})},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    try:
                        process.wait(timeout=5.0)
                    except subprocess.TimeoutExpired:
                        continue
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-300:].strip()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
