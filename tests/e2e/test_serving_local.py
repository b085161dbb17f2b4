"""The whole way on this machine with real engines: plan, nodes, agents, vLLM, gateway, the official client; then faults.

One fleet for the module, since engines are slow to start: plan `a` (two engines of one model, prefill and decode of the
other) is reallocated under load to `b` (the first model as an uneven pipeline over two nodes), then hurt in every way.
"""

from __future__ import annotations

import signal
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from artifacts.fleets import Outcome
from tests.fakes.local_fleet import PROMPTS, LocalFleet, kill, local_fleet, wait_for
from tests.fakes.openai_streams import LongStream, tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NOTICED_S = 15.0
CHAT = {
    "model": "tiny-chat",
    "phases": ["aggregated"],
    "requests_per_s": 1,
    "lengths": {"mean_input_tokens": 64, "mean_output_tokens": 32},
    "slo": {"ttft_s": 1.0, "tpot_s": 0.03},
    "limits": {"aggregated": {"min_instances": 2, "max_instances": 2}},
}
SPLIT = {
    "model": "tiny-split",
    "requests_per_s": 1,
    "lengths": {"mean_input_tokens": 256, "mean_output_tokens": 32},
    "slo": {"ttft_s": 5.0, "tpot_s": 0.5},
}
ONE_PIPELINE = {**CHAT, "requests_per_s": 85, "limits": {"aggregated": {"min_instances": 1, "max_instances": 1}}}
"""More than one node gives, in one instance: unlike nodes share out its layers in proportion to their speed."""


def scenario(folder: Path, name: str, *models: dict) -> Path:
    document = {
        "name": "both",
        "catalog": "local",
        "regions": ["local"],
        "models": list(models),
        "runtimes": ["vllm"],
        "library": {"name": "both", "n_max": 2, "rho": 1000},
        "availability": {"kind": "constant", "nodes": {"local": {"local-large": 1, "local-small": 6}}},
        "allocation": {"startup_s": 90},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plans")
    return scenario(folder, "a", CHAT, SPLIT), scenario(folder, "b", ONE_PIPELINE, SPLIT)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, engine_python, plans):
    with local_fleet(tmp_path_factory.mktemp("fleet"), engine_python, plans[0]) as found:
        yield found


@pytest.fixture(scope="module")
def client(fleet):
    with openai.OpenAI(base_url=f"{fleet.serving.gateway_url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@dataclass
class Evidence:
    """What was seen at each stage of the fleet's life; tests only judge it, so that their order does not matter."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def on_a(fleet: LocalFleet, client, plans) -> Evidence:
    """Two engines of one model, prefill and decode of the other; each prompt asked twice."""
    done = fleet.reallocate(plans[0])
    assert done.outcome is Outcome.CONVERGED, f"{done.reason}\n{fleet.logs()}"
    found = Evidence(rows=fleet.rows())
    for model, prompts in PROMPTS.items():
        found.tokens[model] = [tokens(client, model, prompt) for prompt in [*prompts, *prompts]]
    (decode,) = fleet.instances("tiny-split", phase="decode")
    found.facts = {
        "models": {model.id for model in client.models.list()},
        "served": [metric(row["url"], "vllm:request_success_total") for row in fleet.instances("tiny-chat")],
        "external": metric(decode["url"], "vllm:external_prefix_cache_hits_total"),
    }
    return found


def test_two_models_answer_as_one_plain_engine_each(fleet: LocalFleet, on_a):
    assert sorted((row["model"], row["phase"], row["ready"]) for row in on_a.rows) == [
        ("tiny-chat", "aggregated", True),
        ("tiny-chat", "aggregated", True),
        ("tiny-split", "decode", True),
        ("tiny-split", "prefill", True),
    ]
    assert on_a.facts["models"] == {"tiny-chat", "tiny-split"}
    for model, expected in fleet.answers().items():
        assert on_a.tokens[model] == [*expected, *expected], model


def test_both_instances_of_a_model_have_served(on_a):
    assert min(on_a.facts["served"]) >= 2  # one of them its own readiness


def test_decode_took_its_prompts_from_prefill_over_nixl(on_a):
    assert on_a.facts["external"] > 200


class Stream(threading.Thread):
    """Asks for one streamed answer after another until told to end; `lengths` and `faults` are what came of them."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        super().__init__(daemon=True)
        self.client, self.model, self.ending = client, model, threading.Event()
        self.lengths: list[int] = []
        self.faults: list[str] = []

    def run(self) -> None:
        while not self.ending.is_set():
            try:
                pieces, reason = 0, None
                for piece in self.client.completions.create(
                    model=self.model, prompt="streams go on", max_tokens=48, temperature=0, stream=True,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                ):  # fmt: skip
                    choice = piece.choices[0]
                    pieces += len((choice.model_extra or {}).get("token_ids") or ())
                    reason = choice.finish_reason or reason
                self.lengths.append(pieces)
                if reason != "length":
                    self.faults.append(f"ended with {reason!r}")
            except openai.OpenAIError as error:
                self.faults.append(repr(error))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.join(timeout=60)


@pytest.fixture(scope="module")
def on_b(on_a, fleet: LocalFleet, client, plans) -> Evidence:
    """Reallocated to the uneven pipeline while clients stream from both models."""
    with Stream(client, "tiny-chat") as first, Stream(client, "tiny-split") as second:
        done = fleet.reallocate(plans[1])
        assert done.outcome is Outcome.CONVERGED, f"{done.reason}\n{fleet.logs()}"
        mark = len(first.lengths)
        wait_for("answers of the pipeline", lambda: len(first.lengths) > mark + 1, within_s=60)
    found = Evidence(rows=fleet.rows(), facts={"lengths": first.lengths + second.lengths})
    found.facts["faults"] = first.faults + second.faults
    (pipeline,) = fleet.instances("tiny-chat")
    found.facts["partitions"] = [
        {environment_of(pid).get("VLLM_PP_LAYER_PARTITION") for pid in fleet.engines(path)}
        for path in fleet.node_folders(pipeline["name"])
    ]
    found.tokens["tiny-chat"] = [tokens(client, "tiny-chat", prompt) for prompt in PROMPTS["tiny-chat"]]
    return found


def test_reallocating_under_load_loses_nothing(on_b):
    assert on_b.facts["faults"] == []
    assert set(on_b.facts["lengths"]) == {48}
    assert len(on_b.facts["lengths"]) > 10


def test_an_uneven_pipeline_over_two_nodes_answers_the_same_tokens(fleet: LocalFleet, on_b):
    assert on_b.facts["partitions"] == [{"6,2"}, {"6,2"}]
    assert on_b.tokens["tiny-chat"] == fleet.answers()["tiny-chat"]


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)


