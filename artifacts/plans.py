"""Plan records: what was decided, why, and a report, such that a plan can be replayed exactly.

plan.json is written last and holds the hashes of the others and of its own plan: where it is, the record is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from artifacts.canonical import canonical_json, parsed_object, sha256_hex
from artifacts.keys import fleet_group, found_time, is_name, plan_group, time_text
from artifacts.library import require_not_retired
from artifacts.store import Store
from coral_core.errors import InputError, StoreError

PLAN: Final = "plan.json"
DECISION: Final = "decision.json"
REPORT: Final = "report.md"
PAGE: Final = "report.html"
"""The report as one HTML file; plans made without what makes it have none."""
_SCHEMA_VERSION: Final = 2
_DAMAGED: Final = "the plan is damaged or foreign: remove its folder, or name another plan's time"
_OPEN: Final = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Where a plan's files lie and what is in them: `keys`, `urls` and `sha256` by file name."""

    fleet: str
    time: datetime
    keys: Mapping[str, str]
    urls: Mapping[str, str]
    sha256: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A plan as it was recorded."""

    record: PlanRecord
    plan: Mapping[str, Any]
    decision: Mapping[str, Any]
    report_md: str


class _Instance(BaseModel):
    """What whoever goes on from a plan needs of one template in one region."""

    model_config = _OPEN

    template: str
    region: str
    count: int = Field(ge=1)


class _Shortfall(BaseModel):
    model_config = _OPEN

    model: str
    phase: str
    frac: float


class _Plan(BaseModel):
    """What every reader of a plan relies upon; there is more in it."""

    model_config = _OPEN

    scenario: str
    status: str
    cost_usd_per_h: float
    churn_usd_per_h: float
    objective_usd_per_h: float
    instances: tuple[_Instance, ...]
    shortfall: tuple[_Shortfall, ...]


class _Snapshot(BaseModel):
    model_config = _OPEN

    name: str
    version: int = Field(ge=1)


class _Decision(BaseModel):
    """What every reader of a decision relies upon; there is more in it."""

    model_config = _OPEN

    library: _Snapshot
    explanation: Mapping[str, JsonValue]


class _PlanFile(BaseModel):
    """plan.json: the plan with its hash, and the hashes of the files beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int
    fleet: str
    time: AwareDatetime
    sha256: Mapping[str, str]
    plan_sha256: str
    plan: Mapping[str, JsonValue]


def write_plan(
    store: Store,
    fleet: str,
    time: datetime,
    *,
    plan: Mapping[str, Any],
    decision: Mapping[str, Any],
    report_md: str,
    report_html: str | None = None,
) -> PlanRecord:
    """Record a plan; repeating the same call is harmless.

    Raises InputError for content that JSON cannot hold exactly (NaN, unknown types) and where something is missing that
    readers rely upon (the key path is named), StoreConflictError where another plan has the same fleet and time, or
    retention is removing the library's version that this one needs.
    """
    content = canonical_json(plan)
    for shape, data, where in ((_Plan, content, "plan"), (_Decision, canonical_json(decision), "decision")):
        lacks = _lacks(shape, data)
        if lacks:
            raise InputError(lacks, where=where)
    beside = {DECISION: canonical_json(decision), REPORT: report_md.encode()}
    if report_html is not None:
        beside[PAGE] = report_html.encode()
    hashes = {name: sha256_hex(data) for name, data in beside.items()}
    whole = {
        "schema_version": _SCHEMA_VERSION,
        "fleet": fleet,
        "time": time,
        "sha256": hashes,
        "plan_sha256": sha256_hex(content),
        "plan": plan,
    }
    files = {**beside, PLAN: canonical_json(whole)}
    record = _record(store, fleet, time, {**hashes, PLAN: sha256_hex(files[PLAN])})
    store.put_once(record.keys[DECISION], files[DECISION])
    # Now that retention can see what this plan needs: either it spares that, or it was quicker and shows here.
    library = _Decision.model_validate_json(files[DECISION], strict=True).library
    require_not_retired(store, library.name, library.version)
    for name, data in files.items():
        store.put_once(record.keys[name], data)
    return record


