"""KV transfer between real engines on the CPU: pipelines of any split and block size, and every failure on the way.

A plain engine is the oracle: in float32, greedily, the tokens must be equal.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kv_engine_process import PRODUCE, Engine, engines, transfer_config

# Six engines with seven workers start for the first test that asks for them.
pytestmark = pytest.mark.timeout(900)

LEASE_S = STALL_S = 60.0  # on two busy cores a worker may be slow to say its first word
OUTPUT_TOKENS = 12
_rounds = itertools.count()

SLOWLY = "__import__('time').sleep(0.05)"
SERVER = "__import__('sys').modules['coral_core.engine.plugin.kv_server']"


@pytest.fixture(scope="module")
def fleet(
    engine_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Engine]]:
    """Engines by name; `plain` is the oracle, and fetches and gives too."""
    folder = tmp_path_factory.mktemp("kv")
    key_file = folder / "kv.key"
    key_file.write_text("the fleet's own secret, of this test run only")

    def engine(role: str, block_size: int, terms: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
        transfer = transfer_config(role, key_file=str(key_file), lease_s=LEASE_S, stall_s=STALL_S, **(terms or {}))
        return {"model": str(tiny_model), "kv_transfer_config": transfer, "block_size": block_size, **arguments}

    specs = {
        "plain": engine("kv_both", 32),
        "two": engine("kv_both", 64, layers=(6, 2)),
        "wide": engine("kv_both", 96, ranks=2),
        "three": engine("kv_consumer", 32, {"chunk_bytes": 1 << 14, "window_bytes": 1 << 18}, layers=(2, 3, 3)),
        # So small that most of 32 requests wait for blocks.
        "tight": engine("kv_consumer", 128, kv_cache_memory_bytes=16 << 20),
        "mortal": engine("kv_both", 64),
    }
    with engines(engine_python, folder, specs) as started:
        yield started


def prompts_of(seed: int, count: int = 32, longest: int = 600) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(10, 1000) for _ in range(numbers.randrange(3, longest))] for _ in range(count)]


def name_of() -> str:
    return f"r{next(_rounds)}n"


def plainly(fleet: dict[str, Engine], prompts: list[list[int]]) -> list[list[int]]:
    return [one["tokens"] for one in fleet["plain"].run(name_of(), prompts, [None] * len(prompts), OUTPUT_TOKENS)]


def offers(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    return [one["params"] for one in engine.run(name_of(), prompts, [PRODUCE] * len(prompts), 1)]


@pytest.mark.parametrize(
    ("there", "here", "workers"),
    [
        ("plain", "three", 3),
        ("two", "three", 3),
        ("two", "plain", 1),
        ("two", "tight", 1),
        ("plain", "two", 2),
        ("wide", "three", 3),
        ("two", "wide", 2),
    ],
)
def test_tokens_equal_a_plain_engine_s_whatever_the_splits_and_block_sizes(fleet, there, here, workers):
    prompts = prompts_of(hash_of(there + here))
    right = plainly(fleet, prompts)
    before = fleet[here].fetches()
    params = offers(fleet[there], prompts)
    answers = fleet[here].run(name_of(), prompts, params, OUTPUT_TOKENS)
    assert [one["tokens"] for one in answers] == right
    fetched, failed = fleet[here].fetches()
    assert (fetched - before[0], failed - before[1]) == (workers * len(prompts), 0)
    assert series(fleet[here]) == (fetched, failed)
    fleet[here].drained(15.0)
    fleet[there].drained(15.0)  # all said that they are done: no lease had to run out


def series(engine: Engine) -> tuple[float, ...]:
    """What its `/metrics` would say of fetches that arrived and that failed."""
    code = (
        "sum(one.value for metric in __import__('prometheus_client').REGISTRY.collect() for one in metric.samples "
        "if one.name == 'vllm:coral_kv_fetches{}_total')"
    )
    return tuple(engine.evaluate(code.format(kind)) for kind in ("", "_failed"))


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(text)) % 10_000


def test_what_is_cached_here_is_not_fetched(fleet):
    prompts = prompts_of(7, count=4)
    right = plainly(fleet, prompts)
    for _ in range(2):
        before = fleet["tight"].fetches()
        answers = fleet["tight"].run(name_of(), prompts, offers(fleet["two"], prompts), OUTPUT_TOKENS)
        assert [one["tokens"] for one in answers] == right
        assert fleet["tight"].fetches()[1] == before[1]
        fleet["two"].drained(15.0)


@pytest.mark.parametrize("name", ["plain", "two"])
def test_what_nobody_fetches_is_freed_when_its_lease_is_over(fleet, name):
    with leasing(fleet[name], 3.0):
        offers(fleet[name], prompts_of(8, count=6))
        assert fleet[name].evaluate("driver.scheduler.kv_cache_manager.usage") > 0
        fleet[name].drained(15.0)


def test_a_request_that_waits_for_its_turn_keeps_its_lease(fleet):
    ahead, prompts = prompts_of(14, count=4), prompts_of(15, count=4)
    right = plainly(fleet, prompts)
    tight = fleet["tight"]
    before = tight.fetches()
    lease_s = 4.0
    with leasing(fleet["plain"], lease_s), ExitStack() as stack:
        params = offers(fleet["plain"], prompts)
        tight.evaluate("setattr(driver.scheduler, 'max_num_active_reqs', 1)")
        stack.callback(
            tight.evaluate, "setattr(driver.scheduler, 'max_num_active_reqs', driver.scheduler.max_num_running_reqs)"
        )
        tight.start(name_of(), ahead, [None] * len(ahead), 900)
        name = name_of()
        tight.start(
            name, prompts, [{**one, "coral": {**one["coral"], "lease_s": lease_s}} for one in params], OUTPUT_TOKENS
        )
        answers = tight.collect(name, len(prompts))
        assert tight.took_s > 1.5 * lease_s  # else this shows nothing
    assert [one["tokens"] for one in answers] == right
    assert tight.fetches() == (before[0] + len(prompts), before[1])
    fleet["plain"].drained(15.0)


def test_an_aborted_request_stops_its_fetch_and_frees_both_ends(fleet):
    prompts = prompts_of(9, count=6)
    with slow(fleet["plain"]):
        params = offers(fleet["plain"], prompts)
        name = name_of()
        fleet["three"].evaluate("driver.scheduler.reset_prefix_cache()")
        fleet["three"].start(name, prompts, params, OUTPUT_TOKENS)
        fleet["three"].do("collect", within_s=0.3)
        fleet["three"].do("abort", ids=[f"{name}{number}" for number in range(len(prompts))])
        fleet["three"].drained(15.0)
        fleet["plain"].drained(15.0)
    prompts = prompts[:2]
    assert [
        one["tokens"] for one in fleet["three"].run(name_of(), prompts, offers(fleet["plain"], prompts), OUTPUT_TOKENS)
    ] == plainly(fleet, prompts)


def leasing(engine: Engine, lease_s: float) -> ExitStack:
    """This engine's leases are as short as that, meanwhile."""
    code = (
        "driver.engine.collective_rpc(lambda worker: setattr(__import__('vllm.distributed.kv_transfer', fromlist=['x'])"
        ".get_kv_transfer_group()._leases, '_lease_s', {}))"
    )
    engine.evaluate(code.format(lease_s))
    stack = ExitStack()
    stack.callback(engine.evaluate, code.format(LEASE_S))
    return stack


