"""Measures a model's steps on one node that serves `profile_server`: shot by shot, kept as they come, refused where noisy."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from artifacts.profile_shots import kept_starts, kept_times, write_start, write_times
from artifacts.profiles import write_profile
from artifacts.store import Store
from coral_core.clock import Clock
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.errors import InputError, MeasurementError
from coral_core.perf.profile import Profile, ProfileKey
from coral_core.perf.profile_check import checked_points
from coral_core.perf.profiling import (
    EngineStart,
    Shot,
    ShotTimes,
    Sweep,
    falling,
    fitted_points,
    noise,
    tp_sizes,
    whole_kv_tokens,
    whole_start_s,
)

START_S: Final = 1800.0
"""The longest that an engine of a few layers may take to start."""
SHOT_S: Final = 600.0
Answer = TypeVar("Answer")
_LOG: Final = logging.getLogger(__name__)


class Engines(Protocol):
    """A node on which one engine after another is started and measured."""

    def open(self, tp: int, layers: int, *, within_s: float) -> EngineStart:
        """Start an engine of the truncated model. Raises MeasurementError."""
        ...

    def measure(self, shot: Shot, samples: int, *, within_s: float) -> tuple[float, ...]:
        """Seconds of steps of the open engine. InputError for a shot that it cannot do, MeasurementError where it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class HttpEngines:
    """`Engines` of the program `coral_core.engine.plugin.profile_server` at `url`; another engine's `version` is refused."""

    url: str
    version: str = ""

    def open(self, tp: int, layers: int, *, within_s: float) -> EngineStart:
        """See `Engines`."""
        said = self._post("/open", {"tp": tp, "layers": layers}, within_s)
        if self.version and said["version"] != self.version:
            raise MeasurementError(
                f"the node runs version {said['version']}, not {self.version}",
                where=self.url,
                fix="profile the version that nodes run",
            )
        return EngineStart(tp=tp, layers=layers, kv_tokens=int(said["kv_tokens"]), start_s=float(said["start_s"]))

    def measure(self, shot: Shot, samples: int, *, within_s: float) -> tuple[float, ...]:
        """See `Engines`."""
        question = {"phase": shot.phase.value, "requests": shot.requests, "tokens": shot.tokens, "samples": samples}
        said = self._post("/measure", question, within_s)
        if "refused" in said:
            raise InputError(str(said["refused"]), where=shot.name)
        return tuple(map(float, said["samples_s"]))

    def close(self) -> None:
        """End the open engine."""
        self._post("/close", {}, SHOT_S)

    def _post(self, path: str, body: Mapping[str, object], within_s: float) -> dict[str, Any]:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=within_s)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            with connection.getresponse() as response:
                document = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MeasurementError(
                f"the node does not answer: {type(error).__name__} {error}", where=f"{self.url}{path}"
            ) from None
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise MeasurementError(str(document.get("error", response.status)), where=f"{self.url}{path}")
        return dict(document)


