"""Pipelines with several nodes per stage, on real vLLM: what one plain engine says is what they must say."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.stage_internals import ENVIRONMENT, INTERNALS

# Ten minutes on two cores, and time to stand still.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1150)]

LAYOUTS = ("1x2", "2-1", "2-3", "1-2-1", "uneven")
SCENARIOS = (
    "internals",
    "stranger",
    "parts",
    "refusals",
    "plain",
    *LAYOUTS,
    "prefill-decode",
    "kills:1",
    "silence",
    "pause",
    "pace",
    "chain",
    "decodes-1x2-token",
)

Result = dict[str, Any]


class Results(dict[str, Result]):
    """By scenario; who asks for one that failed or never came fails, and nobody else."""

    log = ""

    def __missing__(self, name: str) -> Result:
        raise AssertionError(f"no result of {name}: it was ended, or died\n{self.log}")

    def __getitem__(self, name: str) -> Result:
        result = super().__getitem__(name)
        assert "failed" not in result, f"{name}: {result['failed']}\n{self.log}"
        return result


def drive(engine_python: Path, tiny_model: Path, folder: Path, scenarios: tuple[str, ...], limit_s: float) -> Results:
    """The scenarios' results by name; where the driver was ended or died, those that it had."""
    root = Path(__file__).parents[2]
    command = [engine_python, root / "tests/fakes/stage_driver.py", tiny_model, *scenarios]
    log = folder / "driver.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root), "STAGE_DRIVER_FOLDER": str(folder)},
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, _ = process.communicate()
    results = Results((result.pop("scenario"), result) for result in map(json.loads, out.splitlines()))
    results.log = log.read_text()[-4000:]
    return results


