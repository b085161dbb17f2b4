"""What `coral library gc` and `coral artifacts gc` share: options, and the two ways of removing."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.clock import SystemClock
from coral_core.errors import InputError

if TYPE_CHECKING:
    from artifacts.store import Store

Keep = Annotated[int, Parameter(help="How many of the newest stay in any case.")]
OlderThan = Annotated[
    timedelta, Parameter(help="Only what has not been in use for so long (30d, 12h); never less than a day.")
]
Yes = Annotated[bool, Parameter(negative="", help="Remove; without it, only say what would go.")]
DryRun = Annotated[bool, Parameter(negative="", help="Only say what would go, whatever else is given.")]
DEFAULT_KEEP = 3
DEFAULT_OLDER_THAN = timedelta(days=30)


def remove_from_library(
    store: Store, library: str, keep: int, older_than: timedelta, *, yes: bool, as_json: bool
) -> None:
    """Say what goes of a library, and remove it where `yes`."""
    from artifacts.group_pages import size_text
    from artifacts.index import index_libraries
    from artifacts.retention import Rule, plan_removal, remove_unneeded

    rule, clock = Rule(keep=keep, older_than=older_than), SystemClock()
    if yes:
        removal = remove_unneeded(store, library, rule, clock)
        index_libraries(store, library)
    else:
        removal = plan_removal(store, library, rule, clock.now())
    if as_json:
        print_json(
            {
                "library": library,
                "removed": yes,
                "versions": list(removal.versions),
                "files": [entry.key for entry in removal.files],
                "size_bytes": removal.size_bytes,
                "kept": [{"version": kept.version, "reason": kept.reason} for kept in removal.kept],
                "waiting_files": removal.waiting,
            }
        )
        return
    word = "removed" if yes else "would go"
    rows: list[tuple[object, ...]] = [(str(kept.version), "stays", kept.reason) for kept in removal.kept]
    rows += [(str(version), word, "") for version in removal.versions]
    print_table(f"Library {library}", ("version", "", "why"), sorted(rows, key=lambda row: int(str(row[0]))))
    print_text(f"{len(removal.files)} data files of {size_text(removal.size_bytes)} that no kept version needs: {word}")
    if removal.waiting:
        print_text(f"{removal.waiting} more are too young to go: a build under way may need them")
    _note_dry_run(yes=yes, something=bool(removal.keys))


def remove_from_records(
    store: Store, group: str, keep: int, older_than: timedelta, *, yes: bool, as_json: bool
) -> None:
    """Say what goes of a fleet's plans or a scenario's evaluations, and remove it where `yes`."""
    from artifacts.group_pages import index_group, size_text
    from artifacts.index import index_plans
    from artifacts.record_retention import plan_evaluations_removal, plan_plans_removal, remove_records
    from artifacts.retention import Rule

    kind, _, name = group.partition("/")
    plan: Any = plan_plans_removal if kind == "plans" else plan_evaluations_removal
    removal = plan(store, name, Rule(keep=keep, older_than=older_than), SystemClock().now())
    if not removal.kept and not removal.folders:
        raise InputError("nothing is recorded here", where=store.url_of(group), fix=f"see `coral artifacts ls {kind}`")
    if yes:
        remove_records(store, removal)
        index_plans(store, name) if kind == "plans" else index_group(store, group)
    if as_json:
        print_json(
            {
                "group": group,
                "removed": yes,
                "folders": list(removal.folders),
                "size_bytes": removal.size_bytes,
                "kept": [{"folder": folder, "reason": reason} for folder, reason in removal.kept.items()],
            }
        )
        return
    word = "removed" if yes else "would go"
    rows = [(folder, "stays", reason) for folder, reason in removal.kept.items()]
    rows += [(folder, word, "") for folder in removal.folders]
    print_table(removal.group, ("time", "", "why"), sorted(rows))
    print_text(f"{len(removal.folders)} of {len(rows)} records, {size_text(removal.size_bytes)}: {word}")
    _note_dry_run(yes=yes, something=bool(removal.folders))


def _note_dry_run(*, yes: bool, something: bool) -> None:
    if something and not yes:
        print_note("nothing was removed: --yes does it")
