"""A vLLM executor for pipelines whose stages have several, unequal nodes.

`--distributed-executor-backend coral_core.engine.plugin.stage_executor.StageExecutor`, with the layout in
`--additional-config '{"coral_stages": {...}}'` (see `stage_layout`). Nodes run `stage_node`. Written for vLLM 0.32.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor, FailureCallback
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.version import __version__ as vllm_version

from coral_core.engine.plugin.stage_layout import BlockPools, Layout, LayoutError, StageLostError, layout_of
from coral_core.engine.plugin.stage_pipeline import Outcome, Pipeline, Status
from coral_core.engine.plugin.stage_scheduler import StageScheduler
from coral_core.engine.plugin.stage_steps import PathSteps, grammar_rows
from coral_core.engine.plugin.stage_wire import START_SILENCE_S, Hub, keys_for

logger = init_logger("vllm.coral.stage")
VLLM_SERIES: Final = "0.32."
_END_S: Final = 5.0


class StageExecutor(Executor):
    """Binds requests to nodes, sends them their steps, and gives back what returns. LayoutError for what it cannot run."""

    supports_pp = True

    def _init_executor(self) -> None:
        config = self.vllm_config
        layout = layout_of(config.additional_config)
        _refuse(config, layout)
        self._layout = layout
        self._names = [node.name for node in layout.nodes]
        self._status = Status(layout)
        self._on_failure: FailureCallback | None = None
        self._held: PathSteps | None = None
        host, _, port = layout.listen.rpartition(":")
        self._hub = Hub(
            host=host,
            port=int(port),
            keys=keys_for(host, layout.key_file),
            nodes=self._names,
            silence_s=START_SILENCE_S,
            on_lost=self._note_lost,
        )
        self._pipeline = Pipeline(layout, self._hub, envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        self._pipeline.check = self._look_after_children
        self._children = [self._child(node.name) for node in layout.nodes if node.local]
        try:
            self._start_nodes()
        except BaseException:
            self.shutdown()
            raise
        config.parallel_config.pipeline_parallel_size = len(layout.stages)
        config.cache_config.enable_prefix_caching = False
        config.scheduler_config.scheduler_cls = type("StageScheduler", (StageScheduler,), {"pipeline": self._pipeline})

    def _child(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "coral_core.engine.plugin.stage_node", "--child", "--name", name]
        command += [
            "--engine",
            self._hub.address.removeprefix("tcp://"),
            "--host",
            self._layout.listen.rpartition(":")[0],
        ]
        if self._layout.key_file:
            command += ["--key-file", self._layout.key_file]
        return subprocess.Popen(command)  # noqa: S603 - this interpreter

    def _start_nodes(self) -> None:
        layout, config = self._layout, self.vllm_config
        greetings = self._pipeline.gather(self._names, "its coming", layout.start_s, "hello")
        hellos = dict(zip(self._names, greetings, strict=True))
        for name, hello in hellos.items():
            if hello["vllm"] != vllm_version:
                raise LayoutError(f"node {name} runs vLLM {hello['vllm']}, the engine {vllm_version}: install the same")
        secret = b"" if layout.encrypt or layout.key_file is None else secrets.token_bytes(32)
        for index, node in enumerate(layout.nodes):
            self._hub.send(node.name, "start", config, node, index, layout, secret)
        addresses = dict(zip(self._names, self._pipeline.gather(self._names, "start", layout.start_s), strict=True))
        for number, stage_ahead in enumerate(layout.stages[1:]):
            ahead = {node.name: addresses[node.name] for node in stage_ahead.nodes}
            for node in layout.stages[number].nodes:
                self._hub.send(node.name, "next", ahead)

    def _look_after_children(self) -> None:
        """Raise StageLostError for a child that ended before it came."""
        for child in self._children:
            if (code := child.poll()) is not None:
                raise StageLostError(
                    f"a local node ended with code {code} before the engine was ready: see its log above"
                )

    def _note_lost(self, node: str, reason: str) -> None:
        """Called by the hub's thread, so also while the engine idles."""
        try:
            whole = self._status.lose(node, reason)
        except OSError:
            logger.exception("the status file cannot be written, nobody hears of node %s", node)
            whole = self._status.whole
        if not whole and self._on_failure is not None:
            self._on_failure()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,  # noqa: FBT001, FBT002 - vLLM's own signature
    ) -> Any:  # noqa: ANN401 - as vLLM's own
        """The first rank's result of each node that lives."""
        names = [name for name in self._names if name not in self._pipeline.bindings.lost]
        results = self._pipeline.ask(names, "call", method, args, kwargs or {}, timeout_s=timeout)
        if not non_block:
            return results
        future: Future[list[Any]] = Future()
        future.set_result(results)
        return future

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """One node's for each stage: what differs inside a stage (tensor parallelism) is the nodes' own affair."""
        specs: list[dict[str, KVCacheSpec]] = self._per_stage("get_kv_cache_spec")
        kinds = {type(spec) for stage in specs for spec in stage.values()}
        if any(not issubclass(kind, FullAttentionSpec) for kind in kinds):
            raise LayoutError(f"KV caches of {', '.join(sorted(kind.__name__ for kind in kinds))} are not supported")
        return specs

    def determine_available_memory(self) -> list[int]:
        """One node's for each stage; every node then counts its own."""
        return self._per_stage("determine_available_memory")

    def _per_stage(self, method: str) -> list[Any]:
        return self._pipeline.ask([stage.nodes[0].name for stage in self._layout.stages], "call", method, (), {})

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Every node makes as many blocks as it has room for."""
        blocks = self._pipeline.ask(self._names, "cache", kv_cache_configs[0])
        self._pipeline.pools = BlockPools(dict(zip(self._names, blocks, strict=True)))
        logger.info("KV blocks of the nodes: %s", self._pipeline.pools.blocks)

    def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[Any, ...], KVConnectorHandshakeMetadata]]:
        """By stage, rank inside the node, and node."""
        answers = self._pipeline.ask(self._names, "handshake")
        return [
            {(*worker, name): hello for hellos in answer if hellos for worker, hello in hellos.items()}
            for name, answer in zip(self._names, answers, strict=True)
        ]

    def compile_or_warm_up_model(self) -> None:
        """The last thing before requests come."""
        self._pipeline.ask(self._names, "warm_up")
        self._hub.silence_s = self._layout.silence_s
        self._pipeline.check = None
        self._status.write("ready")

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        non_block: bool = False,  # noqa: FBT001, FBT002 - vLLM's own signature
    ) -> Any:  # noqa: ANN401 - as vLLM's own
        """Steps with tokens are sent by `sample_tokens`, which follows; others now."""
        assert isinstance(scheduler_output, PathSteps)
        if scheduler_output.total_num_scheduled_tokens:
            self._held = scheduler_output
            return _resolved(None) if non_block else None
        self._pipeline.dispatch(scheduler_output.steps, {})
        return _Ticket(self._pipeline) if non_block else self._pipeline.wait()

    def sample_tokens(
        self,
        grammar_output: GrammarOutput | None,
        non_block: bool = False,  # noqa: FBT001, FBT002 - vLLM's own signature
    ) -> Any:  # noqa: ANN401 - as vLLM's own
        """Send the steps that wait; what comes back next, of whichever steps."""
        assert self._held is not None
        self._pipeline.dispatch(self._held.steps, grammar_rows(grammar_output))
        self._held = None
        return _Ticket(self._pipeline) if non_block else self._pipeline.wait()

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """It is called when a stage has lost its last node."""
        self._on_failure = callback

    def check_health(self) -> None:
        """Raise StageLostError for a stage without a node."""
        if self._pipeline.bindings.weight_frac <= 0:
            raise StageLostError("a stage has no node left")

    def blocks_in_use(self) -> dict[str, int]:
        """KV blocks held on each node."""
        return self._pipeline.pools.in_use()

    def hops(self) -> dict[str, tuple[int, int, float]]:
        """Activations that came to each node: messages, bytes, seconds in all from sending to having read them."""
        names = [name for name in self._names if name not in self._pipeline.bindings.lost]
        return dict(zip(names, self._pipeline.ask(names, "hops"), strict=True))

    def shutdown(self) -> None:
        """End the nodes."""
        self._hub.close()
        until_s = time.monotonic() + _END_S
        for child in self._children:
            try:
                child.wait(timeout=max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


class _Ticket(Future[ModelRunnerOutput]):
    """Good for whatever comes back next."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            try:
                outcome: Outcome = self._pipeline.wait()
                self.set_result(outcome)
            except Exception as error:  # noqa: BLE001 - it is raised to whoever asks, as futures do
                self.set_exception(error)
        return super().result(timeout)