def slow(engine: Engine) -> ExitStack:
    """Each chunk that this engine gives takes 50 ms."""
    server = "__import__('vllm.distributed.kv_transfer', fromlist=['x']).get_kv_transfer_group()._server"
    engine.evaluate(f"setattr({server}, '_quick', {server}._read)")
    engine.evaluate(f"setattr({server}, '_read', lambda *it: ({SLOWLY}, {server}._quick(*it))[1])")
    stack = ExitStack()
    stack.callback(engine.evaluate, f"setattr({server}, '_read', {server}._quick)")
    return stack


def test_a_stage_that_waits_for_another_leaves_the_processor_alone(fleet):
    used = "driver.engine.collective_rpc(lambda worker: __import__('time').process_time())"
    asleep = "driver.engine.collective_rpc(lambda worker: setattr(worker.model_runner, '_model_forward', {}))"
    slept = "lambda *given, runner=worker.model_runner, **named: (__import__('time').sleep(0.3), type(runner)._model_forward(runner, *given, **named))[1]"
    two = fleet["two"]
    with ExitStack() as stack:
        two.evaluate(asleep.format(slept))
        stack.callback(
            two.evaluate, "driver.engine.collective_rpc(lambda worker: delattr(worker.model_runner, '_model_forward'))"
        )
        before = two.evaluate(used)
        two.run(name_of(), prompts_of(17, count=1), [None], OUTPUT_TOKENS)
        after = two.evaluate(used)
    # Each of the two stages sleeps while the other does: a wait that spins would take 0.3 s of processor time a step.
    assert max(end - start for start, end in zip(before, after, strict=True)) < 0.3 * 0.3 * OUTPUT_TOKENS
    assert two.took_s > 2 * 0.3 * OUTPUT_TOKENS


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_corrupted_chunk_is_dealt_with_as_the_policy_says(fleet, policy):
    prompts = prompts_of(10, count=8)
    right = plainly(fleet, prompts)
    tight = fleet["tight"]
    tight.evaluate("driver.scheduler.reset_prefix_cache()")
    before = tight.fetches()
    with ExitStack() as stack:
        fleet["plain"].evaluate(f"setattr({SERVER}, 'checksum', lambda *it: 0)")
        stack.callback(
            fleet["plain"].evaluate,
            f"setattr({SERVER}, 'checksum', __import__('coral_core.engine.plugin.kv_frames', fromlist=['x']).checksum)",
        )
        tight.evaluate(f"setattr(driver.scheduler, 'recompute_kv_load_failures', {policy == 'recompute'})")
        stack.callback(tight.evaluate, "setattr(driver.scheduler, 'recompute_kv_load_failures', True)")
        answers = tight.run(name_of(), prompts, offers(fleet["plain"], prompts), OUTPUT_TOKENS)
    assert series(tight) == tight.fetches() == (before[0], before[1] + len(prompts))
    if policy == "recompute":
        assert [one["tokens"] for one in answers] == right
    else:
        assert {(one["reason"], len(one["tokens"])) for one in answers} == {("error", 0)}
    tight.drained(15.0)
    fleet["plain"].drained(15.0)


