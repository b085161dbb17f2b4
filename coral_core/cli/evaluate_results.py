"""`coral evaluate assumptions` and `coral evaluate tables`: what ratios hang on, and results as Markdown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from coral_core.cli.evaluate_scenario import Scenario
from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.work import choose_executor, library_progress, open_configured_store, resolved_scenario
from coral_core.errors import InputError, NoSolutionError

if TYPE_CHECKING:
    from artifacts.library import LibrarySnapshot
    from coral_core.config.resolve import ResolvedScenario


def assumptions(
    scenario: Scenario = "tiny",
    *,
    only: Annotated[
        tuple[str, ...], Parameter(help="Which to change; default: all.", consume_multiple=True, negative="")
    ] = (),
    policies: Annotated[
        tuple[str, ...], Parameter(help="Beside coral; default: all but helix.", consume_multiple=True, negative="")
    ] = (),
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Change one assumption at a time, and see what the others cost beside coral (predicted, first epoch, ample supply).

    Libraries are built where a change needs one. Exit code 3 where a change cannot be planned; the others are shown.
    """
    from coral_core import __version__
    from coral_core.config.settings import load_settings
    from coral_core.report.results_tables import assumptions_table
    from tasks.assumptions import ASSUMPTIONS, POLICIES, AssumptionRun, assumption_rows
    from tasks.library import build_spec_from_scenario
    from tasks.template_source import fresh_library

    opened = open_configured_store(store)

    def snapshot(resolved: ResolvedScenario) -> LibrarySnapshot:
        executor = choose_executor("auto", workers=os.cpu_count() or 1, spec=build_spec_from_scenario(resolved))
        with library_progress(resolved.scenario.library_name, quiet=as_json) as on_progress:
            return fresh_library(resolved, opened, executor, on_progress=on_progress)

    run = AssumptionRun(names=only or tuple(ASSUMPTIONS), policies=policies or POLICIES)
    base = resolved_scenario(scenario).scenario
    rows = []
    for row in assumption_rows(base, snapshot, run, user_models=load_settings().models):
        rows.append(row)
        print_note(f"{row['assumption']}: {row.get('failed', 'planned')}")
    document = {
        "schema_version": 1,
        "kind": "assumptions",
        "code_version": __version__,
        "scenario": base.name,
        "kinds": {"cost": "predicted"},
        "rows": rows,
    }
    if as_json:
        print_json(document)
    else:
        columns, cells = assumptions_table(document)
        print_table(f"{base.name}: one assumption changed at a time (predicted)", columns, cells)
    return NoSolutionError.exit_code if any("failed" in row for row in rows) else 0


def tables(
    files: Annotated[
        tuple[Path, ...], Parameter(help="What `coral evaluate ... --json` printed, as files.", negative="")
    ],
    /,
) -> None:
    """Print results as Markdown tables: evaluations beside the published ratios, levers, assumptions."""
    from coral_core.report.results_tables import results_markdown

    if not files:
        raise InputError("there is nothing to make tables of", fix="name files of `coral evaluate ... --json`")
    print_text(results_markdown([_document(file) for file in files]))


def _document(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read as JSON: {error}", where=str(file)) from error
    if not isinstance(found, dict):
        raise InputError("is no JSON object", where=str(file))
    return found
