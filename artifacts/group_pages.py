"""index.md of groups that have no page of their own making: evaluations, leases, fleets, profiles. Best effort.

A page lists the groups and objects directly in its group, newest (last by name) first, with links relative to itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from artifacts.keys import INDEX, index_key
from artifacts.store import Entry, Store
from coral_core.errors import CoralError

_LOG: Final = logging.getLogger(__name__)
_NEWEST: Final = 20
Item = TypeVar("Item")
_TITLES: Final = {
    "demand": "Demand: what was asked of each fleet, as measured, by day",
    "evaluations": "Evaluations: settings and policies compared in the simulator",
    "fleets": "Fleets: what was observed and done",
    "leases": "Leases: who may change a fleet, epoch by epoch",
    "profiles": "Profiles: measured layer times, by model, node configuration and engine",
}


def index_group(store: Store, group: str) -> bool:
    """Regenerate the page of the group and of each group above it; False, with a warning logged, where that failed."""
    parts = group.split("/")
    try:
        for depth in range(len(parts), 0, -1):  # the inner page first: the outer one links to it
            part = "/".join(parts[:depth])
            store.put(index_key(part), group_page(store, part).encode())
    except CoralError as error:
        _LOG.warning("index pages were not written: %s", error)
        return False
    return True


def group_page(store: Store, group: str) -> str:
    """What lies directly in the group, as Markdown. Raises StoreError where the store fails."""
    groups, entries = store.browse(group)
    objects = [entry for entry in entries if not entry.key.endswith(f"/{INDEX}")]
    lines = [f"# {_TITLES.get(group, group)}\n"]
    if groups:
        lines += ["| group | what lies there |", "| --- | --- |", *_group_rows(store, group, groups)]
    if objects:
        lines += [""] if groups else []
        lines += ["| object | size | written (UTC) |", "| --- | --- | --- |", *map(_object_row, _newest(objects))]
    if max(len(groups), len(objects)) > _NEWEST:
        lines.append(f"\nThe newest {_NEWEST} of {len(groups)} groups and {len(objects)} objects.")
    if not groups and not objects:
        lines.append("Empty.")
    return "\n".join(lines) + "\n"


def _group_rows(store: Store, group: str, groups: list[str]) -> Iterator[str]:
    """A group with a page links to it, one without to its objects."""
    for name in _newest(groups):
        if group == "leases":  # of which there may be very many objects
            yield f"| {name}/ | one object for each epoch, the newest last |"
            continue
        inner, entries = store.browse(f"{group}/{name}")
        names = [entry.key.rpartition("/")[2] for entry in entries]
        if INDEX in names:
            yield f"| [{name}]({name}/{INDEX}) | |"
            continue
        links = [f"[{found}]({name}/{found})" for found in _newest(names)] + [f"{found}/" for found in _newest(inner)]
        yield f"| {name} | {', '.join(links)} |"


def _object_row(entry: Entry) -> str:
    name = entry.key.rpartition("/")[2]
    return f"| [{name}]({name}) | {size_text(entry.size_bytes)} | {entry.modified:%Y-%m-%d %H:%M:%S} |"


def _newest(items: Sequence[Item]) -> list[Item]:
    return list(items[::-1][:_NEWEST])


def size_text(size_bytes: int) -> str:
    """A size for people: `512 B`, `1.5 KiB`, `2.0 GiB`."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:,.1f} {unit}" if unit != "B" else f"{size_bytes} B"
