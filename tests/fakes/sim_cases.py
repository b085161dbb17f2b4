"""Small fleets for the simulator's tests: built in one line, with timings simple enough for paper and pencil."""

from __future__ import annotations

import numpy as np
import pytest

from coral_core.domain.workload import Phase
from coral_core.sim.inputs import (
    UNLIMITED,
    LifecycleEvent,
    NodeTiming,
    Routing,
    SimInput,
    SimInstance,
    SimModel,
    SimNode,
    SimOptions,
    SimRequests,
    SimStage,
)


def timing(*, fixed_s=0.0, token_s=0.0, row_s=0.0, kept_token_s=0.0, pair_s=0.0, **more) -> NodeTiming:
    """t = fixed + token n + row m + kept K + pair A."""
    return NodeTiming(
        grid=(0.0, 1.0),
        token_s=(0.0, token_s),
        row_s=(0.0, row_s),
        fixed_s=fixed_s,
        kept_token_s=kept_token_s,
        pair_s=pair_s,
        **more,
    )


def stage(*nodes: SimNode, layers: int = 1) -> SimStage:
    return SimStage(layers=layers, nodes=nodes)


def node(
    *, kv_blocks: int = UNLIMITED, weight: float = 1.0, nic: float = np.inf, machine: str = "", **times
) -> SimNode:
    return SimNode(timing=timing(**times), kv_blocks=kv_blocks, weight=weight, nic_bytes_per_s=nic, machine=machine)


def instance(name: str, *stages: SimStage, phase: Phase = Phase.AGGREGATED, **more) -> SimInstance:
    return SimInstance(**{"model": "m", "weight": 1.0, "template": "t", **more}, name=name, phase=phase, stages=stages)


def requests(*rows: tuple[float, int, int]) -> SimRequests:
    """Rows (arrival_s, input_tokens, output_tokens) of model 0."""
    arrival_s, inputs, outputs = zip(*rows, strict=True)
    return SimRequests(
        model=np.zeros(len(rows), dtype=np.int64),
        arrival_s=np.array(arrival_s, dtype=np.float64),
        input_tokens=np.array(inputs, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
    )


def simulation(
    instances: list[SimInstance],
    asked: SimRequests,
    *lifecycle: LifecycleEvent,
    model: SimModel | None = None,
    compiled: bool = False,
    **options,
) -> SimInput:
    """One model `m`; plain kernel unless told otherwise, so that a test does not wait for a compiler."""
    return SimInput(
        models=(model or SimModel(name="m"),),
        instances=tuple(instances),
        requests=asked,
        options=SimOptions(**{"end_s": 1000.0, "compiled": compiled, **options}),
        lifecycle=lifecycle,
    )


def first_and_finish(outcome) -> list[tuple[float, float]]:
    """Instants of the first and the last token of each request, to be compared approximately."""
    pairs = zip(outcome.requests.first_token_s, outcome.requests.finish_s, strict=True)
    return [(pytest.approx(first, nan_ok=True), pytest.approx(finish)) for first, finish in pairs]


def disaggregated(**more) -> list[SimInstance]:
    """A prefill instance with a NIC of 1,000 bytes/s and a decode instance with a faster one, two layers each."""
    prefill = instance("p", stage(node(fixed_s=1.0, token_s=0.01, nic=1000.0), layers=2), phase=Phase.PREFILL, **more)
    decode = instance("d", stage(node(fixed_s=1.0, token_s=0.01, nic=4000.0), layers=2), phase=Phase.DECODE)
    return [prefill, decode]


def random_simulation(
    seed: int, *, requests_count: int = 60, disturbed: bool = True, compiled: bool = False
) -> SimInput:
    """Two models; aggregated and disaggregated instances side by side; pipelines, replicas, scarce KV, losses.

    `disturbed` adds failures, drains and starts; without, every request can be served in the end.
    """
    from coral_core.sim.disruptions import random_failures, spot_loss
    from coral_core.sim.inputs import LifecycleKind

    random = np.random.default_rng(seed)
    models = (
        SimModel(
            name="a", kv_bytes_per_token=100.0, activation_bytes_per_token=50.0, window_tokens=64, window_frac=0.5
        ),
        SimModel(name="b", kv_bytes_per_token=200.0, activation_bytes_per_token=80.0),
    )
    instances = [
        _random_instance(random, f"{model.name}{phase.value[0]}{k}", model.name, phase)
        for model in models
        for phase in Phase
        for k in range(random.integers(1, 3))
    ]
    arrival_s = np.sort(random.uniform(0, 20, requests_count).round(1))
    asked = SimRequests(
        model=random.integers(0, 2, requests_count),
        arrival_s=arrival_s,
        input_tokens=random.integers(1, 300, requests_count),
        output_tokens=random.integers(1, 30, requests_count),
    )
    names = [one.name for one in instances]
    lifecycle: list[LifecycleEvent] = []
    if disturbed:
        lifecycle += random_failures(names, failures_per_h=200.0, repair_s=2.0, end_s=25.0, seed=seed)
        lifecycle += spot_loss(names[0], 12.0, notice_s=3.0)
        lifecycle += [
            LifecycleEvent(
                at_s=float(random.uniform(0, 20)), kind=LifecycleKind.DRAIN, instance=str(random.choice(names))
            ),
            LifecycleEvent(
                at_s=float(random.uniform(0, 20)), kind=LifecycleKind.START, instance=str(random.choice(names))
            ),
            LifecycleEvent(at_s=7.0, kind=LifecycleKind.DRAIN_ONE, template="a-decode"),
        ]
    return SimInput(
        models=models,
        instances=tuple(instances),
        requests=asked,
        options=SimOptions(
            end_s=100_000.0,
            compiled=compiled,
            epoch_starts_s=(0.0, 5.0, 10.0),
            stream_kv=seed % 2 == 1,
            routing=list(Routing)[seed // 2 % 2],
        ),
        lifecycle=tuple(lifecycle),
    )


def _random_instance(random: np.random.Generator, name: str, model: str, phase: Phase) -> SimInstance:
    cuts = [8] if random.random() < 0.4 else [5, 3]
    # 330 tokens at most, hence 21 blocks: every request fits alone, a few do not fit together.
    stages = tuple(
        stage(
            *(
                node(
                    fixed_s=float(random.uniform(0.005, 0.05)),
                    token_s=float(random.uniform(0, 2e-4)),
                    kept_token_s=1e-6,
                    pair_s=1e-8,
                    row_s=1e-4,
                    kv_blocks=int(random.integers(21, 60)),
                    weight=float(random.uniform(0.5, 2)),
                    nic=float(random.uniform(2e4, 1e6)),
                    machine=f"s{s}m{k // 2}",
                    depth=int(random.integers(1, 3)),
                )
                for k in range(random.integers(1, 4))
            ),
            layers=layers,
        )
        for s, layers in enumerate(cuts)
    )
    return instance(
        name,
        *stages,
        phase=phase,
        model=model,
        weight=float(random.uniform(0.5, 3)),
        template=f"{model}-{phase.value}",
        max_batched_tokens=int(random.integers(32, 400)),
        max_running_requests=int(random.integers(1, 12)),
        micro_batches=int(random.integers(1, 4)),
        balanced_steps=bool(random.integers(2)),
        hop_s=float(random.choice([0.0, 0.001])),
        boot_s=1.0,
    )
