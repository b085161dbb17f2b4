"""index.md beside each group, for whoever browses the bucket. Regenerated, best effort, never read by the product."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from artifacts.group_pages import group_page
from artifacts.keys import INDEX, fleet_group, index_key, library_group, manifest_key, plan_group, time_text
from artifacts.library import list_libraries, list_versions, read_manifest
from artifacts.plans import DECISION, PAGE, PLAN, REPORT, list_fleets, list_plans
from artifacts.store import Store
from coral_core.errors import CoralError, StoreError

_LOG: Final = logging.getLogger(__name__)
_NEWEST: Final = 20

_GROUPS: Final = {
    "demand": "what was asked of each fleet, as measured",
    "profiles": "measured layer times",
    "libraries": "serving templates, in versioned snapshots",
    "plans": "what was decided for each fleet, and why",
    "evaluations": "simulated comparisons",
    "fleets": "whose each fleet is, and where it has been",
    "leases": "who may change a fleet at present",
}
_WITHOUT_OWN_PAGES: Final = ("profiles", "demand", "fleets", "leases")


def index_libraries(store: Store, library: str) -> bool:
    """Regenerate the pages of a library and of all libraries; False, with a warning logged, where that failed."""
    return _best_effort(
        store,
        {
            "libraries": lambda: _libraries_page(store),
            library_group(library): lambda: _library_page(store, library),
        },
    )


def index_plans(store: Store, fleet: str) -> bool:
    """Regenerate the pages of a fleet and of all fleets; False, with a warning logged, where that failed."""
    return _best_effort(
        store,
        {"plans": lambda: _fleets_page(store), fleet_group(fleet): lambda: _fleet_page(store, fleet)},
    )


def _best_effort(store: Store, pages: dict[str, Callable[[], str]]) -> bool:
    try:
        for group, page in pages.items():
            store.put(index_key(group), page().encode())
        there = store.list_groups("")
        for group in _WITHOUT_OWN_PAGES:
            if group in there:
                store.put(index_key(group), group_page(store, group).encode())
        store.put(INDEX, _root_page(store, there).encode())
    except CoralError as error:
        _LOG.warning("index pages were not written: %s", error)
        return False
    return True


def _root_page(store: Store, there: Collection[str]) -> str:
    rows = []
    for group, text in _GROUPS.items():
        if group in there:
            has_page = store.exists(index_key(group))
            rows.append((f"[{group}/]({index_key(group)})" if has_page else f"{group}/", text))
    return (
        "# Coral's store\n\n"
        + _table(("group", "what lies there"), rows)
        + "\nNothing here is changed after it was written, but the index pages. Do not edit or move single files.\n"
    )


def _libraries_page(store: Store) -> str:
    rows = [(f"[{name}]({name}/index.md)", list_versions(store, name)[-1]) for name in list_libraries(store)]
    return "# Template libraries\n\n" + _table(("library", "newest version"), rows)


def _library_page(store: Store, library: str) -> str:
    versions = list_versions(store, library)
    rows: list[tuple[object, ...]] = []
    for version in reversed(versions[-_NEWEST:]):
        link = f"[{version}]({manifest_key(library, version).removeprefix(f'{library_group(library)}/')})"
        try:
            manifest = read_manifest(store, library, version)
        except StoreError:
            rows.append((link, "", "", "", "damaged"))
            continue
        state = f"partial: {manifest.shards_failed} shards failed" if manifest.partial else "whole"
        rows.append((link, time_text(manifest.created_at), manifest.rows, manifest.shards_present, state))
    return (
        f"# Library {library}\n\n"
        "One row of the Parquet files under data/ is one serving template. A snapshot is the files that its manifest "
        "names, no others: the same folder holds those of older snapshots.\n\n"
        + _table(("version", "created", "templates", "shards", "state"), rows)
        + (f"\nThe newest {_NEWEST} of {len(versions)} versions.\n" if len(versions) > _NEWEST else "")
    )


def _fleets_page(store: Store) -> str:
    return "# Plans\n\n" + _table(("fleet",), [(f"[{name}]({name}/index.md)",) for name in list_fleets(store)])


def _fleet_page(store: Store, fleet: str) -> str:
    times, keys = list_plans(store, fleet), set(store.list_keys(fleet_group(fleet)))
    rows = []
    for time in reversed(times[-_NEWEST:]):
        group = plan_group(fleet, time)
        folder = group.removeprefix(f"{fleet_group(fleet)}/")
        links = {name: f"[{name}]({folder}/{name})" for name in (PAGE, REPORT, PLAN, DECISION)}
        reports = [links[name] for name in (PAGE, REPORT) if f"{group}/{name}" in keys]
        rows.append((folder, ", ".join(reports), links[PLAN], links[DECISION]))
    return (
        f"# Plans of fleet {fleet}\n\n"
        + _table(("time", "report", "plan", "decision"), rows)
        + (f"\nThe newest {_NEWEST} of {len(times)} plans.\n" if len(times) > _NEWEST else "")
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