@pytest.fixture(scope="module")
def results(engine_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return drive(engine_python, tiny_model, tmp_path_factory.mktemp("stages"), SCENARIOS, limit_s=1100.0)


def wrong(tokens: dict[str, list[int]], oracle: dict[str, list[int]], partial: set[str] = frozenset()) -> list[str]:
    """Requests whose tokens are not the oracle's; of `partial` ones the first tokens are compared."""
    return [
        name for name, own in tokens.items() if own != (oracle[name][: len(own)] if name in partial else oracle[name])
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_says_what_one_engine_says_short_of_blocks_and_with_aborts(results, layout):
    result = results[layout]
    aborted = set(result["aborted"])
    assert not wrong(result["tokens"], results["plain"]["tokens"], aborted)
    finished = result["tokens"].keys() - aborted
    assert len([name for name in finished if name.startswith("r")]) + len(aborted) == 32
    assert aborted
    assert result["preemptions"] > 0
    assert result["left_behind"] == {}


def test_masks_of_structured_output_and_logprobs_of_prompts_find_their_way(results):
    named, oracle = results["1-2-1"], results["plain"]
    special = [f"s{number}" for number in range(8)]
    assert [named["tokens"][name] for name in special] == [oracle["tokens"][name] for name in special]
    assert [named["prompt_logprobs"][name] for name in special] == [oracle["prompt_logprobs"][name] for name in special]
    assert {len(named["prompt_logprobs"][name]) > 5 for name in special} == {True, False}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_node_of_later_stages_is_reached_and_measured(results, layout):
    hops = results[layout]["hops"].values()
    later = [hop for hop in hops if hop[0]]
    assert len(later) == len(hops) - {"1x2": 1, "2-1": 2, "2-3": 2, "1-2-1": 1, "uneven": 1}[layout]
    assert all(messages > 0 and size > 0 and seconds > 0 for messages, size, seconds in later)


def test_a_stage_with_fewer_layers_holds_more_requests(results):
    blocks = results["1-2-1"]["blocks"]
    assert blocks["d"] > blocks["a"] > blocks["b"] == blocks["c"]


def test_prefill_and_decode_pipelines_of_other_splits_exchange_every_token(results):
    result = results["prefill-decode"]
    assert not wrong(result["tokens"], results["plain"]["tokens"])
    assert len(result["tokens"]) == 32
    assert result["external_tokens"] == result["prompt_tokens"]
    assert result["left_behind"] == {}


def test_unequal_nodes_give_what_their_template_promises_and_more_than_any_chain(results):
    pace, chain = results["pace"], results["chain"]
    assert pace["measured_tokens_per_s"] >= 0.85 * pace["predicted_tokens_per_s"]
    assert pace["measured_tokens_per_s"] >= 1.3 * pace["chain_predicted_tokens_per_s"]
    assert pace["measured_tokens_per_s"] >= 1.3 * chain["measured_tokens_per_s"]
    assert pace["left_behind"] == {}
    # Else the emulated devices are none, or not the same.
    assert pace["measured_tokens_per_s"] <= 1.02 * pace["predicted_tokens_per_s"]
    assert chain["measured_tokens_per_s"] <= 1.02 * pace["chain_predicted_tokens_per_s"]


def test_requests_that_come_at_once_keep_both_stages_busy(results):
    burst = results["decodes-1x2-token"]
    assert burst["measured_tokens_per_s"] >= 0.6 * burst["predicted_tokens_per_s"]  # as one they give half


STAGES_OF_KILLS = ({"a": 2, "b": 1}, {"c": 1, "d": 1, "e": 2})


def share_left(lost: set[str]) -> float:
    """Of the throughput of the weakest stage, which has 3."""
    return min(sum(share for name, share in own.items() if name not in lost) for own in STAGES_OF_KILLS) / 3


def check_kills(rounds: list[Result], oracle: dict[str, list[int]]) -> None:
    *lived, last = rounds
    lost: set[str] = set()
    for turn in lived:
        failed = {name for name, (end, _) in turn["ends"].items() if end == "error"}
        assert turn["error"] is None
        assert set(turn["bound"]) <= failed
        assert not wrong(turn["tokens"], oracle | {"late": turn["tokens"].get("late", [])}, failed)
        assert turn["ends"].keys() - {"late"} == {f"r{number}" for number in range(32)}
        assert all(f"node {turn['victim']} " in reason for end, reason in turn["ends"].values() if end == "error")
        assert turn["failed_s"] < 15.0
        assert turn["left_behind"] == {}
        assert turn["status"]["state"] == "degraded"
        lost.add(turn["victim"])
        assert {name for name, node in turn["status"]["nodes"].items() if node["lost"]} == lost
        assert turn["status"]["weight_frac"] == pytest.approx(share_left(lost))
    assert "has no node left" in last["error"]
    assert last["failed_s"] < 15.0
    assert last["status"]["state"] == "failed"
    assert not wrong(last["tokens"], oracle, set(last["tokens"]))


def test_a_killed_node_fails_its_requests_alone_and_a_stage_without_nodes_fails_the_instance(results):
    rounds = results["kills:1"]["rounds"]
    assert len(rounds) == 4
    check_kills(rounds, results["plain"]["tokens"])


def test_only_members_of_the_fleet_reach_an_engine(results):
    assert results["stranger"]["heard"] == {"none": False, "other": False, "own": True}
    assert results["stranger"]["rows_from"] == ["own"]


def test_parts_bear_lost_nodes_ended_ranks_and_strangers(results):
    assert results["parts"]["wrong"] == {}


def test_a_node_whose_engine_is_gone_ends_itself(results):
    assert results["stranger"]["orphan_exit"] == 3


def test_a_pause_of_the_hubs_clock_loses_nobody_and_a_silent_node_is_lost_in_time(results):
    found = results["silence"]
    assert found["after_jump"] == {}
    assert found["lost"] == {"still": "not heard of for 5 s"}
    assert 4.0 < found["noticed_s"] < 15.0
    assert found["woken_exit"] == 3  # the engine had gone on without it


def test_engine_and_nodes_that_stand_still_together_lose_nothing_and_one_alone_is_lost(results):
    found = results["pause"]
    assert found["stood_still_s"] > 9.0  # else this shows nothing
    assert found["lost"] == {}
    assert not wrong(found["tokens"], results["plain"]["tokens"])
    assert {name for name, (end, _) in found["ends"].items() if end != "error"} == {f"r{n}" for n in range(32)}
    assert found["left_behind"] == {}
    assert found["noticed_s"] < 15.0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("tensor parallel", "tensor-parallel-size"),
        ("speculative", "speculative decoding"),
        ("lora", "LoRA"),
        ("connector", "KV connector"),
        ("layers", "the model has 8"),
        ("no layout", "coral_stages"),
        ("network", "key_file"),
    ],
)
def test_what_would_not_be_served_rightly_is_refused_at_start(results, options, word):
    assert word in results["refusals"]["said"][options]


def test_the_parts_of_vllm_that_the_runtime_is_built_on_are_those_it_was_written_for(results):
    found = results["internals"]
    assert found["vllm"] == "0.32.0"
    changed = [name for name, digest in found["digests"].items() if INTERNALS.get(name) != digest]
    assert not changed, f"vLLM changed {changed}: read them, adapt stage_*.py, then record {found['digests']}"
    assert found["digests"].keys() == INTERNALS.keys()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_fifty_kills_at_random_moments_leave_nothing_behind(engine_python, tiny_model, tmp_path):
    first = int(time.time())
    scenarios = ("plain", *(f"kills:{first + number}" for number in range(13)))
    found = drive(engine_python, tiny_model, tmp_path, scenarios, limit_s=3500.0)
    killed = 0
    for name in scenarios[1:]:
        check_kills(found[name]["rounds"], found["plain"]["tokens"])
        killed += len(found[name]["rounds"])
    assert killed >= 50


@pytest.mark.nightly
def test_a_node_of_two_ranks_beside_one_of_a_single_rank(engine_python, tiny_model, tmp_path):
    found = drive(engine_python, tiny_model, tmp_path, ("plain", "two-gpus"), limit_s=800.0)
    oracle = {name: own for name, own in found["plain"]["tokens"].items() if name in found["two-gpus"]["tokens"]}
    assert not wrong(found["two-gpus"]["tokens"], oracle)
    assert len(oracle) == 32
    assert found["two-gpus"]["left_behind"] == {}
