"""Runs the stage runtime with real vLLM, in the engine's environment: `python stage_driver.py MODEL FIRST_PORT SCENARIO...`, a JSON line each.

vLLM is imported once; every scenario is a fork of that, its nodes are forks again, and all of them end with it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import queue
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60",
}
os.environ.update(ENVIRONMENT)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402 - after the environment that it reads

torch.set_num_threads(1)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402

# What nodes would import, once for all of them.
for _module in ("model_executor.models.qwen3", "v1.worker.cpu_model_runner", "v1.worker.cpu_worker", "v1.engine.core"):
    importlib.import_module(f"vllm.{_module}")

from coral_core.engine.plugin import stage_executor, stage_node  # noqa: E402
from coral_core.engine.plugin.stage_rank import end_with_parent  # noqa: E402
from coral_core.engine.plugin.stage_wire import Hub, Link, Wire, keys_for  # noqa: E402

BLOCK_TOKENS = 32
LAYER_BLOCK_BYTES = 2 * 2 * 32 * BLOCK_TOKENS * 4
REQUESTS = 32
INTERNALS = (
    "vllm.v1.engine.core:EngineCore.__init__",
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
    "vllm.v1.engine.core:EngineCore.step",
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
    "vllm.v1.executor.abstract:Executor",
    "vllm.config.vllm:VllmConfig.max_concurrent_batches",
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.core.sched.output:NewRequestData",
    "vllm.v1.core.sched.output:CachedRequestData",
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
    "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request",
    "vllm.v1.core.sched.scheduler:Scheduler._request_blocks_can_be_freed",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks",
    "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.pop_blocks_for_free",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
    "vllm.v1.core.block_pool:BlockPool.free_blocks",
    "vllm.v1.core.kv_cache_utils:get_kv_cache_configs",
    "vllm.v1.outputs:ModelRunnerOutput",
    "vllm.v1.worker.worker_base:WorkerWrapperBase",
    "vllm.v1.worker.gpu_worker:init_worker_distributed_environment",
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sync_and_gather_intermediate_tensors",
    "vllm.distributed.parallel_state:GroupCoordinator.is_first_rank",
    "vllm.distributed.parallel_state:GroupCoordinator.is_last_rank",
    "vllm.distributed.parallel_state:ensure_model_parallel_initialized",
    "vllm.distributed.utils:get_pp_indices",
)

Stages = list[tuple[int, dict[str, float]]]
LAYOUTS: dict[str, Stages] = {
    "1x2": [(4, {"a": 1}), (4, {"b": 1})],
    "2-1": [(5, {"a": 1, "b": 2}), (3, {"c": 1})],
    "2-3": [(4, {"a": 2, "b": 1}), (4, {"c": 1, "d": 1, "e": 2})],
    "1-2-1": [(2, {"a": 1}), (5, {"b": 1, "c": 2}), (1, {"d": 1})],
    "uneven": [(1, {"a": 1}), (7, {"b": 3, "c": 2})],
}


class Engine:
    """vLLM in this process, over nodes of its own if there are stages; steps are taken one by one."""

    def __init__(self, model: str, port: int, stages: Stages | None = None, **options: Any) -> None:
        self.pids: dict[str, int] = {}
        nodes: dict[str, dict[str, Any]] = options.pop("nodes", {})
        others: dict[str, Any] = {}
        if stages is not None:
            layout = {
                "stages": [
                    {
                        "layers": layers,
                        "nodes": [
                            {"name": name, "throughput": weight, **nodes.get(name, {})} for name, weight in own.items()
                        ],
                    }
                    for layers, own in stages
                ],
                "listen": f"127.0.0.1:{port}",
                **options.pop("layout", {}),
            }
            for name in () if options.pop("no_nodes", False) else [name for _, own in stages for name in own]:
                self.pids[name] = fork_node(name, str(layout["listen"]), layout.get("key_file"))
            others = {
                "distributed_executor_backend": stage_executor.StageExecutor,
                "additional_config": {"coral_stages": layout},
            }
        blocks = options.pop("blocks_of_8_layers", 1000)
        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": blocks * 8 * LAYER_BLOCK_BYTES,
            "disable_log_stats": False,
            "enable_prefix_caching": False,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 64,
        }
        self.llm = LLM(model=model, **{**settings, **others, **options})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[str | None, Any]] = {}
        self.offers: dict[str, dict[str, Any]] = {}
        self.prompt_logprobs: dict[str, list[Any]] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def steps(self) -> Iterator[int]:
        """Until all requests have ended; the number of the step."""
        number = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.prompt_logprobs[output.request_id] = [
                        None if at is None else {token: round(one.logprob, 3) for token, one in at.items()}
                        for at in output.prompt_logprobs or ()
                    ]
                    self.offers[output.request_id] = output.kv_transfer_params or {}
                    self.ends[output.request_id] = (output.outputs[0].finish_reason, output.outputs[0].stop_reason)
            number += 1
            yield number

    def run(self) -> None:
        for _ in self.steps():
            pass
        self.settle()

    def settle(self) -> None:
        """Let the nodes hear of the last requests' end."""
        for _ in range(3):
            self.core.step_fn()

    def metric(self, name: str) -> float:
        return float(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def left_behind(self) -> dict[str, float]:
        """KV blocks still held, by the scheduler and by each node; what is not 0."""
        held = {"scheduler": self.core.scheduler.get_kv_cache_usage(), **self.core.model_executor.blocks_in_use()}
        return {where: count for where, count in held.items() if count}


def fork_node(name: str, engine: str, key_file: str | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with_parent()
        stage_node.main(["--name", name, "--engine", engine, *(["--key-file", key_file] if key_file else [])])
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's code
        traceback.print_exc()
    os._exit(0)


def prompt_of(number: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(5, 1000) for _ in range(dice.randrange(5, 150))]


def params_of(number: int) -> SamplingParams:
    """Greedy, save a few that show what else must come out the same."""
    dice = random.Random(1000 + number)
    params = SamplingParams(temperature=0.0, max_tokens=dice.randrange(4, 60), ignore_eos=True)
    match number % 16:
        case 3:
            params.repetition_penalty = 1.3
        case 7:
            params.presence_penalty, params.stop_token_ids = 0.7, [11, 12, 13]
        case 11:
            params.logprobs = 2
    return params


def special(number: int) -> SamplingParams:
    """What else goes along with a request."""
    params = SamplingParams(temperature=0.0, max_tokens=16)
    if number % 2:
        params.prompt_logprobs = 1
    else:
        params.structured_outputs = StructuredOutputsParams(regex="[0-9]{3}-[a-f]{4}")
    return params


def add_special(engine: Engine) -> None:
    for number in range(8):
        engine.add(f"s{number}", prompt_of(200 + number), special(number))


def add_all(engine: Engine, count: int = REQUESTS) -> None:
    for number in range(count):
        engine.add(f"r{number}", prompt_of(number), params_of(number))


def plain(model: str, port: int) -> dict[str, Any]:
    """What a single engine says."""
    engine = Engine(model, port)
    add_all(engine, 2 * REQUESTS)
    add_special(engine)
    engine.run()
    return {"tokens": engine.tokens, "prompt_logprobs": engine.prompt_logprobs}


def layout(name: str) -> Callable[[str, int], dict[str, Any]]:
    """A layout under load, short of blocks, some requests aborted: tokens, preemptions, blocks left behind."""

    def scenario(model: str, port: int) -> dict[str, Any]:
        engine = Engine(model, port, LAYOUTS[name], blocks_of_8_layers=17, layout={"silence_s": 15.0})
        add_all(engine)
        if name == "1-2-1":
            add_special(engine)
        aborted = ["r2", "r9", "r20", "r31"]
        for number in engine.steps():
            if number in {3, 12, 25, 40}:
                engine.engine.abort_request([aborted[{3: 0, 12: 1, 25: 2, 40: 3}[number]]])
        engine.settle()
        return {
            "tokens": engine.tokens,
            "aborted": [request for request in aborted if request not in engine.ends],
            "prompt_logprobs": engine.prompt_logprobs,
            "preemptions": engine.metric("vllm:num_preemptions"),
            "left_behind": engine.left_behind(),
            "hops": engine.core.model_executor.hops(),
            "blocks": engine.core.model_executor._pipeline.pools.blocks,
        }

    return scenario


def kills(model: str, port: int, seed: int = 0) -> dict[str, Any]:
    """Nodes of a (2,3) layout are killed one after another under load until a stage has none left."""
    dice = random.Random(seed)
    stages = LAYOUTS["2-3"]
    status = Path(os.environ["STAGE_DRIVER_FOLDER"]) / f"status-{port}.json"
    engine = Engine(model, port, stages, blocks_of_8_layers=40, layout={"silence_s": 15.0, "status_file": str(status)})
    pipeline = engine.core.model_executor._pipeline
    left = [set(own) for _, own in stages]
    rounds: list[dict[str, Any]] = []
    while all(left):
        victim = dice.choice(sorted(set().union(*left)))
        # The instance is to live on as long as it can: a stage's last node dies when nothing else is left.
        while any(own == {victim} for own in left) and any(len(own) > 1 for own in left):
            victim = dice.choice(sorted(set().union(*left)))
        left = [own - {victim} for own in left]
        at = dice.randrange(1, 40)
        engine.tokens, engine.ends = {}, {}
        add_all(engine)
        killed_at, error, bound, failed_s = 0.0, None, set(), 0.0
        try:
            for number in engine.steps():
                if number >= at and not killed_at:
                    bound = {
                        r for r, path in pipeline.bindings.paths.items() if victim in path and r in pipeline._known
                    }
                    bound -= {r for r in bound if r.rsplit("-", 1)[0] in engine.ends}
                    os.kill(engine.pids[victim], signal.SIGKILL)
                    killed_at = time.monotonic()
                if killed_at and not failed_s and any(end == "error" for end, _ in engine.ends.values()):
                    failed_s = time.monotonic() - killed_at
            if not killed_at:
                os.kill(engine.pids[victim], signal.SIGKILL)
                killed_at = time.monotonic()
                engine.add("late", prompt_of(99), params_of(99))
                engine.run()
            engine.settle()
        except Exception as failure:  # noqa: BLE001 - what it says is the result
            error = f"{type(failure).__name__}: {failure}"
            failed_s = time.monotonic() - killed_at
        time.sleep(1.0)  # the hub writes the status when it notices
        rounds.append(
            {
                "victim": victim,
                "at": at,
                "tokens": engine.tokens,
                "ends": engine.ends,
                "bound": sorted(request.rsplit("-", 1)[0] for request in bound),
                "error": error,
                "failed_s": failed_s,
                "left_behind": engine.left_behind() if error is None else {},
                "status": json.loads(status.read_text()),
            }
        )
    return {"rounds": rounds}


def prefill_decode(model: str, port: int) -> dict[str, Any]:
    """Prefill in (2,1) stages, decode in (1,2,1) of another split: every KV cache goes from the nodes of one path to those of another."""
    key_file = Path(os.environ["STAGE_DRIVER_FOLDER"]) / "fleet.key"
    key_file.write_text("0123456789abcdef" * 4)
    extra = {"key_file": str(key_file), "host": "127.0.0.1"}

    def engine(port: int, stages: Stages, role: str) -> Engine:
        config = KVTransferConfig(
            kv_connector="CoralKVConnector",
            kv_connector_module_path="coral_core.engine.plugin.kv_connector",
            kv_role=role,
            kv_connector_extra_config=extra,
            kv_load_failure_policy="fail",
        )
        layout = {"key_file": str(key_file), "silence_s": 15.0}
        return Engine(model, port, stages, kv_transfer_config=config, layout=layout)

    decode_stages: Stages = [(2, {"u": 1}), (5, {"v": 1, "w": 2}), (1, {"x": 1})]
    prefill = engine(port, LAYOUTS["2-1"], "kv_producer")
    decode = engine(port + 100, decode_stages, "kv_consumer")
    for number in range(REQUESTS):
        params = params_of(number)
        params.max_tokens = 1
        params.extra_args = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        prefill.add(f"r{number}", prompt_of(number), params)
    for _ in prefill.steps():
        pass
    for number in range(REQUESTS):
        params = params_of(number)
        params.extra_args = {"kv_transfer_params": prefill.offers[f"r{number}"]}
        decode.add(f"r{number}", prompt_of(number), params)
    for _ in decode.steps():
        if prefill.core.scheduler.has_requests():
            prefill.core.step_fn()
    until = time.monotonic() + 10.0
    while prefill.core.scheduler.has_requests() and time.monotonic() < until:
        prefill.core.step_fn()
    decode.settle()
    return {
        "tokens": decode.tokens,
        "aborted": [],
        "preemptions": 0,
        "external_tokens": decode.metric("vllm:external_prefix_cache_hits"),
        "prompt_tokens": sum(len(prompt_of(number)) for number in range(REQUESTS)),
        "left_behind": {**{f"p.{k}": v for k, v in prefill.left_behind().items()}, **decode.left_behind()},
        "hops": decode.core.model_executor.hops(),
        "blocks": decode.core.model_executor._pipeline.pools.blocks,
    }


LAYER_MS = {"a": 20.0, "b": 40.0, "c": 40.0, "d": 40.0, "e": 40.0}
BATCH = 4
PACE_STAGES: Stages = [(4, {"a": 2, "b": 1}), (4, {"c": 1, "d": 1, "e": 1})]


def pace(model: str, port: int) -> dict[str, Any]:
    """Tokens/s of unequal nodes: each takes so long per step and layer, whatever the step holds, up to BATCH requests."""
    delays = {name: layers * LAYER_MS[name] for layers, own in PACE_STAGES for name in own}
    os.environ["CORAL_NODE_DELAY_MS"] = ",".join(f"{name}={delay}" for name, delay in delays.items())
    nodes = {name: {"max_num_seqs": BATCH} for name in delays}
    engine = Engine(model, port, PACE_STAGES, nodes=nodes, layout={"silence_s": 15.0})
    requests, each = 64, 24
    for number in range(requests):
        params = SamplingParams(temperature=0.0, max_tokens=each, ignore_eos=True)
        engine.add(f"r{number}", prompt_of(number)[:8], params)
    samples = [(time.monotonic(), 0)]
    samples += ((time.monotonic(), sum(map(len, engine.tokens.values()))) for _ in engine.steps())
    engine.settle()
    whole = requests * each
    steady = [sample for sample in samples if 0.2 * whole <= sample[1] <= 0.8 * whole]
    (began, before), (ended, after) = steady[0], steady[-1]
    return {
        "measured_tokens_per_s": (after - before) / (ended - began),
        "predicted_tokens_per_s": 1000 * min(sum(BATCH / delays[name] for name in own) for _, own in PACE_STAGES),
        "chain_tokens_per_s": 1000 * BATCH / best_chain_ms(list(LAYER_MS.values()), 8),
        "overall_tokens_per_s": whole / (samples[-1][0] - samples[0][0]),
        "left_behind": engine.left_behind(),
    }


def best_chain_ms(layer_ms: list[float], layers: int) -> float:
    """The time per step of the slowest stage of the best chain, one node per stage, any of the nodes, any whole split."""
    times = sorted({count * cost for cost in layer_ms for count in range(1, layers + 1)})
    return next(time_ms for time_ms in times if sum(int(time_ms // cost) for cost in layer_ms) >= layers)


def two_gpus(model: str, port: int) -> dict[str, Any]:
    """A stage of a node with tensor parallelism over two ranks beside one with a single rank."""
    engine = Engine(model, port, LAYOUTS["2-1"], nodes={"b": {"tp": 2}}, layout={"silence_s": 30.0})
    add_all(engine)
    engine.run()
    return {"tokens": engine.tokens, "aborted": [], "preemptions": 0, "left_behind": engine.left_behind()}


def refusals(model: str, port: int) -> dict[str, Any]:
    """What the executor says to options that it would not serve rightly."""
    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    kv = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    one = {"layers": 4, "nodes": [{"name": "a", "local": True}]}
    said: dict[str, str] = {}
    cases: dict[str, dict[str, Any]] = {
        "tensor parallel": {"tensor_parallel_size": 2},
        "speculative": {"speculative_config": draft},
        "lora": {"enable_lora": True},
        "connector": {"kv_transfer_config": kv},
        "layers": {"additional_config": {"coral_stages": {"stages": [one]}}},
        "no layout": {"additional_config": {}},
        "network": {
            "additional_config": {
                "coral_stages": {"stages": [one, {**one, "nodes": [{"name": "b"}]}], "listen": "192.0.2.1:80"}
            }
        },
    }
    for name, options in cases.items():
        try:
            Engine(model, port, LAYOUTS["1x2"], no_nodes=True, **options)
            said[name] = ""
        except Exception as error:  # noqa: BLE001 - what it says is the result
            said[name] = str(error)
    return {"said": said}


def stranger(model: str, port: int) -> dict[str, Any]:
    """A hub with the fleet's key hears members, and nobody with another key or none."""
    folder = Path(os.environ["STAGE_DRIVER_FOLDER"])
    heard: dict[str, bool] = {}
    own = folder / "own.key"
    own.write_text("0" * 64)
    other = folder / "other.key"
    other.write_text("1" * 64)
    hub = Hub(
        host="127.0.0.1",
        port=port,
        keys=keys_for("127.0.0.1", str(own)),
        nodes=["none", "other", "own"],
        silence_s=60.0,
        on_lost=lambda *_: None,
    )
    for name, key_file in {"none": None, "other": str(other), "own": str(own)}.items():
        link = Link(wire=Wire(keys_for("127.0.0.1", key_file)), address=f"tcp://127.0.0.1:{port}", name=name)
        link.send("hello", {})
        try:
            heard[name] = hub.events.get(timeout=3.0)[0] == name
        except queue.Empty:
            heard[name] = False
    return {"heard": heard}


def internals(model: str, port: int) -> dict[str, Any]:
    """Digests of the parts of vLLM that the runtime is built on."""
    return {
        "vllm": importlib.import_module("vllm.version").__version__,
        "digests": {name: digest(name) for name in INTERNALS},
    }


def digest(name: str) -> str:
    module, _, path = name.partition(":")
    thing: Any = importlib.import_module(module)
    for part in path.split("."):
        thing = inspect.getattr_static(thing, part)
    thing = inspect.unwrap(getattr(thing, "fget", None) or thing)
    return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()[:12]


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": plain,
    **{name: layout(name) for name in LAYOUTS},
    "kills": kills,
    "pace": pace,
    "prefill-decode": prefill_decode,
    "two-gpus": two_gpus,
    "refusals": refusals,
    "stranger": stranger,
    "internals": internals,
}


def main() -> None:
    model, port, *names = sys.argv[1:]
    base = int(port)
    results = os.fdopen(os.dup(1), "w")  # vLLM logs to the standard output
    os.dup2(2, 1)
    for number, name in enumerate(names):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        end_with_parent()
        began = time.monotonic()
        try:
            signal.alarm(240)
            which, _, seed = name.partition(":")
            result = SCENARIOS[which](model, base + number, *([int(seed)] if seed else []))
        except BaseException:  # noqa: BLE001 - the parent goes on with the next scenario
            result = {"failed": traceback.format_exc()}
        wall_s, cores = time.monotonic() - began, os.times()
        print(
            json.dumps({"scenario": name, "wall_s": wall_s, "user_s": cores.user, **result}), file=results, flush=True
        )
        os._exit(0)


if __name__ == "__main__":
    main()
