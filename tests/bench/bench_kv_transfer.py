"""Time of a KV transfer between two engines of one worker each: our connector beside vLLM's NixlConnector, measured on this machine.

`python -m tests.bench.bench_kv_transfer ENGINE_PYTHON`, from the root. One request at a time: from its arrival at the decode engine
to its first token, which includes computing the prompt's last token. Core seconds are both engines' own.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.fakes.kv_engine_process import PRODUCE, engines, transfer_config

PROMPTS_TOKENS = (100, 1000, 4000)
TOKEN_BYTES = 4096
REPEATS = 8


def nixl(role: str, port: int) -> dict[str, Any]:
    """An engine's arguments and environment with NixlConnector, over TCP."""
    environment = {
        "UCX_TLS": "tcp,sm,self",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }
    return {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role}, "environment": environment}


def measure(python: Path, folder: Path, name: str, specs: dict[str, dict[str, Any]]) -> None:
    """Print a line for each length of prompt."""
    numbers = random.Random(1)
    with engines(python, folder, specs) as started:
        there, here = started["prefill"], started["decode"]
        processes = [psutil.Process(engine.pid) for engine in (there, here)]
        for count in PROMPTS_TOKENS:
            times_s, cores_s = [], 0.0
            for number in range(REPEATS):
                prompts = [[numbers.randrange(10, 1000) for _ in range(count)]]
                (made,) = there.run(f"p{count}x{number}n", prompts, [PRODUCE], 1)
                before_s = sum(sum(process.cpu_times()[:2]) for process in processes)
                begun_s = time.perf_counter()
                (got,) = here.run(f"d{count}x{number}n", prompts, [made["params"]], 1)
                times_s.append(time.perf_counter() - begun_s)
                cores_s += sum(sum(process.cpu_times()[:2]) for process in processes) - before_s
                assert got["tokens"] == made["tokens"]
            sys.stdout.write(
                f"measured: {name}, {count} tokens, {count * TOKEN_BYTES / 1e6:.2f} MB: median {statistics.median(times_s[1:]):.3f} s, "
                f"least {min(times_s):.3f} s, {cores_s / REPEATS:.3f} core s; load {os.getloadavg()[0]:.0f}\n"
            )
            sys.stdout.flush()


def main() -> None:
    """Both connectors in turn."""
    python = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, key_file = folder / "model", folder / "kv.key"
        subprocess.run([python, "-m", "coral_core.engine.plugin.tiny_model", model], check=True)
        key_file.write_text("of this measurement only, and long enough")
        common = {"model": str(model), "block_size": 32, "max_model_len": 4096}
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        ours = {
            engine: {**common, "kv_transfer_config": transfer_config(role, key_file=str(key_file))}
            for engine, role in roles.items()
        }
        measure(python, folder, "CoralKVConnector", ours)
        theirs = {
            engine: {**common, **nixl(role, 5700 + 10 * number)} for number, (engine, role) in enumerate(roles.items())
        }
        measure(python, folder, "NixlConnector", theirs)


if __name__ == "__main__":
    main()
