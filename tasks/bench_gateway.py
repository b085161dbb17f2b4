"""What the gateway costs, beside other gateways and a direct connection, in one run on this machine.

Engines that compute nothing answer on loopback with streams of a stated number of chunks. Everything is measured, at the
client, in rounds that visit all targets in turn; figures of several rounds are their medians. CPU time is that of all
processes of a target (of the engines themselves for the direct connection).
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from coral_core.errors import InputError, MeasurementError
from tasks.bench_targets import MODEL, Target, TargetName, running_targets
from tasks.peak_memory import tree_bytes, tree_cpu_s

HALF_LOAD_CONNECTIONS: Final = 64
SOAK_CONNECTIONS: Final = 512
SETTLED_S: Final = 15.0
"""Of the long run: memory counts from here, when every connection has been used and allocators have grown."""
LATENCY_FLOOR_S: Final = 0.005
_START_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayBenchSpec:
    """What is measured. `rivals` are the programs of other gateways; `soak_s` 0 leaves the long run out."""

    rivals: Mapping[TargetName, Path]
    connections: Sequence[int] = (1, 64, 512)
    rounds: int = 3
    seconds: float = 6.0
    chunks: int = 48
    gap_s: float = 0.002
    soak_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """One spell of load on one target. Where no request was finished in it, what is per request is not known: None."""

    target: TargetName
    connections: int
    requests: int
    errors: int
    first_error: str
    requests_per_s: float
    cpu_s_per_request: float | None
    first_event_p50_s: float | None
    first_event_p99_s: float | None
    whole_p50_s: float | None
    whole_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """The long run: `growth_frac` is memory at its end over memory once settled, less one."""

    connections: int
    seconds: float
    requests: int
    errors: int
    first_error: str
    settled_bytes: int
    end_bytes: int

    @property
    def growth_frac(self) -> float:
        """By how much memory grew after it had settled."""
        return self.end_bytes / self.settled_bytes - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayBench:
    """All spells: `peak` in closed loops, `half` at half of our own peak over 64 connections, and the long run."""

    spec: GatewayBenchSpec
    half_requests_per_s: float
    peak: tuple[Spell, ...]
    half: tuple[Spell, ...]
    soak: Soak | None

    def median(self, spells: Sequence[Spell], target: TargetName, connections: int) -> dict[str, float | None]:
        """Each figure's median over the rounds in which it is known."""
        chosen = [one for one in spells if (one.target, one.connections) == (target, connections)]
        names = [name for name, kind in Spell.__annotations__.items() if kind.startswith("float")]
        known = {name: [v for one in chosen if (v := getattr(one, name)) is not None] for name in names}
        return {name: statistics.median(values) if values else None for name, values in known.items()}

    def targets(self) -> dict[str, dict[str, Any]]:
        """Each aim, what was measured for it, and whether it is met."""
        direct = [one.first_event_p99_s or math.inf for one in self.half if one.target == "direct"]
        ours = [one.first_event_p99_s or math.inf for one in self.half if one.target == "coral"]
        added_s = statistics.median(b - a for a, b in zip(direct, ours, strict=True))
        allowed_s = max(LATENCY_FLOOR_S, 2.0 * (max(direct) - min(direct)))
        found: dict[str, dict[str, Any]] = {
            "added_p99_s": {"measured": added_s, "at_most": allowed_s, "met": added_s <= allowed_s}
        }
        for rival, at_least in (("litellm", 1.0), ("vllm-router", 0.5)):
            if rival in self.spec.rivals:
                ratio = self._per_cpu_s("coral") / self._per_cpu_s(rival)
                found[f"requests_per_cpu_s_over_{rival}"] = {
                    "measured": ratio,
                    "at_least": at_least,
                    "met": ratio > at_least,
                }
        if self.soak is not None:
            found["soak_errors"] = {"measured": self.soak.errors, "at_most": 0, "met": self.soak.errors == 0}
            grown = self.soak.growth_frac
            found["soak_memory_growth_frac"] = {"measured": grown, "at_most": 0.05, "met": grown <= 0.05}
        return found

    def _per_cpu_s(self, target: str) -> float:
        found = [one for one in self.peak if one.target == target and one.connections == HALF_LOAD_CONNECTIONS]
        return 1.0 / statistics.median(one.cpu_s_per_request or math.inf for one in found)

    def to_json(self) -> dict[str, Any]:
        """Every spell, and the aims."""
        spec = {**asdict(self.spec), "rivals": sorted(self.spec.rivals)}
        soak = self.soak and {**asdict(self.soak), "growth_frac": self.soak.growth_frac}
        return {
            "source": "measured",
            "spec": spec,
            "half_requests_per_s": self.half_requests_per_s,
            "peak": [asdict(one) for one in self.peak],
            "half": [asdict(one) for one in self.half],
            "soak": soak,
            "targets": self.targets(),
        }


