"""What is known of a fleet across its plans (whose it is, where it has ever been) and what its runs did.

    fleets/<fleet>/identity.json, fleets/<fleet>/regions/<region>.json     written once, never removed
    plans/<fleet>/<time>/steps.json       before the first change: what a run is about to do
    plans/<fleet>/<time>/result.json      at the end: what came of it

steps.json without result.json: the run is under way, or has died. The lease tells which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from artifacts.canonical import canonical_json
from artifacts.keys import (
    fleet_group,
    fleet_identity_key,
    fleet_region_key,
    fleet_regions_group,
    parse_time,
    plan_group,
    time_text,
)
from artifacts.plans import PLAN, StoredPlan, read_plan
from artifacts.store import Store
from coral_core.errors import InputError, ProvisionError, StoreConflictError, StoreError

STEPS: Final = "steps.json"
RESULT: Final = "result.json"
_SCHEMA_VERSION: Final = 1
_SKEW: Final = timedelta(minutes=5)
"""Clocks of machines that plan differ by less."""
_DAMAGED: Final = "the record is damaged or foreign: move it away"
_STORED: Final = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

Stored = TypeVar("Stored", bound=BaseModel)


class Outcome(StrEnum):
    """How a run ended.

    `planned`: it was to change nothing. `declined`, `unanswered`: nobody approved. `outdated`: approved too late.
    `unfinished`: it has not ended, or has died. `interrupted`: it had died, and another run went on.
    """

    PLANNED = "planned"
    CONVERGED = "converged"
    UNMET = "unmet"
    DEADLINE = "deadline"
    LEASE_LOST = "lease_lost"
    FAILED = "failed"
    DECLINED = "declined"
    UNANSWERED = "unanswered"
    OUTDATED = "outdated"
    UNFINISHED = "unfinished"
    INTERRUPTED = "interrupted"


class FleetIdentity(BaseModel):
    """The cloud account that a fleet lives in, fixed by the first run that acts."""

    model_config = _STORED

    schema_version: Literal[1] = _SCHEMA_VERSION
    fleet: str
    provider: str
    account: str


class RunSteps(BaseModel):
    """What a run is about to do. `plan_id` and `epoch` make its client tokens: a rerun repeats both."""

    model_config = _STORED

    schema_version: Literal[1] = _SCHEMA_VERSION
    mode: Literal["apply", "approve", "teardown"]
    holder: str
    provider: str
    account: str
    plan_id: str
    epoch: int = Field(ge=1)
    begun_at: AwareDatetime
    cost_before_usd_per_h: float | None
    steps: tuple[str, ...]


class RunResult(BaseModel):
    """What came of a run.

    `cost_usd_per_h` is what the nodes held at its end cost (measured: nodes as listed, prices as observed); None where
    the price of one is not known or the end was not seen.
    """

    model_config = _STORED

    schema_version: Literal[1] = _SCHEMA_VERSION
    outcome: Outcome
    reason: str
    ended_at: AwareDatetime
    cost_usd_per_h: float | None = None
    nodes: tuple[Mapping[str, Any], ...] = ()
    foreign: tuple[Mapping[str, Any], ...] = ()
    failures: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """One run as recorded; `damaged` says what is wrong with a record that cannot be read."""

    time: datetime
    planned: bool
    steps: RunSteps | None = None
    result: RunResult | None = None
    damaged: str = ""

    @property
    def mode(self) -> str:
        """`plan`, `approve`, `apply` or `teardown`; a declined plan was in mode approve."""
        if self.steps is not None:
            return self.steps.mode
        return "plan" if self.result is None else "approve"

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        if self.result is not None:
            return self.result.outcome
        return Outcome.PLANNED if self.steps is None else Outcome.UNFINISHED


def claim_fleet(store: Store, identity: FleetIdentity) -> None:
    """Fix whose fleet it is, or check that it is still the same account's. Raises ProvisionError where it is not."""
    try:
        store.put_if_absent(fleet_identity_key(identity.fleet), _bytes(identity))
    except StoreConflictError:
        known = read_identity(store, identity.fleet)
        if known != identity:
            owner = "nobody" if known is None else f"account {known.account} ({known.provider})"
            raise ProvisionError(
                f"belongs to {owner}, the credentials to account {identity.account} ({identity.provider})",
                where=f"fleet {identity.fleet}",
                fix="use the fleet's own credentials and CORAL_PROVIDER, or give this fleet another name",
            ) from None


def read_identity(store: Store, fleet: str) -> FleetIdentity | None:
    """Whose fleet it is; None where no run has acted yet."""
    return _read(store, fleet_identity_key(fleet), FleetIdentity)


