"""Profiles in the making: a small subject, and engines whose steps take times from a closed form."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from coral_core.catalog import find_config, load_catalog
from coral_core.catalog.models import package_models
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, MeasurementError
from coral_core.perf.profile import ProfileKey
from coral_core.perf.profiling import EngineStart, Shot, Sweep
from tasks.measure import Subject

MODEL, CONFIG = "tiny-chat", "local-large"
SWEEP = Sweep(batches=(1, 4), prompts=(64,), contexts=(64, 128), max_batched_tokens=512, max_requests=8, samples=5)
KEY = ProfileKey(
    model=MODEL, variant="fp32", config=CONFIG, engine="vllm", version="0.32.0", flags=("--dtype", "float32")
)


def subject(sweep: Sweep = SWEEP, depths: tuple[int, int] = (2, 4)) -> Subject:
    config = find_config(load_catalog("local"), CONFIG)
    return Subject(key=KEY, shape=package_models()[MODEL], config=config, depths=depths, sweep=sweep)


def step_s(shot: Shot, *, fixed_s: float = 0.01) -> float:
    """Fixed, and per layer 2 ms, 0.05 ms per token of a prompt, 0.2 ms per decoding request and 1 us per token it keeps."""
    tokens = shot.requests * shot.tokens
    own_s = 5e-5 * tokens if shot.phase is Phase.PREFILL else 2e-4 * shot.requests + 1e-6 * tokens
    return fixed_s + shot.layers * (2e-3 + own_s)


@dataclass
class ClosedFormEngines:
    """`noisy` shots have samples that swing so many times; after `dies_after` questions the node is gone."""

    noisy: dict[Shot, int] = field(default_factory=dict)
    impossible: frozenset[Shot] = frozenset()
    dies_after: int | None = None
    opened: list[tuple[int, int]] = field(default_factory=list)
    asked: list[Shot] = field(default_factory=list)

    def open(self, tp: int, layers: int, *, within_s: float) -> EngineStart:
        assert within_s > 0
        self.opened.append((tp, layers))
        return EngineStart(tp=tp, layers=layers, kv_tokens=100_000 // layers, start_s=10.0 + layers)

    def measure(self, shot: Shot, samples: int, *, within_s: float) -> tuple[float, ...]:
        assert within_s > 0
        if self.dies_after is not None and len(self.asked) >= self.dies_after:
            raise MeasurementError("the node is gone")
        self.asked.append(shot)
        if shot in self.impossible:
            raise InputError("too many tokens", where=shot.name)
        swing = 0.001
        if self.noisy.get(shot, 0) > 0:
            self.noisy[shot] -= 1
            swing = 0.5
        signs = itertools.islice(itertools.cycle((-1.0, 0.0, 1.0)), samples)
        return tuple(np.array([step_s(shot) * (1 + swing * sign) for sign in signs]).tolist())