class TimeUpError(MeasurementError):
    """The run's time or money is used up; what was measured is kept."""

    kind = "time_up"

    @classmethod
    def now(cls, while_text: str = "") -> TimeUpError:
        """The error of this moment; `while_text` says what was under way."""
        what = f"the time or the money of this run is used up{while_text}"
        return cls(what, fix="run it again: it goes on with what is missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured: a model on a node configuration by an engine, at two depths."""

    key: ProfileKey
    shape: ModelShape
    config: NodeConfig
    depths: tuple[int, int]
    sweep: Sweep

    @property
    def engines(self) -> list[tuple[int, int]]:
        """(TP, layers) of every engine that is started."""
        return [(tp, layers) for tp in tp_sizes(self.shape, self.config) for layers in self.depths]

    @property
    def shots(self) -> list[Shot]:
        """All that is measured."""
        return [shot for tp, layers in self.engines for shot in self.sweep.shots(tp, layers)]


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One subject's shots so far: kept ones, and those refused with their reason."""

    subject: Subject
    times: dict[Shot, ShotTimes] = field(default_factory=dict)
    starts: dict[tuple[int, int], EngineStart] = field(default_factory=dict)
    refused: dict[Shot, str] = field(default_factory=dict)

    @property
    def missing(self) -> dict[tuple[int, int], list[Shot]]:
        """Shots that are neither measured nor refused, by engine; engines without any left out."""
        known = self.times.keys() | self.refused.keys()
        by_engine = {
            engine: [shot for shot in self.subject.sweep.shots(*engine) if shot not in known]
            for engine in self.subject.engines
        }
        return {engine: shots for engine, shots in by_engine.items() if shots or engine not in self.starts}

    @property
    def doubtful(self) -> list[Shot]:
        """Shots of both depths whose times fall as steps grow (`falling`), or of which no layer's time comes."""
        subject = self.subject
        points, unfit = fitted_points(self.times, subject.depths, max_cv_frac=subject.sweep.max_cv_frac)
        wrong = {(point.tp, point.phase, point.requests, point.tokens) for point in falling(points)}
        wrong |= {shot.kind for shot in unfit}
        known = {shot.kind for shot in self.refused}
        return [shot for shot in self.times if shot.kind in wrong - known]


def begun(subject: Subject, store: Store, *, fresh: bool = False) -> Measurement:
    """What earlier runs have measured since the newest profile, as far as it is what this sweep would keep.

    Times with fewer samples or more noise than it allows count as missing, as do those that contradict each other: to
    run again measures them again. Nothing is kept where all is to be measured afresh.
    """
    found, sweep = Measurement(subject=subject), subject.sweep
    if not fresh:
        kept = kept_times(store, subject.key, subject.shots)
        found.times = {
            shot: times
            for shot, times in kept.items()
            if len(times.samples_s) >= sweep.samples and not noise(times, sweep.max_cv_frac)
        }
        whole = [shot for shot in found.doubtful if replace(shot, layers=subject.depths[0]) in found.times]
        for shot in whole:
            del found.times[shot]
        found.starts = {(one.tp, one.layers): one for one in kept_starts(store, subject.key)}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Measures what a measurement lacks on a node, until `until_s` on the clock's monotonic seconds; each result is kept at once."""

    measurement: Measurement
    engines: Engines
    store: Store
    clock: Clock
    until_s: float
    on_step: Callable[[str], object] = _LOG.info

    def run(self) -> None:
        """Measure; then again what contradicts itself or its neighbours, since some of that must be noise.

        Raises TimeUpError where the time is up, MeasurementError where an engine does not start or dies.
        """
        self._measure_missing()
        for _ in range(self.measurement.subject.sweep.attempts - 1):
            doubtful = self.measurement.doubtful
            if not doubtful:
                return
            self.on_step(f"{len(doubtful)} kinds of step again: their times contradict each other")
            for shot in doubtful:
                del self.measurement.times[shot]
            self._measure_missing()

    def _measure_missing(self) -> None:
        measurement = self.measurement
        for (tp, layers), shots in measurement.missing.items():
            start = self._asked(partial(self.engines.open, tp, layers), START_S)
            write_start(self.store, measurement.subject.key, start, at=self.clock.now())
            measurement.starts[tp, layers] = start
            self.on_step(f"engine of {layers} layers at TP {tp}: started in {start.start_s:.1f} s (measured)")
            for shot in shots:
                self._measure(shot)
            self.on_step(f"engine of {layers} layers at TP {tp}: {len(shots)} kinds of step measured")

    def _measure(self, shot: Shot) -> None:
        sweep, why = self.measurement.subject.sweep, ""
        for _ in range(sweep.attempts):
            try:
                samples = self._asked(partial(self.engines.measure, shot, sweep.samples), SHOT_S)
            except InputError as error:
                self.measurement.refused[shot] = error.what
                return
            times = ShotTimes(shot=shot, samples_s=samples)
            why = noise(times, sweep.max_cv_frac)
            if not why:
                write_times(self.store, self.measurement.subject.key, times, at=self.clock.now())
                self.measurement.times[shot] = times
                return
        self.measurement.refused[shot] = f"{why}, {sweep.attempts} times"

    def _asked(self, question: Callable[..., Answer], most_s: float) -> Answer:
        try:
            return question(within_s=min(self._left_s(), most_s))
        except MeasurementError:
            self._left_s()  # a question that the end of the time cut short is no fault of the node
            raise

    def _left_s(self) -> float:
        left_s = self.until_s - self.clock.monotonic_s()
        if left_s <= 0:
            raise TimeUpError.now()
        return left_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A profile in the store, and what of its sweep was refused."""

    key: str
    profile: Profile
    refused: Mapping[Shot, str]

    @property
    def lacks(self) -> int:
        """How many kinds of step of the sweep are not in the profile."""
        return len({shot.kind for shot in self.refused})


def publish(measurement: Measurement, store: Store, *, now: datetime, source: str) -> Published:
    """Fit, check and store the profile. Raises MeasurementError where too little was clean, or times cannot be true."""
    subject = measurement.subject
    points, unfit = fitted_points(measurement.times, subject.depths, max_cv_frac=subject.sweep.max_cv_frac)
    refused = {**measurement.refused, **unfit}
    if not points:
        raise MeasurementError(
            f"no kind of step was clean: {_first(refused)}",
            where=_where(subject),
            fix="measure on a quiet node, take more samples, or depths further apart",
        )
    try:
        checked = checked_points(
            points,
            subject.shape,
            subject.key.variant,
            subject.config.gpu,
            subject.config.gpu_count,
            where=_where(subject),
        )
    except InputError as error:
        raise MeasurementError(error.what, where=error.where, fix="measure all of it afresh") from None
    profile = Profile(
        key=subject.key,
        points=checked,
        source=source,
        as_of=now.date(),
        kv_tokens=whole_kv_tokens(measurement.starts.values(), subject.shape.layers),
        start_s=whole_start_s(measurement.starts.values(), subject.shape.layers),
    )
    return Published(key=write_profile(store, profile, time=now), profile=profile, refused=refused)


def profile_rows(published: Published) -> list[dict[str, object]]:
    """The profile as a table, for people."""
    return [
        {
            "phase": point.phase.value,
            "tp": point.tp,
            "requests": int(point.requests),
            "tokens": int(point.tokens),
            "layer_ms": round(point.layer_s * 1e3, 4),
            "fixed_ms": None if point.fixed_s is None else round(point.fixed_s * 1e3, 4),
            "cv_frac": None if point.cv_frac is None else round(point.cv_frac, 4),
            "label": "measured",
        }
        for point in published.profile.points
    ]


def refused_rows(refused: Mapping[Shot, str]) -> list[dict[str, object]]:
    """What was refused, and why."""
    return [{"step": shot.name, "why": why} for shot, why in sorted(refused.items())]


def _first(refused: Mapping[Shot, str]) -> str:
    names: Sequence[Shot] = sorted(refused)
    return f"{names[0].name}: {refused[names[0]]}" if names else "nothing was measured"


def _where(subject: Subject) -> str:
    return f"profile of {subject.key.model} on {subject.key.config}"
