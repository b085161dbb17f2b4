"""Steps that a profiling run has measured, kept one by one, so that a run that was killed goes on where it was.

Key: `profiles/<model>/<config>/<engine>/steps/<shot>/<time>.json`. What was measured before the group's newest profile was
written has gone into that one, and counts no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from artifacts.keys import found_time, profile_group, time_text
from artifacts.store import Store
from coral_core.domain.workload import Phase
from coral_core.errors import StoreError
from coral_core.perf.profile import ProfileKey
from coral_core.perf.profiling import EngineStart, Shot, ShotTimes

_STEPS: Final = "steps"
_START: Final = "start"


def write_times(store: Store, key: ProfileKey, times: ShotTimes, *, at: datetime) -> None:
    """Keep what was measured of a shot."""
    _write(store, key, times.shot.name, {"samples_s": list(times.samples_s), **_of_shot(times.shot)}, at)


def write_start(store: Store, key: ProfileKey, start: EngineStart, *, at: datetime) -> None:
    """Keep what an engine said when it had started."""
    document = {"tp": start.tp, "layers": start.layers, "kv_tokens": start.kv_tokens, "start_s": start.start_s}
    _write(store, key, f"{_START}-tp{start.tp}-layers{start.layers}", document, at)


def kept_times(store: Store, key: ProfileKey, shots: Iterable[Shot]) -> dict[Shot, ShotTimes]:
    """Those of `shots` that are there since the newest profile."""
    documents = _newest(store, key)
    found: dict[Shot, ShotTimes] = {}
    for shot in shots:
        document = documents.get(shot.name)
        if document is not None:
            found[shot] = ShotTimes(shot=shot, samples_s=tuple(document["samples_s"]))
    return found


def kept_starts(store: Store, key: ProfileKey) -> tuple[EngineStart, ...]:
    """What engines said since the newest profile."""
    return tuple(
        EngineStart(**document) for name, document in sorted(_newest(store, key).items()) if name.startswith(_START)
    )


def _newest(store: Store, key: ProfileKey) -> dict[str, dict[str, Any]]:
    """The newest document by name, of those younger than the newest profile."""
    group = profile_group(key.model, key.config, key.engine_name)
    keys = store.list_keys(group)
    profiles = [time for name in keys if (time := found_time(_stem(name, ".parquet"))) is not None]
    newest: dict[str, tuple[datetime, str]] = {}
    for name in keys:
        folder, _, file = name.rpartition("/")
        time = found_time(_stem(file, ".json"))
        if time is None or not folder.startswith(f"{group}/{_STEPS}/") or (profiles and time <= max(profiles)):
            continue
        what = folder.rpartition("/")[2]
        if what not in newest or newest[what][0] < time:
            newest[what] = (time, name)
    return {what: _read(store, name) for what, (_, name) in newest.items()}


def _stem(key: str, ending: str) -> str:
    name = key.rpartition("/")[2]
    return name.removesuffix(ending) if name.endswith(ending) else ""


def _read(store: Store, key: str) -> dict[str, Any]:
    try:
        document = dict(json.loads(store.get(key)))
        if f"/{_STEPS}/{_START}" in key:
            EngineStart(**document)
        else:
            document["samples_s"] = [float(value) for value in document["samples_s"]]
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"is no measured step: {error}", where=store.url_of(key), fix="delete it") from None
    return document


def _write(store: Store, key: ProfileKey, name: str, document: dict[str, Any], at: datetime) -> None:
    group = profile_group(key.model, key.config, key.engine_name)
    store.put(f"{group}/{_STEPS}/{name}/{time_text(at)}.json", (json.dumps(document) + "\n").encode())


def _of_shot(shot: Shot) -> dict[str, object]:
    facts = {"tp": shot.tp, "layers": shot.layers, "requests": shot.requests, "tokens": shot.tokens}
    return {**facts, "phase": Phase(shot.phase).value}