def read_plan(store: Store, fleet: str, time: datetime | None = None) -> StoredPlan:
    """The plan of this time, the latest where None, checked against its hashes.

    Raises InputError where there is none, StoreError where a file is missing, changed or foreign, or lacks something
    that readers rely upon.
    """
    if time is None:
        times = list_plans(store, fleet)
        if not times:
            raise InputError("the fleet has no plan", where=store.url_of(fleet_group(fleet)), fix="make one first")
        time = times[-1]
    key = f"{plan_group(fleet, time)}/{PLAN}"
    where = store.url_of(key)
    data = store.find(key)
    if data is None:
        raise InputError(f"fleet {fleet} has no plan of {time_text(time)}", where=where, fix="list the plans' times")
    stated = parsed_object(data, where=where, fix=_DAMAGED)
    if stated.get("schema_version") != _SCHEMA_VERSION:
        version = stated.get("schema_version")
        raise StoreError(f"has schema version {version!r}, not {_SCHEMA_VERSION}", where=where, fix=_DAMAGED)
    lacks = _lacks(_PlanFile, data)
    if lacks:
        raise StoreError(lacks, where=where, fix=_DAMAGED)
    file = _PlanFile.model_validate_json(data, strict=True)
    if (file.fleet, file.time) != (fleet, time) or set(file.sha256) - {PAGE} != {DECISION, REPORT}:
        raise StoreError(f"is not the plan of {fleet} at {time_text(time)}", where=where, fix=_DAMAGED)
    content = canonical_json(stated["plan"])
    if sha256_hex(content) != file.plan_sha256:
        raise StoreError("its plan is not the one that was recorded: it was changed later", where=where, fix=_DAMAGED)
    record = _record(store, fleet, time, {**file.sha256, PLAN: sha256_hex(data)})
    beside = {name: _verified(store, record, name) for name in (DECISION, REPORT)}
    for shape, text, name in ((_Plan, content, PLAN), (_Decision, beside[DECISION], DECISION)):
        lacks = _lacks(shape, text)
        if lacks:
            raise StoreError(lacks, where=record.urls[name], fix=_DAMAGED)
    return StoredPlan(
        record=record,
        plan=file.plan,
        decision=parsed_object(beside[DECISION], where=record.urls[DECISION], fix=_DAMAGED),
        report_md=beside[REPORT].decode(),
    )


def list_plans(store: Store, fleet: str) -> list[datetime]:
    """Times of the fleet's whole plans, oldest first."""
    group = fleet_group(fleet)
    found = []
    for key in store.list_keys(group):
        folder, _, name = key.removeprefix(f"{group}/").rpartition("/")
        if name == PLAN and (time := found_time(folder)) is not None:
            found.append(time)
    return sorted(found)


def list_fleets(store: Store) -> list[str]:
    """Names of the fleets that have plans, sorted; groups with other names are not ours."""
    return [name for name in store.list_groups("plans") if is_name(name)]


def _record(store: Store, fleet: str, time: datetime, sha256: Mapping[str, str]) -> PlanRecord:
    group = plan_group(fleet, time)
    keys = {name: f"{group}/{name}" for name in (PLAN, DECISION, REPORT, PAGE) if name in sha256}
    urls = {name: store.url_of(key) for name, key in keys.items()}
    return PlanRecord(fleet=fleet, time=time, keys=keys, urls=urls, sha256=sha256)


def _lacks(shape: type[BaseModel], data: bytes) -> str:
    """The first thing in the JSON that is not as `shape` has it, with its key path; empty where all is."""
    try:
        shape.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""


def _verified(store: Store, record: PlanRecord, name: str) -> bytes:
    data = store.get(record.keys[name])
    if sha256_hex(data) != record.sha256[name]:
        raise StoreError("is not what its plan.json names", where=record.urls[name], fix=_DAMAGED)
    return data