# Faults ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarted(on_b, fleet: LocalFleet, client) -> Evidence:
    """Coordinator killed and started again, then the gateway."""
    before, facts = fleet.ready(), {}
    fleet.kill("coordinator")
    facts["without"] = tokens(client, "tiny-chat", PROMPTS["tiny-chat"][0])
    time.sleep(3)
    facts["ready_without"] = fleet.ready() == before
    fleet.programs.start_coordinator()
    time.sleep(5)
    facts["ready_with_another"] = fleet.ready() == before
    fleet.kill("gateway")
    try:
        facts["no_gateway"] = tokens(client, "tiny-chat", PROMPTS["tiny-chat"][0])
    except openai.OpenAIError as error:
        facts["no_gateway"] = error
    fleet.programs.start_gateway()
    began_s = time.monotonic()
    wait_for("all instances", lambda: fleet.ready() == before, within_s=60)
    facts["known_again_s"] = time.monotonic() - began_s
    return Evidence(facts=facts, tokens={model: [tokens(client, model, PROMPTS[model][0])] for model in PROMPTS})


def test_without_a_coordinator_the_fleet_serves_and_a_new_one_takes_it_over(fleet: LocalFleet, restarted):
    assert restarted.facts["without"] == fleet.answers()["tiny-chat"][0]
    assert restarted.facts["ready_without"]
    assert restarted.facts["ready_with_another"]


def test_a_gateway_that_was_killed_knows_all_instances_again(fleet: LocalFleet, restarted):
    assert isinstance(restarted.facts["no_gateway"], openai.APIConnectionError)
    assert restarted.facts["known_again_s"] < NOTICED_S
    assert restarted.tokens == {model: answers[:1] for model, answers in fleet.answers().items()}


@pytest.fixture(scope="module")
def hurt(restarted, fleet: LocalFleet, client, plans) -> Evidence:
    """A rank killed amid a stream, an engine stopped, an agent killed; at once, because replacing an engine takes a minute."""
    (pipeline,) = fleet.instances("tiny-chat")
    (prefill,), (decode,) = (fleet.instances("tiny-split", phase=phase) for phase in ("prefill", "decode"))
    first, second = fleet.node_folders(pipeline["name"])
    (halted,), (orphaned,) = fleet.node_folders(prefill["name"]), fleet.node_folders(decode["name"])
    orphans = fleet.engines(orphaned)
    with LongStream(client, "tiny-chat") as stream:
        assert stream.begun.wait(60)
        began_s = time.monotonic()
        kill(*fleet.engines(second))
        kill(*fleet.engines(halted), number=signal.SIGSTOP)
        kill(fleet.agent(orphaned))
        names = {"rank killed": pipeline["name"], "engine stopped": prefill["name"], "agent killed": decode["name"]}
        noticed_s: dict[str, float] = {}

        def all_noticed() -> bool:
            up = fleet.ready()
            for what, name in names.items():
                if name not in up:
                    noticed_s.setdefault(what, time.monotonic() - began_s)
            return noticed_s.keys() == names.keys()

        wait_for("the faults being noticed", all_noticed, within_s=60)
    found = Evidence(facts={"noticed_s": noticed_s, "stream": stream.ended, "statuses": {}})
    for model in PROMPTS:
        try:
            found.facts["statuses"][model] = tokens(client, model, PROMPTS[model][0])
        except openai.APIStatusError as error:
            found.facts["statuses"][model] = (error.status_code, float(error.response.headers.get("retry-after", 0)))
    wait_for("no rank being left behind", lambda: not fleet.engines(first), within_s=60)
    wait_for("no engine being left of the agent", lambda: not any(map(running, orphans)), within_s=60)

    done = fleet.reallocate(plans[1])
    assert done.outcome is Outcome.CONVERGED, f"{done.reason}\n{fleet.logs()}"
    found.facts["old_ones"] = set(names.values()) & fleet.ready()
    found.tokens = {model: [tokens(client, model, PROMPTS[model][0])] for model in PROMPTS}
    return found


def test_each_fault_is_noticed_in_time(hurt):
    assert {what: s for what, s in hurt.facts["noticed_s"].items() if s > NOTICED_S} == {}


def test_a_stream_that_breaks_off_ends_with_an_error(hurt):
    assert isinstance(hurt.facts["stream"][-1], openai.APIError)


def test_models_without_an_instance_answer_that_they_are_not_ready_and_when_to_ask_again(hurt):
    for status, retry_after_s in hurt.facts["statuses"].values():
        assert status == 503
        assert retry_after_s > 0


def test_the_fleet_replaces_what_has_failed(fleet: LocalFleet, hurt):
    assert hurt.facts["old_ones"] == set()
    assert hurt.tokens == {model: answers[:1] for model, answers in fleet.answers().items()}


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
