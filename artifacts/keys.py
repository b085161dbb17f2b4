"""Where everything lies in the store (DESIGN 5). Every name that enters a key is checked; nothing else builds keys."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError

INDEX: Final = "index.md"
VERSION_DIGITS: Final = 20
_ABSURD_VERSION: Final = 10**15
"""No library gets there by counting, so the versions after it, for which keys have room, are never needed."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_HASH: Final = re.compile(r"[0-9a-f]{16,64}")
_TIME_FORMAT: Final = "%Y%m%dT%H%M%S.%fZ"


def checked_name(name: str, what: str) -> str:
    """`name`, if it can be one part of a key on every store: letters, digits and `. _ + -`, at most 128.

    Raises InputError, naming `what` it is.
    """
    if not is_name(name):
        raise InputError(
            f"{name!r} cannot be a name in the store",
            where=what,
            fix="use letters, digits and . _ + -, starting with a letter or digit, at most 128",
        )
    return name


def is_name(text: str) -> bool:
    """Whether this can be a name in the store; what people and their tools leave beside our groups often cannot."""
    return _NAME.fullmatch(text) is not None


def slo_text(slo: Slo) -> str:
    """The SLO as part of a key, exact: `ttft1.5s-tpot0.05s`."""
    for what, value in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s)):
        if not 0 < value < float("inf"):
            raise InputError(f"{value!r} is not a positive number of seconds", where=f"slo.{what}")
    return f"ttft{float(slo.ttft_s)!r}s-tpot{float(slo.tpot_s)!r}s"


def time_text(time: datetime) -> str:
    """UTC to the microsecond; sorts as the time does. Raises InputError for a time without a zone."""
    if time.tzinfo is None:
        raise InputError(f"{time.isoformat()} has no time zone", where="time", fix="give an aware time")
    return time.astimezone(UTC).strftime(_TIME_FORMAT)


def parse_time(text: str) -> datetime:
    """The inverse of `time_text`. Raises InputError."""
    try:
        return datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        raise InputError(
            f"{text!r} is not a time of the store", where="time", fix="write it as 20301231T235959.000000Z"
        ) from None


def found_time(folder: str) -> datetime | None:
    """The time that a folder of ours stands for; None for a copy or anything else that people put beside them."""
    try:
        time = parse_time(folder)
    except InputError:
        return None
    return time if time_text(time) == folder else None


def profile_group(model: str, config: str, engine: str) -> str:
    """Measured layer times of one model on one node configuration by one engine version."""
    return f"profiles/{checked_name(model, 'model')}/{checked_name(config, 'config')}/{checked_name(engine, 'engine')}"


def library_group(library: str) -> str:
    """All of one library."""
    return f"libraries/{checked_name(library, 'library')}"


def shard_key(
    library: str,
    *,
    model: str,
    variant: str,
    phase: Phase,
    slo: Slo,
    method: str,
    part: int,
    parts: int,
    inputs_hash: str,
    repair: int = 0,
) -> str:
    """The data file of one shard, named by the hash of what went into it, so that a rebuild finds and reuses it.

    `repair` tells those files apart that were written because all before were damaged.
    """
    if not 0 <= part < parts:
        raise InputError(f"part {part} of {parts} does not exist", where="shard")
    if not _HASH.fullmatch(inputs_hash):
        raise InputError(f"{inputs_hash!r} is not a hash of 16 to 64 hex digits", where="shard.inputs_hash")
    return (
        f"{library_group(library)}/data/model={checked_name(model, 'model')}/phase={phase.value}/slo={slo_text(slo)}/"
        f"part-{checked_name(variant, 'variant')}-{checked_name(method, 'method')}-"
        f"{part:05d}-of-{parts:05d}-{inputs_hash[:32]}{f'-repair{repair}' if repair else ''}.parquet"
    )


def is_shard_key(key: str) -> bool:
    """Whether the key can be a shard's; what people leave beside the data files is none."""
    name = key.rsplit("/", 1)[-1]
    return name.startswith("part-") and name.endswith(".parquet")


def manifest_group(library: str) -> str:
    """The manifests of all snapshots of a library."""
    return f"{library_group(library)}/manifests"


def manifest_key(library: str, version: int) -> str:
    """The manifest of one snapshot; versions start at 1 and the newest sorts last."""
    if not 1 <= version < 10**VERSION_DIGITS:
        raise InputError(f"{version} is not a version", where=f"library {library}", fix="versions start at 1")
    return f"{manifest_group(library)}/{version:0{VERSION_DIGITS}d}.json"


def manifest_version(key: str) -> int | None:
    """The version that a key of the manifests' group stands for; None where no commit can have made such a key."""
    name = key.rsplit("/", 1)[-1]
    stem = name.removesuffix(".json")
    is_manifest = name != stem and len(stem) == VERSION_DIGITS and stem.isascii() and stem.isdigit()
    return int(stem) if is_manifest and 0 < int(stem) < _ABSURD_VERSION else None


def fleet_group(fleet: str) -> str:
    """All plans of one fleet."""
    return f"plans/{checked_name(fleet, 'fleet')}"


def plan_group(fleet: str, time: datetime) -> str:
    """One plan of a fleet."""
    return f"{fleet_group(fleet)}/{time_text(time)}"


def scenario_group(scenario: str) -> str:
    """All evaluations of one scenario."""
    return f"evaluations/{checked_name(scenario, 'scenario')}"


def demand_group(fleet: str, day: datetime | None = None) -> str:
    """Measured demand of one fleet; of one UTC day of it."""
    group = f"demand/{checked_name(fleet, 'fleet')}"
    return group if day is None else f"{group}/{time_text(day)[:8]}"


def demand_key(fleet: str, time: datetime, source: str) -> str:
    """Samples of demand of which the last ends at `time`, by one writer."""
    return f"{demand_group(fleet, time)}/{time_text(time)}-{checked_name(source, 'source')}.jsonl"


def demand_time(key: str) -> datetime | None:
    """When the last sample of an object of demand ends; None where the name is none of ours."""
    name = key.rsplit("/", 1)[-1]
    try:
        return parse_time(name.partition("-")[0]) if name.endswith(".jsonl") else None
    except InputError:
        return None


def evaluation_group(scenario: str, time: datetime) -> str:
    """Tables, charts and report of one evaluation."""
    return f"{scenario_group(scenario)}/{time_text(time)}"


def lease_key(name: str, epoch: int) -> str:
    """One epoch of a lease; the newest sorts last."""
    if not 0 <= epoch < 10**VERSION_DIGITS:
        raise InputError(f"{epoch} is not an epoch", where=f"lease {name}")
    return f"{lease_group(name)}/{epoch:0{VERSION_DIGITS}d}.json"


def lease_group(name: str) -> str:
    """All epochs of a lease."""
    return f"leases/{checked_name(name, 'lease')}"


def fleet_facts_group(fleet: str) -> str:
    """What is known of a fleet across its plans: whose it is, and where it has ever been."""
    return f"fleets/{checked_name(fleet, 'fleet')}"


def fleet_identity_key(fleet: str) -> str:
    """Provider and account of a fleet."""
    return f"{fleet_facts_group(fleet)}/identity.json"


def fleet_regions_group(fleet: str) -> str:
    """One mark for each region that the fleet may ever have had nodes in."""
    return f"{fleet_facts_group(fleet)}/regions"


def fleet_region_key(fleet: str, region: str) -> str:
    """The mark of one region."""
    return f"{fleet_regions_group(fleet)}/{checked_name(region, 'region')}.json"


def index_key(group: str) -> str:
    """The page that says what lies in a group."""
    return f"{group}/{INDEX}"
