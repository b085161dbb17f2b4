"""What `coral simulate`, `coral evaluate` and `coral calibrate` share: libraries, options, and what they print."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import CoercionError, Parameter, Token

from coral_core.cli.output import print_note, print_table, print_text
from coral_core.cli.work import choose_executor, library_progress, open_configured_store, resolved_scenario
from coral_core.errors import InputError

if TYPE_CHECKING:
    from artifacts.store import Store
    from coral_core.allocation.policies import Policy
    from coral_core.domain.workload import Phase
    from tasks.evaluate import Evaluation
    from tasks.template_source import TemplateSource

Scenario = Annotated[str, Parameter(help="A shipped scenario's name (`coral scenario list`) or a YAML file.")]
Policies = Annotated[
    tuple[str, ...],
    Parameter(help="coral, coral_paper, homo_joint, homo, cauchy, helix.", consume_multiple=True, negative=""),
]


def _seed(_type: object, tokens: Sequence[Token]) -> int:
    """A scenario's seed: what the random number generators take, and never a rounded number."""
    (token,) = tokens
    if not (token.value.isdecimal() and int(token.value) < 2**63):
        raise CoercionError(msg=f'"{token.value}" is no seed (a whole number from 0 to 2^63 - 1)', token=token)
    return int(token.value)


Seed = Annotated[int, Parameter(converter=_seed, allow_leading_hyphen=True)]
Seeds = Annotated[
    tuple[Seed, ...],
    Parameter(help="Of the requests; default: the scenario's.", consume_multiple=True, negative=""),
]
Prefill = Annotated[float | None, Parameter(help="max_utilization_frac of prefill; default: the scenario's.")]
Decode = Annotated[float | None, Parameter(help="max_utilization_frac of decode; default: the scenario's.")]


def chosen_utilization(prefill: float | None, decode: float | None) -> dict[Phase, float]:
    """What was given of the two, in (0, 1]."""
    from coral_core.domain.workload import Phase

    given = {Phase.PREFILL: prefill, Phase.DECODE: decode}
    for phase, value in given.items():
        if value is not None and not 0 < value <= 1:
            raise InputError(f"{value} is not in (0, 1]", where=f"--{phase.value}-utilization")
    return {phase: value for phase, value in given.items() if value is not None}


def prepared(
    scenario: str, policies: Sequence[str], *, store: str | None, quiet: bool
) -> tuple[TemplateSource, dict[str, Policy]]:
    """The scenario's policies, and the libraries they plan from: built first where they are missing or stale."""
    from coral_core.config.policies import scenario_policies
    from tasks.library import build_spec_from_scenario
    from tasks.template_source import TemplateSource, fresh_library, needed_methods, with_method

    resolved = resolved_scenario(scenario)
    chosen = scenario_policies(resolved, list(dict.fromkeys(policies)) or None)
    opened = open_configured_store(store)
    snapshots = {}
    for method in needed_methods(resolved, list(chosen.values())):
        one = with_method(resolved, method)
        executor = choose_executor("auto", workers=os.cpu_count() or 1, spec=build_spec_from_scenario(one))
        with library_progress(one.scenario.library_name, quiet=quiet) as on_progress:
            snapshots[method] = fresh_library(one, opened, executor, on_progress=on_progress)
    return TemplateSource(resolved, snapshots), chosen


def evaluation_page_of(found: Evaluation, store: Store, now: datetime) -> str | None:
    """The report with the newest stored sweep of the scenario; None, which is said, where it could not be made."""
    from artifacts.evaluations import latest_sensitivity
    from coral_core.report.evaluation_page import evaluation_html
    from coral_core.report.page import can_render, page_or_none

    if not can_render():
        print_note("no HTML report: jinja2 is not installed (pip install 'coral-serve[report]')")
    sensitivity = latest_sensitivity(store, found.document["scenario"])
    time = now.isoformat(timespec="seconds")
    return page_or_none(lambda: evaluation_html(found.document, found.tables, time=time, sensitivity=sensitivity))


def step_note(*, quiet: bool) -> Callable[[str], None]:
    """What tells of each step on stderr, or nothing where `quiet`."""
    return (lambda _: None) if quiet else print_note


def show_evaluation(document: Mapping[str, Any]) -> None:
    """The tables and notes of an evaluation."""
    from coral_core.report.evaluation_report import evaluation_notes, evaluation_tables

    print_text(f"Evaluation of {document['scenario']}")
    for note in evaluation_notes(document):
        print_text(f"note: {note}")
    for table in evaluation_tables(document):
        print_text("")
        print_table(table.title, table.columns, table.rows)