def _resolved(value: None) -> Future[None]:
    future: Future[None] = Future()
    future.set_result(value)
    return future


def _refuse(config: VllmConfig, layout: Layout) -> None:
    """Raise LayoutError for what would not run, or run wrongly."""
    model, parallel = config.model_config, config.parallel_config
    layers = model.get_total_num_hidden_layers()
    against = {
        f"vLLM {vllm_version}: this runtime is written for {VLLM_SERIES}x": not vllm_version.startswith(VLLM_SERIES),
        f"stages of {layout.layers} layers, the model has {layers}": sum(layout.layers) != layers,
        "the V2 model runner: set VLLM_USE_V2_MODEL_RUNNER=0": config.use_v2_model_runner,
        "--pipeline-parallel-size: the layout says it": parallel.pipeline_parallel_size != 1,
        "--tensor-parallel-size: each node of the layout has its own tp": parallel.tensor_parallel_size != 1,
        "--data-parallel-size": parallel.data_parallel_size != 1,
        "context parallelism": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size != 1,
        "async scheduling": bool(config.scheduler_config.async_scheduling),
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "multimodal models": model.is_multimodal_model,
        "encoder-decoder models": model.is_encoder_decoder,
        "pooling models": model.runner_type != "generate",
        f"{model.architectures}: vLLM cannot cut it into stages": len(layout.stages) > 1
        and not model.registry.is_pp_supported_model(model.architectures, model),
        "--enable-expert-parallel with --enable-eplb": parallel.enable_eplb,
        "a KV connector other than coral_core.engine.plugin.kv_connector": config.kv_transfer_config is not None
        and config.kv_transfer_config.kv_connector_module_path != "coral_core.engine.plugin.kv_connector",
        "sleep mode": model.enable_sleep_mode,
    }
    if refused := [what for what, so in against.items() if so]:
        raise LayoutError(f"not supported by the stage runtime: {'; '.join(refused)}")
