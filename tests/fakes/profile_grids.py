"""Profiles of the toy model, as a grid of times that a formula gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coral_core.domain.workload import Phase
from coral_core.perf.profile import Profile, ProfileKey, ProfilePoint
from tests.fakes.perf_cases import AS_OF


def grid(
    phase: Phase,
    requests: Iterable[float],
    tokens: Iterable[float],
    seconds: Callable[[float, float], float],
    *,
    tp: int = 1,
    fixed_s: float = 0.0,
    cv_frac: float | None = None,
) -> list[ProfilePoint]:
    return [
        ProfilePoint(
            phase=phase,
            tp=tp,
            requests=count,
            tokens=length,
            layer_s=seconds(count, length),
            fixed_s=fixed_s,
            samples=5,
            cv_frac=cv_frac,
        )
        for length in tokens
        for count in requests
    ]


def profile(points: Iterable[ProfilePoint], *, config: str = "node", flags: tuple[str, ...] = ()) -> Profile:
    return Profile(
        key=ProfileKey(model="toy", variant="bf16", config=config, engine="vllm", version="0.32.0", flags=flags),
        points=tuple(points),
        source="made up",
        as_of=AS_OF,
        kv_tokens={1: 12345.0},
        start_s={1: 30.0},
    )
