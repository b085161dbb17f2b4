"""What the simulator says beside what was measured, request by request: deviations, the noise floor, and what is allowed.

A deviation is mean over requests of |simulated - measured| / mean measured, of TTFT and of TPOT, the mean over the runs.
The noise floor is that of one real run against another.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ALLOWED_FRAC: Final = 0.1
FLOOR_FACTOR: Final = 1.5


class Serving(StrEnum):
    """How the model is served."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
    PIPELINE = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """TTFT and TPOT of each request, (n,)."""

    ttft_s: Floats
    tpot_s: Floats

    def facts(self) -> dict[str, float]:
        """Mean and quantiles."""
        return {
            f"{name}_{what}": float(value)
            for name, values in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s))
            for what, value in (
                ("mean", values.mean()),
                ("p50", np.quantile(values, 0.5)),
                ("p90", np.quantile(values, 0.9)),
            )
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One metric: deviation of the simulation from the runs, of the runs from each other, and what is allowed."""

    metric: str
    deviation_frac: float
    noise_floor_frac: float
    mean_deviation_frac: float
    """Of the means over all requests, signed: simulated over measured, less one."""

    @property
    def allowed_frac(self) -> float:
        """A tenth, or one and a half times the noise floor."""
        return max(ALLOWED_FRAC, FLOOR_FACTOR * self.noise_floor_frac)

    @property
    def met(self) -> bool:
        """Whether the simulation is within what is allowed."""
        return self.deviation_frac <= self.allowed_frac


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """One way of serving: what was measured in each run, what was simulated, and how they compare."""

    serving: Serving
    requests: int
    outside_s: float
    measured: tuple[Latencies, ...]
    simulated: Latencies

    @property
    def compared(self) -> tuple[Compared, ...]:
        """TTFT and TPOT."""
        return tuple(self._compared(name) for name in ("ttft_s", "tpot_s"))

    def _compared(self, name: str) -> Compared:
        said = getattr(self.simulated, name)
        runs: list[Floats] = [getattr(run, name) for run in self.measured]
        pairs = [deviation_frac(one, other) for one, other in combinations(runs, 2)]
        return Compared(
            metric=name,
            deviation_frac=statistics.fmean(deviation_frac(said, run) for run in runs),
            noise_floor_frac=statistics.fmean(pairs) if pairs else 0.0,
            mean_deviation_frac=float(said.mean() / np.mean([run.mean() for run in runs]) - 1.0),
        )

    def rows(self) -> list[dict[str, object]]:
        """One row per source, each labelled."""
        named = [*((f"run {n}", "measured", run) for n, run in enumerate(self.measured, 1))]
        return [
            {"serving": self.serving.value, "what": what, "label": label, **_rounded(found.facts())}
            for what, label, found in [*named, ("simulation", "simulated", self.simulated)]
        ]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        compared = [{**asdict(one), "allowed_frac": one.allowed_frac, "met": one.met} for one in self.compared]
        facts = {"serving": self.serving.value, "requests": self.requests, "outside_s": self.outside_s}
        return {**facts, "compared": compared, "rows": self.rows()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """A way of serving that could not be measured, and why."""

    serving: Serving
    why: str

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {"serving": self.serving.value, "unmeasured": self.why}


def deviation_frac(said: Floats, real: Floats) -> float:
    """Mean absolute difference over the mean of `real`."""
    return float(np.abs(said - real).mean() / real.mean())


def _rounded(facts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in facts.items()}
