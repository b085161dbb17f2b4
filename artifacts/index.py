"""index.md beside each group, for whoever browses the bucket. Regenerated, best effort, never read by the product."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from artifacts.keys import fleet_group, index_key, library_group, manifest_key, plan_group, time_text
from artifacts.library import list_libraries, list_versions, read_manifest
from artifacts.plans import DECISION, PAGE, PLAN, REPORT, list_fleets, list_plans
from artifacts.store import Store
from coral_core.errors import CoralError, StoreError

_LOG: Final = logging.getLogger(__name__)
_NEWEST: Final = 20

_ROOT: Final = """# Coral's store

| group | what lies there |
| --- | --- |
| [profiles/](profiles/index.md) | measured layer times |
| [libraries/](libraries/index.md) | serving templates, in versioned snapshots |
| [plans/](plans/index.md) | what was decided for each fleet, and why |
| [evaluations/](evaluations/index.md) | simulated comparisons |
| [fleets/](fleets/index.md) | what was observed of each fleet, and done |
| [leases/](leases/index.md) | who may change a fleet at present |

Nothing here is changed after it was written, but the index pages. Do not edit or move single files.
"""


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
        store.put("index.md", _ROOT.encode())
        for group, page in pages.items():
            store.put(index_key(group), page().encode())
    except CoralError as error:
        _LOG.warning("index pages were not written: %s", error)
        return False
    return True


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
