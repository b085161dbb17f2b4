"""Which plans and evaluations may be removed, and their removal. Each is a folder named by its time.

Kept are the newest whole ones, whatever was written not long ago (plans and reports in the making), and of plans those
that the running fleet may come from: every run that acted since, and with, the last one that converged. The file that
makes a record whole goes first, so that a crash leaves remains that nobody reads and the next run removes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from artifacts.evaluations import SUMMARY
from artifacts.fleets import RESULT, STEPS, Outcome
from artifacts.keys import fleet_group, found_time, scenario_group
from artifacts.plans import PLAN
from artifacts.retention import Rule
from artifacts.store import Entry, Store

_WHOLE: Final = {"plans": PLAN, "evaluations": SUMMARY}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRemoval:
    """What retention would remove of a group of records: folders, and their objects in the order in which they go."""

    group: str
    kept: Mapping[str, str]
    folders: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all that would go."""
        return sum(entry.size_bytes for entry in self.entries)


def plan_plans_removal(store: Store, fleet: str, rule: Rule, now: datetime) -> RecordRemoval:
    """Which plans of the fleet the rule lets go of; changes nothing. Raises StoreError where the store fails."""
    return _planned(store, fleet_group(fleet), rule, now)


def plan_evaluations_removal(store: Store, scenario: str, rule: Rule, now: datetime) -> RecordRemoval:
    """Which evaluations of the scenario the rule lets go of; changes nothing. Raises StoreError where the store fails."""
    return _planned(store, scenario_group(scenario), rule, now)


def remove_records(store: Store, removal: RecordRemoval) -> None:
    """Remove what was planned; safe to repeat after a crash."""
    for entry in removal.entries:
        store.delete(entry.key)


def _planned(store: Store, group: str, rule: Rule, now: datetime) -> RecordRemoval:
    folders: dict[str, list[Entry]] = {}
    for entry in store.list_entries(group):
        folder, _, rest = entry.key.removeprefix(f"{group}/").partition("/")
        if rest and found_time(folder) is not None:  # what people leave beside the records is not ours
            folders.setdefault(folder, []).append(entry)
    whole = _WHOLE[group.partition("/")[0]]
    names = {
        folder: {entry.key.removeprefix(f"{group}/{folder}/") for entry in found} for folder, found in folders.items()
    }
    newest = [folder for folder in sorted(folders, reverse=True) if whole in names[folder]][: rule.keep]
    running = _running(store, group, names)
    kept: dict[str, str] = {}
    for folder in sorted(folders):
        written = max(entry.modified for entry in folders[folder])
        if folder in newest:
            kept[folder] = f"one of the newest {rule.keep}"
        elif folder in running:
            kept[folder] = "the fleet may run from it"
        elif written >= rule.before(now):
            kept[folder] = f"written at {written:%Y-%m-%d %H:%M} UTC only"
    going = tuple(folder for folder in sorted(folders) if folder not in kept)
    ordered = [
        entry
        for folder in going
        for entry in sorted(folders[folder], key=lambda entry: (not entry.key.endswith(f"/{whole}"), entry.key))
    ]
    return RecordRemoval(group=group, kept=kept, folders=going, entries=tuple(ordered))


def _running(store: Store, group: str, names: Mapping[str, Iterable[str]]) -> set[str]:
    """Folders of the runs that acted, back to the last that converged."""
    running: set[str] = set()
    for folder in sorted(names, reverse=True):
        if STEPS in names[folder]:
            running.add(folder)
            if RESULT in names[folder] and _converged(store.find(f"{group}/{folder}/{RESULT}")):
                break
    return running


def _converged(result: bytes | None) -> bool:
    """Whether a run reached its plan; one whose result cannot be read has not been seen to."""
    try:
        found = json.loads(result or b"null")
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("outcome") == Outcome.CONVERGED
