"""Pipelines with several nodes per stage, on real vLLM: what one plain engine says is what they must say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LAYOUTS = ("1x2", "2-1", "2-3", "1-2-1", "uneven")
SCENARIOS = ("internals", "stranger", "refusals", "plain", *LAYOUTS, "prefill-decode", "kills:1", "pace")

INTERNALS = {
    "vllm.v1.engine.core:EngineCore.__init__": "a828c07af25a",
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches": "47b605622969",
    "vllm.v1.engine.core:EngineCore.step": "a02d17986fb7",
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue": "a905a2e1c445",
    "vllm.v1.executor.abstract:Executor": "bfc8a1dd0f62",
    "vllm.config.vllm:VllmConfig.max_concurrent_batches": "134b00e18e9f",
    "vllm.v1.core.sched.output:SchedulerOutput": "97fb4463a2ed",
    "vllm.v1.core.sched.output:NewRequestData": "aa136aaeddfe",
    "vllm.v1.core.sched.output:CachedRequestData": "b0a215b04012",
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": "c02680245672",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "da4f2cf2fc39",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "85b29db96051",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "4113f5de8a84",
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": "2b527eb8070d",
    "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data": "8aeb1dc3ba93",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "b7a4ef7b8aa5",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": "1b386dca84e6",
    "vllm.v1.core.sched.scheduler:Scheduler._request_blocks_can_be_freed": "d3dd6fc13e67",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks": "f967ef091154",
    "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": "98d49f74d399",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "8c60d937fd9e",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": "6ee26cbc5b6f",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.pop_blocks_for_free": "9d152d7c6b72",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": "c97ea366f52b",
    "vllm.v1.core.block_pool:BlockPool.free_blocks": "f12f94bc787c",
    "vllm.v1.core.kv_cache_utils:get_kv_cache_configs": "6154002c9d69",
    "vllm.v1.outputs:ModelRunnerOutput": "b936f7c6940f",
    "vllm.v1.worker.worker_base:WorkerWrapperBase": "3050ac6f4b4d",
    "vllm.v1.worker.gpu_worker:init_worker_distributed_environment": "b8ecedb6d9f6",
    "vllm.v1.worker.gpu_worker:Worker.execute_model": "782126ba48e7",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": "11721464aeb0",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "326599f31b27",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "e058bf791a29",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "047e6a4738de",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess": "c9dda92faeb3",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sync_and_gather_intermediate_tensors": "ab853c8015d4",
    "vllm.distributed.parallel_state:GroupCoordinator.is_first_rank": "1fa0960b2e7a",
    "vllm.distributed.parallel_state:GroupCoordinator.is_last_rank": "0cedd370b25f",
    "vllm.distributed.parallel_state:ensure_model_parallel_initialized": "b253677203db",
    "vllm.distributed.utils:get_pp_indices": "b019144ef4ec",
}
"""What `stage_driver.internals` finds in vLLM 0.32.0."""

Result = dict[str, Any]


def drive(
    engine_python: Path, tiny_model: Path, folder: Path, scenarios: tuple[str, ...], limit_s: float
) -> dict[str, Result]:
    """The scenarios' results by name; where the driver was ended or died, those that it had."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = min(probe.getsockname()[1], 60000)
    driver = Path(__file__).parents[1] / "fakes/stage_driver.py"
    command = [engine_python, driver, tiny_model, str(port), *scenarios]
    log = folder / "driver.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "STAGE_DRIVER_FOLDER": str(folder)},
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, _ = process.communicate()
    results = {result.pop("scenario"): result for result in map(json.loads, out.splitlines())}
    for name, result in results.items():
        assert "failed" not in result, f"{name}: {result['failed']}\n{log.read_text()[-4000:]}"
    missing = set(scenarios) - results.keys()
    assert not missing, f"no result of {sorted(missing)}\n{log.read_text()[-4000:]}"
    return results


@pytest.fixture(scope="module")
def results(engine_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return drive(engine_python, tiny_model, tmp_path_factory.mktemp("stages"), SCENARIOS, limit_s=840.0)


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
    pace = results["pace"]
    assert pace["measured_tokens_per_s"] >= 0.85 * pace["predicted_tokens_per_s"]
    assert pace["measured_tokens_per_s"] >= 1.3 * pace["chain_tokens_per_s"]
    assert pace["measured_tokens_per_s"] <= 1.02 * pace["predicted_tokens_per_s"]  # else the delays are none
    assert pace["left_behind"] == {}


def check_kills(rounds: list[Result], oracle: dict[str, list[int]]) -> None:
    *lived, last = rounds
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
        assert 0 < turn["status"]["weight_frac"] < 1
        assert turn["status"]["nodes"][turn["victim"]]["lost"]
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