@dataclass(slots=True, kw_only=True)
class _Bench:
    spec: GatewayBenchSpec
    on_progress: Callable[[int, int], object]
    targets: list[Target]
    done: int = 0

    def spell(self, target: Target, connections: int, rate: float | None = None) -> Spell:
        before_s = tree_cpu_s(target.process.pid)
        heard = _load(target.url, connections, self.spec.seconds, self.spec.chunks, rate)
        cpu_s = tree_cpu_s(target.process.pid) - before_s
        self.done += 1
        self.on_progress(self.done, self.total)
        requests = heard["finished"]
        if not requests and target.name in {"direct", "coral"}:
            raise MeasurementError(
                f"{target.name} finished no request over {connections} connections in {self.spec.seconds:g} s",
                where=heard["first_error"],
                fix="longer spells: --seconds",
            )
        return Spell(
            target=target.name,
            connections=connections,
            requests=requests,
            errors=heard["errors"],
            first_error=heard["first_error"],
            requests_per_s=requests / heard["elapsed_s"],
            cpu_s_per_request=cpu_s / requests if requests else None,
            first_event_p50_s=_quantile(heard["first_event_s"], 0.5),
            first_event_p99_s=_quantile(heard["first_event_s"], 0.99),
            whole_p50_s=_quantile(heard["whole_s"], 0.5),
            whole_p99_s=_quantile(heard["whole_s"], 0.99),
        )

    @property
    def total(self) -> int:
        """Spells in all, the long run as one."""
        counted = len(self.targets) * self.spec.rounds * (len(self.spec.connections) + 1)
        return counted + (self.spec.soak_s > 0)

    def in_turn(self) -> Iterator[list[Target]]:
        """The targets of each round, in another order each time."""
        for number in range(self.spec.rounds):
            shift = number % len(self.targets)
            yield self.targets[shift:] + self.targets[:shift]


def bench_gateway(
    spec: GatewayBenchSpec, *, on_progress: Callable[[int, int], object] = lambda _done, _total: None
) -> GatewayBench:
    """Measure all targets; every process is ended. Raises MeasurementError where one does not start or answers nothing."""
    if HALF_LOAD_CONNECTIONS not in spec.connections:
        raise InputError(f"the aims are stated for {HALF_LOAD_CONNECTIONS} connections", where="--connections")
    with ExitStack() as stack:
        targets = stack.enter_context(running_targets(spec.rivals, chunks=spec.chunks, gap_s=spec.gap_s))
        bench = _Bench(spec=spec, on_progress=on_progress, targets=targets)
        for target in bench.targets:
            _wait_for(target, spec.chunks)
        peak = [bench.spell(one, count) for turn in bench.in_turn() for count in spec.connections for one in turn]
        ours = [s.requests_per_s for s in peak if (s.target, s.connections) == ("coral", HALF_LOAD_CONNECTIONS)]
        rate = statistics.median(ours) / 2.0
        half = [bench.spell(one, HALF_LOAD_CONNECTIONS, rate) for turn in bench.in_turn() for one in turn]
        soak = _soak(bench) if spec.soak_s else None
    return GatewayBench(spec=spec, half_requests_per_s=rate, peak=tuple(peak), half=tuple(half), soak=soak)


def _quantile(values_s: Sequence[float], share_frac: float) -> float | None:
    return float(np.quantile(values_s, share_frac)) if values_s else None


def _soak(bench: _Bench) -> Soak:
    """Many connections for long, on our gateway alone."""
    target = next(one for one in bench.targets if one.name == "coral")
    seconds = bench.spec.soak_s
    settled_bytes: list[int] = []

    def look() -> None:
        settled_bytes.append(tree_bytes(target.process.pid))

    heard = _load(
        target.url, SOAK_CONNECTIONS, seconds, bench.spec.chunks, None, after_s=min(SETTLED_S, seconds / 2), then=look
    )
    bench.done += 1
    bench.on_progress(bench.done, bench.total)
    return Soak(
        connections=SOAK_CONNECTIONS,
        seconds=heard["elapsed_s"],
        requests=heard["finished"],
        errors=heard["errors"],
        first_error=heard["first_error"],
        settled_bytes=settled_bytes[0],
        end_bytes=tree_bytes(target.process.pid),
    )


def _load(
    url: str,
    connections: int,
    seconds: float,
    chunks: int,
    rate: float | None,
    *,
    after_s: float = 0.0,
    then: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """What the load program heard, in a process of its own; `then` is called `after_s` into the run."""
    with tempfile.TemporaryDirectory(prefix="coral-bench-") as folder:
        out = Path(folder) / "heard.json"
        words = [sys.executable, "-m", "coral_core.engine.stream_load", "--url", url, "--model", MODEL]
        words += ["--tokens", str(chunks), "--connections", str(connections), "--seconds", str(seconds)]
        words += ["--out", str(out)] + ([] if rate is None else ["--rate", str(rate)])
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 - a program of ours
            try:
                if then is not None:
                    time.sleep(after_s)
                    then()
                _, why = process.communicate(timeout=seconds + 90.0)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise MeasurementError(f"the load on {url} failed: {why.strip()[-300:]}")
        return dict(json.loads(out.read_text(encoding="utf-8")))


def _wait_for(target: Target, chunks: int) -> None:
    """Until a whole answer has come through it, and once more so that nothing is cold."""
    end_s = time.monotonic() + _START_S
    while True:
        try:
            if all(_load(target.url, 1, 0.5, chunks, None)["finished"] for _ in range(2)):
                return
        except MeasurementError:
            pass
        if target.process.poll() is not None or time.monotonic() > end_s:
            raise MeasurementError(
                f"{target.name} gave no answer within {_START_S:g} s", fix="start it by hand and see what it says"
            )
        time.sleep(0.5)