def mark_regions(store: Store, fleet: str, regions: Iterable[str]) -> None:
    """Note, before anything is started there, that the fleet may have nodes in these regions."""
    for region in sorted(set(regions)):
        with suppress(StoreConflictError):  # the name alone counts, whatever has become of the content
            store.put_if_absent(fleet_region_key(fleet, region), canonical_json({"fleet": fleet, "region": region}))


def used_regions(store: Store, fleet: str) -> tuple[str, ...]:
    """Every region that the fleet may ever have had nodes in, sorted."""
    keys = store.list_keys(fleet_regions_group(fleet))
    names = [key.rsplit("/", 1)[-1] for key in keys]
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def write_steps(store: Store, fleet: str, time: datetime, steps: RunSteps) -> None:
    """Record what a run is about to do. StoreConflictError where another run's record has this time."""
    store.put_once(f"{plan_group(fleet, time)}/{STEPS}", _bytes(steps))


def write_result(store: Store, fleet: str, time: datetime, result: RunResult) -> str:
    """Record what came of a run; the URL."""
    key = f"{plan_group(fleet, time)}/{RESULT}"
    store.put_once(key, _bytes(result))
    return store.url_of(key)


def read_run(store: Store, fleet: str, time: datetime) -> FleetRun:
    """The record of one run. Raises InputError where there is none, StoreError where it is damaged."""
    group = plan_group(fleet, time)
    planned = store.exists(f"{group}/{PLAN}")
    steps = _read(store, f"{group}/{STEPS}", RunSteps)
    result = _read(store, f"{group}/{RESULT}", RunResult)
    if not planned and steps is None and result is None:
        raise InputError(f"fleet {fleet} has no run of {time_text(time)}", where=store.url_of(group))
    return FleetRun(time=time, planned=planned, steps=steps, result=result)


def list_runs(
    store: Store, fleet: str, *, newest: int | None = None, since: datetime | None = None, acted: bool = False
) -> list[FleetRun]:
    """The fleet's runs, oldest first: the `newest` ones only, or those at or after `since`. Damaged ones say so.

    With `acted`, only those that were to change something. Costs a listing, and a read for each record of a run.
    """
    files = run_files(store, fleet, since=since)
    times = [time for time, names in sorted(files.items()) if STEPS in names or not acted]
    return [_listed(store, fleet, time, files[time]) for time in times[-newest if newest else 0 :]]


def plan_in_force(store: Store, fleet: str, *, now: datetime) -> StoredPlan | None:
    """The newest plan that a run set out to carry out; where none was, the newest. None where there is no plan.

    Plans that were only asked for say nothing of the fleet, nor do those dated after `now`: a clock was wrong then.
    """
    files = run_files(store, fleet)
    planned = [time for time, names in files.items() if PLAN in names and time <= now + _SKEW]
    acted = [time for time in planned if STEPS in files[time]]
    return read_plan(store, fleet, max(acted or planned)) if planned else None


def run_files(store: Store, fleet: str, *, since: datetime | None = None) -> dict[datetime, frozenset[str]]:
    """Which of a run's files lie under which time."""
    group = fleet_group(fleet)
    keys = store.list_keys(group) if since is None else store.list_keys_after(group, plan_group(fleet, since))
    found: dict[datetime, set[str]] = {}
    for key in keys:
        folder, _, name = key.removeprefix(f"{group}/").rpartition("/")
        if name not in {PLAN, STEPS, RESULT}:
            continue
        try:
            found.setdefault(parse_time(folder), set()).add(name)
        except InputError:  # a copy or anything else that people put beside the plans
            continue
    return {time: frozenset(names) for time, names in found.items()}


def _listed(store: Store, fleet: str, time: datetime, names: frozenset[str]) -> FleetRun:
    group = plan_group(fleet, time)
    try:
        return FleetRun(
            time=time,
            planned=PLAN in names,
            steps=_read(store, f"{group}/{STEPS}", RunSteps) if STEPS in names else None,
            result=_read(store, f"{group}/{RESULT}", RunResult) if RESULT in names else None,
        )
    except StoreError as error:
        return FleetRun(time=time, planned=PLAN in names, damaged=str(error))


def _bytes(record: BaseModel) -> bytes:
    return canonical_json(record.model_dump())


def _read(store: Store, key: str, shape: type[Stored]) -> Stored | None:
    data = store.find(key)
    if data is None:
        return None
    try:
        return shape.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = store.url_of(key)
        raise StoreError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", where=where, fix=_DAMAGED) from None
