"""The test's end of `kv_engine.py`: engines as processes that answer lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

DRIVER = Path(__file__).with_name("kv_engine.py")
PRODUCE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What the gateway sends to a prefill engine."""

COMMON = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 2048}
ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_COUNTS = (
    "driver.engine.collective_rpc(lambda worker: dict(__import__('vllm.distributed.kv_transfer', fromlist=['x'])"
    ".get_kv_transfer_group()._puller.counts))"
)


def transfer_config(role: str, *, policy: str = "recompute", **terms: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for our connector."""
    return {
        "kv_connector": "CoralKVConnector",
        "kv_connector_module_path": "coral_core.engine.plugin.kv_connector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": terms,
    }


class Engine:
    """An engine that runs in a process of its own."""

    def __init__(self, name: str, log: Path, commands: TextIO, answers: TextIO) -> None:
        self.name = name
        self._log, self._commands, self._answers = log, commands, answers
        self.pid = 0
        self.took_s = 0.0

    def ready(self) -> Self:
        """Once it has started."""
        self.pid = self._answer()["ready"]
        return self

    def kill(self) -> None:
        """End it and its workers at once."""
        os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it in an orderly way."""
        self._commands.close()
        self._answers.close()

    def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        """One of the driver's commands."""
        self._commands.write(json.dumps({"do": command, **arguments}) + "\n")
        self._commands.flush()
        return self._answer()

    def start(self, name: str, prompts: list[list[int]], params: list[Any], tokens: int) -> None:
        """Begin a request for each prompt: `name` and its number."""
        requests = [
            {"id": f"{name}{number}", "prompt": prompt, "params": given, "max_tokens": tokens}
            for number, (prompt, given) in enumerate(zip(prompts, params, strict=True))
        ]
        self.do("start", requests=requests)

    def collect(self, name: str, count: int, within_s: float = 300.0) -> list[dict[str, Any]]:
        """What the requests gave that `start` began; `took_s`: how long that took the engine, pauses of the machine left out."""
        result = self.do("collect", within_s=within_s)
        self.took_s = result["took_s"]
        assert not result["waiting"], f"{self.name}: {result['waiting']} did not finish within {within_s} s"
        return [result["finished"][f"{name}{number}"] for number in range(count)]

    def run(self, name: str, prompts: list[list[int]], params: list[Any], tokens: int) -> list[dict[str, Any]]:
        """`start` and `collect`."""
        self.start(name, prompts, params, tokens)
        return self.collect(name, len(prompts))

    def evaluate(self, code: str) -> Any:
        """The value of a Python expression in the engine's process."""
        return self.do("evaluate", code=code)["value"]

    def fetches(self) -> tuple[int, int]:
        """How many fetches of its workers have succeeded and failed so far."""
        counts = self.evaluate(_COUNTS)
        return sum(own.get("fetched", 0) for own in counts), sum(own.get("failed", 0) for own in counts)

    def drained(self, within_s: float) -> float:
        """Seconds until no KV block is in use."""
        result = self.do("drained", within_s=within_s)
        assert result["usage"] == 0.0, f"{self.name}: {result['usage']:.1%} of the blocks are held after {within_s} s"
        return float(result["took_s"])

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        assert line, f"{self.name} ended:\n{self._log.read_text(errors='replace')[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def engines(python: Path, folder: Path, specs: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, Engine]]:
    """Engines by name, once all are ready; `specs`: vLLM's arguments for each, `layers` of its stages, `ranks` of a stage, `environment`."""
    ours: dict[str, Engine] = {}
    theirs = []
    fds: list[int] = []
    for name, spec in specs.items():
        given = dict(spec)
        layers, ranks = given.pop("layers", (8,)), given.pop("ranks", 1)
        if len(layers) * ranks > 1:
            given |= {
                "pipeline_parallel_size": len(layers),
                "tensor_parallel_size": ranks,
                "distributed_executor_backend": "mp",
                "worker_cls": "coral_core.engine.plugin.cpu_worker.StageWorker",
            }
        (reads, commands), (answers, writes) = os.pipe(), os.pipe()
        fds += [reads, writes]
        log = folder / f"{name}.log"
        environment = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers)), **given.pop("environment", {})}
        arguments = {**COMMON, **given}
        theirs.append(
            {"arguments": arguments, "environment": environment, "log": str(log), "reads": reads, "writes": writes}
        )
        ours[name] = Engine(name, log, os.fdopen(commands, "w"), os.fdopen(answers))
    with (folder / "engines.log").open("wb") as log_file:
        process = subprocess.Popen(
            [python, DRIVER, json.dumps(theirs)],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(DRIVER.parents[2])},
            stdout=log_file,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
        )
    for fd in fds:
        os.close(fd)
    try:
        for engine in ours.values():
            engine.ready()
        yield ours
    finally:
        process.kill()  # the kernel ends the engines with it
        process.wait()
        for engine in ours.values():
            with suppress(OSError):
                engine.close()