def test_an_offer_for_another_prompt_or_from_nowhere_is_not_believed(fleet):
    prompts = prompts_of(11, count=3)
    right = plainly(fleet, prompts)
    params = offers(fleet["two"], prompts_of(12, count=1))[0]
    gone = {**params, "coral": {**params["coral"], "lease": "another engine/1"}}
    before = fleet["three"].fetches()
    fleet["three"].evaluate("driver.scheduler.reset_prefix_cache()")
    answers = fleet["three"].run(
        name_of(), prompts, [params, {"do_remote_prefill": True, "coral": 3}, gone], OUTPUT_TOKENS
    )
    assert [one["tokens"] for one in answers] == right
    assert fleet["three"].fetches()[1] > before[1]


def test_engines_that_die_midway_cost_no_token_and_no_block(fleet):
    """One engine gives to others and takes from others, both slowly, and is killed."""
    prompts = prompts_of(13, count=6)
    right = plainly(fleet, prompts)
    mortal = fleet["mortal"]
    given = offers(mortal, prompts)
    fleet["tight"].evaluate("driver.scheduler.reset_prefix_cache()")
    before = fleet["tight"].fetches()
    name = name_of()
    with leasing(fleet["plain"], 8.0), slow(fleet["plain"]):
        taken = offers(fleet["plain"], prompts)
        slow(mortal)
        mortal.start(name_of(), prompts, taken, OUTPUT_TOKENS)
        fleet["tight"].start(name, prompts, given, OUTPUT_TOKENS)
        mortal.do("collect", within_s=0.2)
        mortal.kill()
        answers = fleet["tight"].collect(name, len(prompts))
        assert fleet["tight"].took_s < STALL_S / 2  # it did not wait for that
        fleet["plain"].drained(30.0)
    assert [one["tokens"] for one in answers] == right
    assert fleet["tight"].fetches()[1] > before[1]
    fleet["tight"].drained(15.0)


