"""A fleet on this machine under test: its programs, reallocations in this process, its engines' processes, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from artifacts.leases import Lease, LeaseTerms
from coral_core.clock import ListeningClock
from coral_core.cloud.local_processes import members
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import Settings
from tasks.apply import Done, Patience, carry_out, open_job, take
from tasks.executor import InlineExecutor
from tasks.local_serving import MARK, LocalServing, Programs, guarded, make_tiny_models, write_serving
from tasks.reallocate import Wish, check_acting, goal_of, plan_from, record_plan, see
from tasks.template_source import fresh_library

PROMPTS = {
    "tiny-chat": ["the quick brown fox", "one two three four five six seven eight nine ten"],
    "tiny-split": ["a b c d e f g", "what is asked of the first engine is answered by the second one " * 6],
}
TOKENS = 24
ORACLE = """
import json, sys
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
answers = {}
for model, (folder, prompts) in asked.items():
    engine = LLM(model=folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 * 2**20, max_model_len=2048)
    ended = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0.0), use_tqdm=False)
    answers[model] = [list(one.outputs[0].token_ids) for one in ended]
    del engine
print("ANSWERS " + json.dumps(answers))
""".replace("TOKENS", str(TOKENS))
PATIENCE = Patience(lease=LeaseTerms(duration_s=120.0, skew_s=1.0), poll_s=1.0, deadline_s=400.0)


@dataclass
class LocalFleet:
    """`oracle` gives the tokens of one plain engine per model and prompt."""

    serving: LocalServing
    programs: Programs
    models: dict[str, Path]
    answers: Callable[[], dict[str, list[list[int]]]]

    @property
    def settings(self) -> Settings:
        return Settings(
            **{name.removeprefix("CORAL_").lower(): value for name, value in self.serving.environment.items()}
        )

    def reallocate(self, scenario: Path, **changes: Any) -> Done:
        """Plan and carry out as the flow does, here."""
        settings = self.settings
        job = open_job(settings, patience=PATIENCE, holder="a test")
        resolved = resolve_scenario(load_scenario(str(scenario)))
        snapshot = fresh_library(resolved, job.store, InlineExecutor(processes=1))
        wish = Wish(
            resolved=resolved,
            snapshot=snapshot,
            max_nodes=settings.max_nodes,
            max_usd_per_h=settings.max_usd_per_h,
            **changes,
        )
        check_acting(job, wish)
        lease = take(job)
        assert isinstance(lease, Lease), lease
        seen = see(job, wish)
        stored = record_plan(job, plan_from(job, wish, seen))
        done = carry_out(job, lease, goal_of(job, wish, stored, seen, mode="apply"))
        lease.give_back()
        return done

    def rows(self) -> list[dict[str, Any]]:
        """What the gateway has."""
        token = Path(self.serving.environment["CORAL_GATEWAY_TOKEN_FILE"]).read_text().strip()
        request = urllib.request.Request(
            f"{self.serving.admin_url}/instances", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)["instances"]

    def ready(self) -> set[str]:
        """Names of the instances that are ready; none where the gateway cannot be asked."""
        try:
            return {row["name"] for row in self.rows() if row["ready"]}
        except OSError:
            return set()

    def instances(self, model: str, *, phase: str | None = None) -> list[dict[str, Any]]:
        """Those that are ready; the gateway remembers some that have ended."""
        ready = (row for row in self.rows() if row["ready"])
        return [row for row in ready if row["model"] == model and phase in {None, row["phase"]}]

    def kill(self, program: str) -> None:
        """Kill a program as a crash would."""
        process = self.programs.running.pop(program)
        process.kill()
        process.wait()

    def node_folders(self, instance: str) -> list[Path]:
        """The folders of an instance's nodes, node 0 first."""
        found = {}
        for path in (self.serving.folder / "local" / "nodes").glob("*/node.json"):
            tags = json.loads(path.read_text())["tags"]
            if tags["coral:instance"] == instance:
                found[int(tags["coral:node"])] = path.parent
        return [found[number] for number in sorted(found)]

    def agent(self, folder: Path) -> int:
        return json.loads((folder / "process.json").read_text())["pid"]

    def engines(self, folder: Path) -> list[int]:
        """Pids of a node's engine processes: those that run the engine's interpreter or carry an engine's title."""
        return [one.pid for one in members(folder) if is_engine(one.pid)]

    def logs(self) -> str:
        """The last lines of everything, for a test that fails."""
        folder = self.serving.folder
        texts = []
        for path in [
            *folder.glob("*.log"),
            *folder.glob("local/nodes/*/*.log"),
            *folder.glob("local/nodes/*/agent/*.log"),
        ]:
            lines = path.read_text(errors="replace").splitlines()[-15:]
            texts.append("\n".join([f"--- {path.relative_to(folder)}", *lines]))
        return "\n".join(texts)


def is_engine(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(part in command for part in (b"coral_core.engine.plugin", b"VLLM::", b"spawn_main"))


@contextmanager
def local_fleet(folder: Path, engine_python: Path, scenario: Path, **options: Any) -> Iterator[LocalFleet]:
    """Gateway and coordinator up, no node yet; every process ended afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    models = make_tiny_models(folder / "models", engine_python)
    run = folder / "run"
    with guarded(run), pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(run))  # for the nodes that are started from here
        resolved = resolve_scenario(load_scenario(str(scenario)))
        serving = write_serving(
            resolved,
            str(scenario),
            run,
            models=models,
            interpreter=engine_python,
            store_url=(run / "store").as_uri(),
            **options,
        )
        oracle = start_oracle(engine_python, {one.shape.name: models[one.shape.name] for one in resolved.models})
        with Programs(serving=serving) as programs:
            programs.start_gateway()
            programs.start_coordinator()
            found = LocalFleet(serving=serving, programs=programs, models=models, answers=oracle)
            yield found


def start_oracle(engine_python: Path, models: dict[str, Path]) -> Callable[[], dict[str, list[list[int]]]]:
    """One plain engine per model answers the prompts, meanwhile; call the result for the tokens."""
    asked = {name: (str(models[name]), prompts) for name, prompts in PROMPTS.items() if name in models}
    process = subprocess.Popen(
        [str(engine_python), "-c", ORACLE, json.dumps(asked)],
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    kept: list[dict[str, list[list[int]]]] = []

    def answers() -> dict[str, list[list[int]]]:
        if not kept:
            out, err = process.communicate(timeout=300)
            line = next((line for line in out.splitlines() if line.startswith("ANSWERS ")), None)
            assert line is not None, err[-2000:]
            kept.append(json.loads(line.removeprefix("ANSWERS ")))
        return kept[0]

    return answers


def wait_for(what: str, true: Callable[[], Any], *, within_s: float) -> Any:
    """What `true` gives once it is true; fails after `within_s`."""
    waited_s = ListeningClock(time.monotonic, most_s=15.0)  # what is asked may take a while
    while True:
        found = true()
        if found:
            return found
        assert waited_s() < within_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.1)


def kill(*pids: int, number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
