"""A profiling run: what is measured where, what it may cost, and the order of it all."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from artifacts.fleets import FleetIdentity, claim_fleet, mark_regions, used_regions
from artifacts.leases import LeaseTaken, LeaseTerms, take_lease
from artifacts.store import Store
from coral_core.catalog import find_config, find_model, load_catalog, load_models
from coral_core.catalog.model_ids import variant_by_dtype
from coral_core.cloud.tags import check_fleet_name
from coral_core.config.engine import load_engine_file
from coral_core.config.settings import Settings
from coral_core.domain.fleet import FleetId
from coral_core.domain.launch import EngineTerms, LaunchPlan, NodePlace
from coral_core.domain.models import ModelShape
from coral_core.engine.profile_launch import profile_flags, profile_launch
from coral_core.errors import CoralError, InputError, ProvisionError
from coral_core.perf.profile import ProfileKey
from coral_core.perf.profiling import EngineStart, ProfileBudget, Shot, Sweep, checked_depths, default_depths
from tasks.apply import holder_text
from tasks.measure import (
    Answer,
    Engines,
    HttpEngines,
    Measurement,
    Measuring,
    Published,
    Subject,
    TimeUpError,
    begun,
    publish,
)
from tasks.profile_nodes import (
    Ground,
    Meeting,
    NodeLateError,
    Place,
    Rental,
    aws_ground,
    aws_places,
    local_ground,
    local_places,
)
from tasks.providers import open_provider

ProfileProvider = Literal["local", "aws"]
SUFFIX: Final = "-profile"
CATALOG_OF: Final[Mapping[str, str]] = {"local": "local", "aws": "aws-real"}
BOOT_S: Final = 1800.0
"""The longest from a node's start until its program answers."""
LEASE: Final = LeaseTerms(duration_s=300.0, skew_s=30.0)
"""A run that was killed keeps others out for so long, so it is renewed while questions are open, some of which take half an hour."""
GUARD_S: Final = 20.0
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWish:
    """What is asked for. `depths` empty: the model's default; `coordinator_file`: provider aws only."""

    provider: ProfileProvider
    model: str
    configs: tuple[str, ...]
    engine_file: Path
    engine_version: str
    dtype: str | None = None
    fleet: str = ""
    regions: tuple[str, ...] = ()
    coordinator_file: Path | None = None
    depths: tuple[int, ...] = ()
    sweep: Sweep = field(default_factory=Sweep)
    max_s: float = 4 * 3600.0
    max_usd: float = 20.0
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What a run would do: subjects with what is missing of each, where, and the most that it costs."""

    rows: tuple[Mapping[str, object], ...]
    bound_usd: float
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEnd:
    """What came of a run: published profiles by configuration, and why others are not there."""

    published: Mapping[str, Published]
    unfinished: Mapping[str, str]
    spent_usd: float


@dataclass(slots=True, kw_only=True)
class ProfileRun:
    """One run. `folder` is for keys and the coordinator's state."""

    wish: ProfileWish
    settings: Settings
    store: Store
    folder: Path
    on_step: Callable[[str], object] = _LOG.info
    shape: ModelShape = field(init=False)
    terms: EngineTerms = field(init=False)
    subjects: tuple[Subject, ...] = field(init=False)
    budget: ProfileBudget = field(init=False)

    def __post_init__(self) -> None:
        """Read everything that can be wrong, before anything is started. Raises InputError."""
        wish = self.wish
        self.shape = find_model(load_models(self.settings.models), wish.model, where="model")
        variant = variant_by_dtype(self.shape, wish.dtype)
        self.terms = load_engine_file(wish.engine_file)
        self.budget = ProfileBudget(max_s=wish.max_s, max_usd=wish.max_usd)
        if wish.provider == "aws" and wish.coordinator_file is None:
            raise InputError(
                "nodes on aws need a coordinator to register at",
                where="coordinator_file",
                fix="give the file of the coordinator that their launch template names",
            )
        if not wish.configs or len(set(wish.configs)) < len(wish.configs):
            raise InputError("name each node configuration once, and at least one", where="configs")
        check_fleet_name(self.fleet)
        self.subjects = tuple(self._subject(name, variant) for name in wish.configs)

    @property
    def fleet(self) -> str:
        """The fleet of its nodes."""
        return f"{self.wish.fleet or self.settings.fleet}{SUFFIX}"

    def _subject(self, config: str, variant: str) -> Subject:
        wish = self.wish
        depths = checked_depths(wish.depths, self.shape) if wish.depths else default_depths(self.shape)
        key = ProfileKey(
            model=self.shape.name,
            variant=variant,
            config=config,
            engine="vllm",
            version=wish.engine_version,
            flags=profile_flags(self.shape, variant, config, self.terms),
        )
        found = find_config(load_catalog(CATALOG_OF[wish.provider]), config, where="configs")
        return Subject(key=key, shape=self.shape, config=found, depths=depths, sweep=wish.sweep)

    def dry_run(self) -> ProfilePlan:
        """What a run would do, and the most that it can cost; prices and offers are asked for, nothing is rented."""
        local = self.wish.provider == "local"
        places = local_places if local else aws_places(open_provider(self.settings, "aws"), self.wish.regions)
        rows = [self._row(subject, places(subject.key.config)) for subject in self.subjects]
        prices = [float(str(row["price_usd_per_h"])) for row in rows if row["price_usd_per_h"] is not None]
        return ProfilePlan(rows=tuple(rows), bound_usd=self.budget.bound_usd(prices), bound_s=self.budget.max_s)

    def _row(self, subject: Subject, places: Sequence[Place]) -> dict[str, object]:
        missing = begun(subject, self.store, fresh=self.wish.fresh).missing
        best = places[0] if places else None
        held_s = max(self.budget.allowed_s(best.price_usd_per_h, 0.0), 0.0) if best else 0.0
        return {
            "config": subject.key.config,
            "engine": subject.key.engine_name,
            "engines": len(missing),
            "steps": sum(map(len, missing.values())),
            "of": len(subject.shots),
            "region": best.region if best else "none offers it",
            "price_usd_per_h": best.price_usd_per_h if best else None,
            "minutes": round(held_s / 60.0, 1),
        }

    def run(self) -> ProfileEnd:
        """Measure and publish, one configuration after the other. Raises ProvisionError where another run is at work."""
        published: dict[str, Published] = {}
        unfinished: dict[str, str] = {}
        with self._ground() as (ground, meeting), self._rental(ground, meeting) as rental:
            began_s = ground.clock.monotonic_s()
            for subject in self.subjects:
                config = subject.key.config
                try:
                    published[config] = self._profiled(subject, rental, began_s)
                    lacks = published[config].lacks
                    self.on_step(f"{config}: published as {published[config].key}, {lacks} kinds of step refused")
                except CoralError as error:  # what the others can still have is not lost
                    unfinished[config] = str(error)
                    self.on_step(f"{config}: {error}")
        return ProfileEnd(published=published, unfinished=unfinished, spent_usd=self.budget.spent_usd)

    def _profiled(self, subject: Subject, rental: Rental, began_s: float) -> Published:
        ground = rental.ground
        measurement = begun(subject, self.store, fresh=self.wish.fresh)
        if measurement.missing:
            places = ground.places(subject.key.config)
            if not places:
                raise ProvisionError(f"{subject.key.config} is offered nowhere", where=", ".join(ground.regions))
            place = places[0]
            self.budget.require(place.price_usd_per_h)
            allowed_s = self.budget.allowed_s(place.price_usd_per_h, ground.clock.monotonic_s() - began_s)
            if allowed_s <= 0:
                raise TimeUpError.now()
            started_s = ground.clock.monotonic_s()
            try:
                self._measure(measurement, rental, place, until_s=started_s + allowed_s)
            finally:
                self.budget.pay(place.price_usd_per_h, ground.clock.monotonic_s() - started_s)
        source = f"coral profile run on {self.wish.provider}, fleet {self.fleet}"
        return publish(measurement, self.store, now=ground.clock.now(), source=source)

    def _measure(self, measurement: Measurement, rental: Rental, place: Place, *, until_s: float) -> None:
        subject = measurement.subject

        def launch(where: NodePlace, instance_id: str) -> LaunchPlan:
            return profile_launch(
                instance_id=instance_id,
                place=where,
                shape=self.shape,
                variant=subject.key.variant,
                terms=self.terms,
            )

        left_s = until_s - rental.ground.clock.monotonic_s()
        node = rental.node(
            name=_template(subject.key),
            model=subject.key.model,
            config=subject.key.config,
            place=place,
            launch=launch,
            within_s=min(left_s, BOOT_S),
        )
        try:
            with node as url:
                Measuring(
                    measurement=measurement,
                    engines=Guarded(HttpEngines(url, version=subject.key.version), rental.lease.guard),
                    store=self.store,
                    clock=rental.ground.clock,
                    until_s=until_s,
                    on_step=self.on_step,
                ).run()
        except NodeLateError as error:
            if left_s < BOOT_S:
                raise TimeUpError.now(f" before its node was: {error.what}") from None
            raise

    def _ground(self) -> AbstractContextManager[tuple[Ground, Meeting]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.wish.provider == "local":
            return local_ground(self.settings, self.folder)
        assert self.wish.coordinator_file is not None
        return aws_ground(self.settings, self.wish.coordinator_file, self.wish.regions)

    @contextmanager
    def _rental(self, ground: Ground, meeting: Meeting) -> Iterator[Rental]:
        """Under the fleet's lease; what an earlier run has left, in this run's regions, is ended first."""
        lease = take_lease(
            self.store, self.fleet, holder=holder_text("a profiling run"), terms=LEASE, clock=ground.clock
        )
        if isinstance(lease, LeaseTaken):
            fix = "wait until then; a run that was killed has ended, and the next one releases what it has left"
            raise ProvisionError(str(lease), where=f"fleet {self.fleet}", fix=fix)
        try:
            fleet = FleetId(name=self.fleet, account=ground.provisioner.account())
            claim_fleet(self.store, FleetIdentity(fleet=self.fleet, provider=self.wish.provider, account=fleet.account))
            mark_regions(self.store, self.fleet, ground.regions)
            for region in set(used_regions(self.store, self.fleet)) - set(ground.regions):
                self.on_step(f"not looked at: {region}, where earlier runs were; `coral teardown {self.fleet}` looks")
            rental = Rental(ground=ground, meeting=meeting, lease=lease, fleet=fleet, on_step=self.on_step)
            left = rental.release_all()
            if left:
                self.on_step(f"{left} nodes of an earlier run were released")
            yield rental
        finally:
            lease.give_back()


@dataclass(frozen=True, slots=True)
class Guarded:
    """`Engines` whose every question is asked under the lease, which is kept for as long as it is open."""

    engines: Engines
    guard: Callable[[], object]

    def open(self, tp: int, layers: int, *, within_s: float) -> EngineStart:
        """See `Engines`."""
        return self._asked(lambda: self.engines.open(tp, layers, within_s=within_s))

    def measure(self, shot: Shot, samples: int, *, within_s: float) -> tuple[float, ...]:
        """See `Engines`."""
        return self._asked(lambda: self.engines.measure(shot, samples, within_s=within_s))

    def _asked(self, question: Callable[[], Answer]) -> Answer:
        """In a thread that nobody waits for: one that is left by an error here ends with its node."""
        answer: Future[Answer] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # noqa: BLE001 - told to whoever asked
                answer.set_exception(error)

        self.guard()
        threading.Thread(target=ask, name="question to a profiled node", daemon=True).start()
        while not wait([answer], timeout=GUARD_S).done:
            self.guard()
        return answer.result()


def _template(key: ProfileKey) -> str:
    """What nodes' tags say they are: the profile's key, shortened."""
    text = json.dumps([key.model, key.config, key.engine_name])
    return f"profile-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
