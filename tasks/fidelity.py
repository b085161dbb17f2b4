"""How far the simulator is from real serving: a tiny model under real vLLM behind the gateway, against its own profile.

One profile is measured step by step on truncated models. Then, for each way of serving, engines and gateway are started,
the same trace of requests is sent several times, and simulated once with the profile's timing (`fidelity_compare`). What
a request takes outside of the engine's steps (HTTP, tokens to text, the gateway, a hand-over) is measured on lone requests
before the trace, and added to every simulated TTFT.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from artifacts.store import open_store
from coral_core.catalog import find_config, load_catalog
from coral_core.catalog.models import package_models
from coral_core.clock import SystemClock
from coral_core.domain.launch import Device, EngineTerms, LaunchPlan, ModelTerms, NodePlace, Runtime
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage
from coral_core.domain.workload import Phase, Slo
from coral_core.engine.launch import launch_plan
from coral_core.engine.process import EngineProcess, start_engine
from coral_core.engine.profile_launch import profile_flags, profile_launch
from coral_core.engine.state import Condition
from coral_core.errors import InputError, MeasurementError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.profile import Profile, ProfileKey
from coral_core.perf.profiling import Sweep
from coral_core.perf.search import Layout
from coral_core.sim.inputs import SimInput, SimInstance, SimModel, SimNode, SimOptions, SimRequests, SimStage
from coral_core.sim.profiled import ProfiledTiming, profiled_timing
from coral_core.sim.run import simulate
from coral_core.units import MIB
from tasks.fidelity_compare import Fidelity, Latencies, Serving, Unmeasured
from tasks.local_serving import CORAL, ROOT, answers, free_ports, make_tiny_models
from tasks.measure import HttpEngines, Measuring, Subject, begun, publish

MODEL: Final = "tiny-chat"
VARIANT: Final = "fp32"
CONFIG: Final = "local-large"
BLOCK_TOKENS: Final = 32
MAX_REQUESTS: Final = 16
MAX_TOKENS: Final = 2048
STEP_LIMIT_S: Final = 120
_START_S: Final = 600.0
_WORKER: Final = "coral_core.engine.plugin.cpu_worker.StageWorker"
_DELAY: Final = "CORAL_LAYER_DELAY_MS"
_ONE: Final = Layout(tp=1, pp=1, dp=1)
_NODES: Final = 4
_PORTS: Final = 8
_LONE_GAP_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelitySpec:
    """What is served and asked. `layer_delay_ms`: see `engine.plugin.cpu_worker`; empty: the CPU's own times alone.

    `runtimes` of the engines: with `coral` among them KV goes by our connector, else by NIXL.
    """

    servings: tuple[Serving, ...] = tuple(Serving)
    runtimes: tuple[Runtime, ...] = (Runtime.VLLM, Runtime.CORAL)
    layer_delay_ms: str = "10,0.05"
    requests: int = 60
    requests_per_s: float = 1.5
    input_tokens: tuple[int, int] = (32, 400)
    output_tokens: tuple[int, int] = (8, 48)
    runs: int = 2
    lone_requests: int = 5
    seed: int = 0
    split_layers: tuple[int, int] = (5, 3)
    depths: tuple[int, int] = (2, 6)
    sweep: Sweep = field(
        default_factory=lambda: Sweep(
            batches=(1, 2, 4, 8, 16),
            prompts=(32, 128, 400),
            contexts=(64, 400),
            max_batched_tokens=MAX_TOKENS,
            max_requests=MAX_REQUESTS,
            samples=10,
            max_cv_frac=0.25,
        )
    )

    def trace(self) -> SimRequests:
        """Poisson arrivals, lengths uniform between their bounds."""
        draw = np.random.default_rng(self.seed)
        count = self.requests
        return SimRequests(
            model=np.zeros(count, dtype=np.int64),
            arrival_s=np.cumsum(draw.exponential(1 / self.requests_per_s, count)),
            input_tokens=draw.integers(*self.input_tokens, count, endpoint=True),
            output_tokens=draw.integers(*self.output_tokens, count, endpoint=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A folder in which engines run, and who is told of each step."""

    spec: FidelitySpec
    folder: Path
    interpreter: Path
    on_step: Callable[[str], object]
    first_port: int

    def run(self, known: Profile | None) -> tuple[Profile, list[Fidelity | Unmeasured]]:
        """Profile where none is `known`, then serve and simulate each way. Raises MeasurementError without a profile; every process is ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fleet_key.touch(mode=0o600)
        self.fleet_key.write_text(secrets.token_hex(32), encoding="ascii")
        profile = known or self.profile()
        timing = profiled_timing(profile, 1)
        miss = np.abs(timing.error_frac)
        self.on_step(
            f"{len(profile.points)} points measured; the timing misses them by {np.median(miss):.1%} in the median, "
            f"{miss.max():.1%} at most"
        )
        return profile, [self.tried(serving, profile, timing) for serving in self.spec.servings]

    # ------------------------------------------------------------------ what is served

    @property
    def shape(self) -> ModelShape:
        """The model's."""
        return package_models()[MODEL]

    def terms(self) -> EngineTerms:
        """Those of every engine, the profiled ones included."""
        path = make_tiny_models(self.folder / "models", self.interpreter)[MODEL]
        model = ModelTerms(
            path=str(path),
            dtype="float32",
            max_model_len_tokens=MAX_TOKENS,
            max_num_seqs=MAX_REQUESTS,
            max_num_batched_tokens=MAX_TOKENS,
            block_size_tokens=BLOCK_TOKENS,
            kv_cache_memory_bytes=64 * MIB,
            extra_args=("--no-enable-prefix-caching", "--worker-cls", _WORKER),
            env={_DELAY: self.spec.layer_delay_ms, "OMP_NUM_THREADS": "1"},
        )
        return EngineTerms(
            device=Device.CPU,
            models={(MODEL, VARIANT): model},
            runtimes=self.spec.runtimes,
            key_file=str(self.fleet_key),
            step_timeout_s=STEP_LIMIT_S,
        )

    @property
    def fleet_key(self) -> Path:
        """By which engines know each other when KV is fetched."""
        return self.folder / "fleet.key"

    @property
    def flags(self) -> tuple[str, ...]:
        """What of the terms a profile's key holds."""
        return profile_flags(self.shape, VARIANT, CONFIG, self.terms())

    def place(self, number: int) -> NodePlace:
        """Node `number` of this machine, unbound to cores."""
        port = self.first_port + number * _PORTS
        return NodePlace(node=f"n{number}", config=CONFIG, host="127.0.0.1", first_port=port, ports=_PORTS, cpus=())

    def plan(self, name: str, phase: Phase, layers: Sequence[int], first_node: int) -> LaunchPlan:
        """The launch of one instance, a node per stage."""
        template = ServingTemplate(
            template_id=name,
            model=MODEL,
            variant=VARIANT,
            phase=phase,
            slo=Slo(ttft_s=1.0, tpot_s=1.0),
            placement=Placement(stages=tuple(Stage(layers=held, nodes=(CONFIG,)) for held in layers)),
            throughput_tokens_per_s=None if phase is Phase.AGGREGATED else 1.0,
            throughput_requests_per_s=1.0 if phase is Phase.AGGREGATED else None,
            method="fidelity",
            source=CapacitySource.MEASURED,
        )
        return launch_plan(
            instance_id=name,
            template=template,
            layouts=[[_ONE] for _ in layers],
            shape=self.shape,
            terms=self.terms(),
            assumptions=CapacityAssumptions(),
            places=[self.place(first_node + index) for index in range(len(layers))],
        )

    def plans(self, serving: Serving) -> list[LaunchPlan]:
        """All instances."""
        whole = [self.shape.layers]
        if serving is Serving.DISAGGREGATED:
            return [self.plan("p", Phase.PREFILL, whole, 0), self.plan("d", Phase.DECODE, whole, 1)]
        layers = self.spec.split_layers if serving is Serving.PIPELINE else whole
        return [self.plan("a", Phase.AGGREGATED, list(layers), 0)]

    # ------------------------------------------------------------------ measured

    def profile(self) -> Profile:
        """Steps of truncated models, as served."""
        terms = self.terms()
        config = find_config(load_catalog("local"), CONFIG)
        key = ProfileKey(
            model=MODEL, variant=VARIANT, config=CONFIG, engine="vllm", version="of-this-machine", flags=self.flags
        )
        subject = Subject(key=key, shape=self.shape, config=config, depths=self.spec.depths, sweep=self.spec.sweep)
        plan = profile_launch(
            instance_id="profile", place=self.place(0), shape=self.shape, variant=VARIANT, terms=terms
        )
        store, clock = open_store("memory://fidelity"), SystemClock()
        measurement = begun(subject, store, fresh=True)
        with self.engines([plan]):
            Measuring(
                measurement=measurement,
                engines=HttpEngines(plan.url),
                store=store,
                clock=clock,
                until_s=clock.monotonic_s() + 2 * _START_S,
                on_step=self.on_step,
            ).run()
        found = publish(measurement, store, now=clock.now(), source="coral bench fidelity")
        for shot, why in found.refused.items():
            self.on_step(f"refused: {shot.name}: {why}")
        return found.profile

    def tried(self, serving: Serving, profile: Profile, timing: ProfiledTiming) -> Fidelity | Unmeasured:
        """What `serve` found; what could not be measured does not take along what was."""
        try:
            return self.serve(serving, profile, timing)
        except MeasurementError as error:
            return Unmeasured(serving=serving, why=str(error))

    def serve(self, serving: Serving, profile: Profile, timing: ProfiledTiming) -> Fidelity:
        """Real runs and the simulation of one way of serving."""
        plans, trace = self.plans(serving), self.spec.trace()
        lone = self._lone()
        with self.engines(plans), self.gateway(plans) as url:
            self.on_step(f"{serving.value}: engines and gateway are ready")
            self.heard(url, lone, seed=1)  # warms up
            alone = self.heard(url, lone, seed=2)
            runs = tuple(self.heard(url, trace, seed=3 + number) for number in range(self.spec.runs))
        expected = self.simulated(serving, lone, profile, timing)
        outside_s = float(np.median(alone.ttft_s - expected.ttft_s))
        said = self.simulated(serving, trace, profile, timing)
        return Fidelity(
            serving=serving,
            requests=len(trace),
            outside_s=outside_s,
            measured=runs,
            simulated=replace(said, ttft_s=said.ttft_s + outside_s),
        )

    def _lone(self) -> SimRequests:
        """Requests of mean lengths that never meet."""
        count = self.spec.lone_requests
        tokens, out = (round(statistics.fmean(bounds)) for bounds in (self.spec.input_tokens, self.spec.output_tokens))
        per_layer_s = [float(text) / 1000.0 for text in self.spec.layer_delay_ms.split(",") if text]
        step_s = self.shape.layers * sum(per_layer_s[:1]) + 0.05
        gap_s = 3 * out * step_s / 2 + _LONE_GAP_S
        return SimRequests(
            model=np.zeros(count, dtype=np.int64),
            arrival_s=gap_s * np.arange(count, dtype=np.float64),
            input_tokens=np.full(count, tokens),
            output_tokens=np.full(count, out),
        )

    @contextmanager
    def engines(self, plans: Sequence[LaunchPlan]) -> Iterator[None]:
        """All nodes of all plans, ready; ended afterwards. Raises MeasurementError for one that does not start."""
        with ExitStack() as stack:
            started: list[EngineProcess] = []
            for plan in plans:
                for node in plan.nodes:
                    engine = start_engine(
                        node,
                        interpreter=self.interpreter,
                        log=self.folder / f"{plan.instance_id}-{node.node}.log",
                        owner=f"fidelity-{self.folder}",
                        url=plan.url if node.serves else None,
                    )
                    stack.callback(engine.stop, 10.0)
                    started.append(engine)
            for engine in started:
                state = engine.wait(_START_S)
                if state.condition is not Condition.READY:
                    failure = state.failure
                    raise MeasurementError(
                        f"an engine is {state.condition.value}: {failure.what if failure else 'not ready in time'}",
                        where=str(self.folder),
                        fix=(failure.fix if failure else "") or "see its log there",
                    )
            yield

    @contextmanager
    def gateway(self, plans: Sequence[LaunchPlan]) -> Iterator[str]:
        """The gateway in front of all instances."""
        (port,) = free_ports(1)
        model = {
            "name": MODEL,
            "slo": {"ttft_s": 1000.0, "tpot_s": 1000.0},
            "mean_input_tokens": statistics.fmean(self.spec.input_tokens),
            "mean_output_tokens": statistics.fmean(self.spec.output_tokens),
        }
        instances = [
            {"name": plan.instance_id, "model": MODEL, "phase": plan.phase.value, "url": plan.url, "weight": 1.0}
            for plan in plans
        ]
        file = self.folder / "gateway.yaml"
        document = {"listen": {"host": "127.0.0.1", "port": port}, "models": [model], "instances": instances}
        file.write_text(json.dumps(document), encoding="utf-8")
        url = f"http://127.0.0.1:{port}"
        with (self.folder / "gateway.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                [*CORAL, "gateway", "run", "--config", str(file)], stdout=log, stderr=log, cwd=ROOT
            )
        try:
            end_s = time.monotonic() + 60.0
            while not answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise MeasurementError("the gateway did not start", where=str(self.folder / "gateway.log"))
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)

    def heard(self, url: str, trace: SimRequests, *, seed: int) -> Latencies:
        """The trace sent once. Raises MeasurementError where a request fails."""
        rows = np.column_stack([trace.arrival_s, trace.input_tokens, trace.output_tokens]).tolist()
        words = [sys.executable, "-m", "coral_core.engine.trace_load", "--url", url, "--model", MODEL]
        words += ["--vocab", str(self.shape.vocab), "--seed", str(seed)]
        done = subprocess.run(  # noqa: S603 - our own program
            words, input=json.dumps(rows), capture_output=True, text=True, cwd=ROOT, check=False, timeout=1200
        )
        found = json.loads(done.stdout) if done.returncode == 0 else [[None, None, done.stderr[-300:]]]
        faults = [why for _, _, why in found if why]
        if faults:
            raise MeasurementError(f"{len(faults)} of {len(trace)} requests failed: {faults[0]}", where=url)
        first, finish = (np.array([row[column] for row in found]) for column in (0, 1))
        return Latencies(
            ttft_s=first - trace.arrival_s, tpot_s=(finish - first) / np.maximum(trace.output_tokens - 1, 1)
        )

    # ------------------------------------------------------------------ simulated

    def simulated(self, serving: Serving, trace: SimRequests, profile: Profile, timing: ProfiledTiming) -> Latencies:
        """The trace in the simulator, as the client would hear it."""
        apart = serving is Serving.DISAGGREGATED
        # The prefill's token is for nobody: the decode engine makes all that the client hears.
        asked = replace(trace, output_tokens=trace.output_tokens + 1) if apart else trace
        blocks = int(profile.kv_tokens[1] // BLOCK_TOKENS)
        instances = tuple(self._instances(serving, timing, blocks))
        outcome = simulate(
            SimInput(
                models=(SimModel(name=MODEL),),
                instances=instances,
                requests=asked,
                options=SimOptions(end_s=1e5, block_tokens=BLOCK_TOKENS, compiled=False),
            )
        ).requests
        first_s = outcome.second_token_s if apart else outcome.first_token_s
        return Latencies(
            ttft_s=first_s - trace.arrival_s,
            tpot_s=(outcome.finish_s - first_s) / np.maximum(trace.output_tokens - 1, 1),
        )

    def _instances(self, serving: Serving, timing: ProfiledTiming, blocks: int) -> Iterator[SimInstance]:
        layers = self.spec.split_layers if serving is Serving.PIPELINE else (self.shape.layers,)
        phases = (Phase.PREFILL, Phase.DECODE) if serving is Serving.DISAGGREGATED else (Phase.AGGREGATED,)
        for phase in phases:
            nodes = [timing.node(held, first=index == 0) for index, held in enumerate(layers)]
            yield SimInstance(
                name=phase.value,
                model=MODEL,
                phase=phase,
                stages=tuple(
                    SimStage(layers=held, nodes=(SimNode(timing=node, kv_blocks=blocks),))
                    for held, node in zip(layers, nodes, strict=True)
                ),
                weight=1.0,
                max_batched_tokens=MAX_TOKENS,
                max_running_requests=MAX_REQUESTS,
                micro_batches=len(layers),
                balanced_steps=False,
            )


def bench_fidelity(
    spec: FidelitySpec,
    *,
    folder: Path,
    interpreter: Path,
    profile: Profile | None = None,
    on_step: Callable[[str], object] = lambda _: None,
) -> tuple[Profile, list[Fidelity | Unmeasured]]:
    """The profile (measured first where none is given), and how the simulator does with it.

    Raises InputError for a profile of another model, configuration or engine flags, MeasurementError, ServingError.
    """
    first = free_ports(1)[0]
    first_port = min(first, 65535 - _NODES * _PORTS)
    bench = Bench(spec=spec, folder=folder, interpreter=interpreter, on_step=on_step, first_port=first_port)
    if profile is not None:
        _check(profile, bench.flags)
    return bench.run(profile)


def _check(profile: Profile, flags: tuple[str, ...]) -> None:
    key, served = profile.key, f"served is {MODEL} in {VARIANT} on {CONFIG} with {' '.join(flags)}"
    if (key.model, key.variant, key.config) != (MODEL, VARIANT, CONFIG):
        raise InputError(f"is of {key.model} in {key.variant} on {key.config}", where="profile", fix=served)
    if key.flags != flags:
        raise InputError(f"was measured with {' '.join(key.flags)}", where="profile", fix=served)
    if 1 not in profile.kv_tokens:
        fix = "take one of `coral profile run`"
        raise InputError("does not say how many tokens of KV there is room for at TP 1", where="profile", fix=fix)
