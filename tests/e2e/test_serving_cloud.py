"""The loop closed once: a cron deployment rents machines from an EC2 server on loopback, each boots as processes here
(agent, real engine), the gateway answers the official client; then a machine dies, and the event brings another one."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from artifacts.store import open_store
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario
from tasks.local_serving import Programs, guarded, make_tiny_models, write_serving
from tests.fakes.ec2_server import TEMPLATE, Ec2Server, ec2_server
from tests.fakes.local_fleet import PROMPTS, start_oracle, wait_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

REGION = "us-west-2"
SCENARIO = {
    "name": "rented",
    "catalog": "aws-real",
    "configs": ["g5.xlarge"],
    "regions": [REGION],
    "models": [
        {
            "model": "tiny-chat",
            "variant": "bf16",
            "phases": ["aggregated"],
            "requests_per_s": 1,
            "lengths": {"mean_input_tokens": 64, "mean_output_tokens": 32},
            "slo": {"ttft_s": 5.0, "tpot_s": 0.5},
            "limits": {"aggregated": {"min_instances": 1, "max_instances": 1}},
        }
    ],
    "runtimes": ["vllm"],
    "library": {"n_max": 1, "rho": 100_000},
    "availability": {"kind": "ample", "nodes": 4},
}


class Bootstrap(threading.Thread):
    """What machines do when they boot and when they die: an agent for each that the server says runs, from its tags."""

    def __init__(self, server: Ec2Server, programs: Programs, interpreter: Path) -> None:
        super().__init__(daemon=True)
        self.server, self.programs, self.interpreter = server, programs, interpreter
        self.ending = threading.Event()
        self.booted: list[str] = []

    def run(self) -> None:
        while not self.ending.wait(0.3):
            running = {machine.id: machine for machine in self.server.machines(REGION)}
            for name in [name for name in self.programs.running if name.startswith("i-") and name not in running]:
                agent = self.programs.running.pop(name)
                agent.kill()
                agent.wait()
            for name, machine in running.items():
                if name not in self.booted:
                    self.booted.append(name)
                    self.boot(name, {tag["key"]: tag["value"] for tag in machine.get_tags()})

    def boot(self, name: str, tags: dict[str, str]) -> None:
        folder = self.programs.serving.folder
        environment = self.programs.serving.environment
        document = {
            "coordinator": environment["CORAL_LOCAL_COORDINATOR"],
            "keys_file": environment["CORAL_LOCAL_AGENT_KEYS"],
            "node": {
                "node_id": name,
                "region": REGION,
                "tags": {key: value for key, value in tags.items() if key.startswith("coral:")},
            },
            "folder": str(folder / name),
            "engine_python": str(self.interpreter),
            "first_port": 23000 + 32 * len(self.booted),
            "ports": 32,
            "drain_s": 2.0,
            "stop_grace_s": 5.0,
        }
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(document))
        self.programs.start(name, "agent", "run", "--config", str(path), "--json")

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.join(timeout=10)


class Deployments:
    """`coral flows serve` with a cron schedule and a server of its own."""

    def __init__(self, programs: Programs, scenario: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.api = f"http://127.0.0.1:{port}/api"
        self.programs = programs
        options = ("--port", str(port), "--scenario", str(scenario), "--mode", "apply", "--every", "* * * * *")
        programs.start("flows", "flows", "serve", *options)

    def ask(self, path: str, **body: Any) -> Any:
        def answered() -> httpx.Response | None:
            answer = httpx.post(f"{self.api}/{path}", json=body, timeout=30)
            return None if answer.status_code == 503 else answer

        return wait_for(path, answered, within_s=60).raise_for_status().json()

    def runs(self, *states: str) -> list[dict[str, Any]]:
        chosen = {"state": {"type": {"any_": list(states)}}} if states else None
        return self.ask("flow_runs/filter", flow_runs=chosen, sort="START_TIME_ASC", limit=200)

    def switch_schedule_off(self) -> None:
        (deployment,) = self.ask("deployments/filter", deployments={"name": {"any_": ["reallocate"]}})
        (schedule,) = deployment["schedules"]
        path = f"{self.api}/deployments/{deployment['id']}/schedules/{schedule['id']}"
        wait_for("it", lambda: httpx.patch(path, json={"active": False}, timeout=30).is_success, within_s=30)
        for run in self.runs("SCHEDULED"):
            httpx.delete(f"{self.api}/flow_runs/{run['id']}", timeout=30)


@contextmanager
def serving_on(folder: Path, engine_python: Path, scenario: Path, ec2: Ec2Server):
    models = make_tiny_models(folder / "models", engine_python)
    run = folder / "run"
    run.mkdir()
    store = open_store((run / "store").as_uri())
    resolved = resolve_scenario(load_scenario(str(scenario)))
    build_library(build_spec_from_scenario(resolved), store, InlineExecutor(processes=1))
    with guarded(run), pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **ec2.environment,
            "PREFECT_HOME": str(run / "prefect"),
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        }.items():
            patch.setenv(name, value)
        serving = write_serving(
            resolved,
            str(scenario),
            run,
            models=models,
            interpreter=engine_python,
            store_url=store.url,
            environment={"CORAL_PROVIDER": "aws", "CORAL_AWS_LAUNCH_TEMPLATE": TEMPLATE},
        )
        with Programs(serving=serving) as programs:
            programs.start_gateway()
            programs.start_coordinator()
            yield programs, models


def test_a_cron_deployment_rents_boots_and_serves_and_a_dead_machine_is_replaced(tmp_path, engine_python):
    path = tmp_path / "rented.yaml"
    path.write_text(yaml.safe_dump(SCENARIO))
    with ec2_server() as ec2, serving_on(tmp_path, engine_python, path, ec2) as (programs, models):
        oracle = start_oracle(engine_python, {"tiny-chat": models["tiny-chat"]})
        url = programs.serving.gateway_url
        with (
            Bootstrap(ec2, programs, engine_python) as machines,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            deployments = Deployments(programs, path)
            (first,) = wait_for("a machine", lambda: list(machines.booted), within_s=300)
            expected = wait_for("an answer", lambda: answer(client), within_s=300)
            assert expected == oracle()["tiny-chat"][0]
            assert [run["created_by"]["type"] for run in deployments.runs("RUNNING", "COMPLETED")][:1] == ["SCHEDULE"]
            deployments.switch_schedule_off()
            wait_for("the run's end", lambda: deployments.runs("COMPLETED"), within_s=180)
            wait_for("rest", lambda: not deployments.runs("RUNNING", "PENDING"), within_s=120)
            before = {run["id"] for run in deployments.runs()}

            watch = ("fleet", "watch", "--scenario", str(path), "--poll-s", "1", "--window-s", "5")
            os.environ["PREFECT_API_URL"] = deployments.api
            try:
                programs.start("watch", *watch)
            finally:
                del os.environ["PREFECT_API_URL"]
            terminate(ec2, first)
            wait_for("it being noticed", lambda: answer(client) is None, within_s=15)
            second = wait_for("another machine", lambda: set(machines.booted) - {first}, within_s=180)
            assert len(second) == 1
            assert wait_for("an answer", lambda: answer(client), within_s=300) == expected
            assert [machine.id for machine in ec2.machines(REGION)] == list(second)
            started_by = {
                (run["created_by"] or {}).get("type") for run in deployments.runs() if run["id"] not in before
            }
            assert started_by == {"AUTOMATION"}


def answer(client: openai.OpenAI) -> list[int] | None:
    """Tokens, or None where the model is not ready."""
    try:
        done = client.completions.create(
            model="tiny-chat",
            prompt=PROMPTS["tiny-chat"][0],
            max_tokens=24,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
    except openai.APIStatusError as error:
        if error.status_code not in {502, 503}:
            raise
        return None
    return done.choices[0].model_extra["token_ids"]


def terminate(ec2: Ec2Server, machine: str) -> None:
    """A machine dies without a word."""
    import boto3

    client = boto3.client("ec2", region_name=REGION, endpoint_url=ec2.endpoint)
    try:
        client.terminate_instances(InstanceIds=[machine])
    finally:
        client.close()