def test_what_the_connector_relies_on_in_vllm_is_as_it_was(fleet):
    """Names and parameters; the rest of this file shows that they still do what they did."""
    inspect = "__import__('inspect')"
    base = "__import__('vllm.distributed.kv_transfer.kv_connector.v1.base', fromlist=['x'])"
    ours = "__import__('coral_core.engine.plugin.kv_connector', fromlist=['x']).CoralKVConnector"
    tight = fleet["tight"]
    assert tight.evaluate("__import__('vllm').__version__").startswith("0.32.")
    named = tight.evaluate(
        f"[(name, list({inspect}.signature(getattr({base}.KVConnectorBase_V1, name)).parameters), "
        f"list({inspect}.signature(getattr({ours}, name)).parameters)) for half in {ours}.__bases__ for name in vars(half) "
        f"if callable(getattr(half, name)) and name in vars({base}.KVConnectorBase_V1) and not name.startswith('__')]"
    )
    expected = {
        "bind_connector_metadata": ["self", "connector_metadata"],
        "build_connector_meta": ["self", "scheduler_output"],
        "get_handshake_metadata": ["self"],
        "get_kv_connector_stats": ["self"],
        "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
        "get_transfer_results": ["self", "finished_req_ids"],
        "on_new_request": ["self", "request"],
        "register_kv_caches": ["self", "kv_caches"],
        "request_finished": ["self", "request", "block_ids"],
        "save_kv_layer": ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"],
        "set_xfer_handshake_metadata_pp_aware": ["self", "metadata"],
        "shutdown": ["self"],
        "start_load_kv": ["self", "forward_context", "kwargs"],
        "update_connector_output": ["self", "connector_output"],
        "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
        "wait_for_layer_load": ["self", "layer_name"],
        "wait_for_save": ["self"],
    }
    assert {name: theirs for name, theirs, _ in named} == expected
    assert {name: mine for name, _, mine in named} == expected
    known = {
        "vllm._custom_ops:cpu_attn_reshape_and_cache": [
            "key",
            "value",
            "key_cache",
            "value_cache",
            "slot_mapping",
            "isa",
            "k_scale",
            "v_scale",
            "kv_cache_dtype",
        ],
        "vllm.model_executor.models.utils:extract_layer_index": ["layer_name", "num_attn_module"],
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": ["self", "allow_none", "group_ids"],
        "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": ["self", "request"],
        "vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving": ["self", "failed_req_ids"],
        "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": ["self", "kv_connector_output"],
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_kv_connector_stats": ["data"],
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_prom_metrics": [
            "vllm_config",
            "metric_types",
            "labelnames",
            "per_engine_labelvalues",
        ],
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics.observe": [
            "self",
            "transfer_stats_data",
            "engine_idx",
        ],
        "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate": [
            "self",
            "outputs",
            "output_rank",
        ],
    }
    for place, parameters in known.items():
        module, _, attribute = place.partition(":")
        thing = f"__import__('operator').attrgetter('{attribute}')(__import__('{module}', fromlist=['x']))"
        assert tight.evaluate(f"list({inspect}.signature({thing}).parameters)") == parameters, place
