"""`coral evaluate levers`: what each thing that a plan may use beyond `homo_joint` is worth, alone and together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from coral_core.cli.evaluate_scenario import Scenario, step_note
from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.report_file import ReportPath, check_file, check_report, write_file, write_report
from coral_core.cli.work import choose_executor, library_progress, open_configured_store, resolved_scenario
from coral_core.errors import NoSolutionError


def levers(
    scenario: Scenario = "tiny",
    *,
    rates: Annotated[
        tuple[float, ...], Parameter(help="Requests/s of each model.", consume_multiple=True, negative="")
    ] = (10.0, 25.0, 100.0),
    supply: Annotated[
        tuple[Literal["ample", "scarce"], ...],
        Parameter(help="How many nodes there are to be had.", consume_multiple=True, negative=""),
    ] = ("ample", "scarce"),
    memory_frac: Annotated[
        float,
        Parameter(
            help="Scarce: GPU memory to be had, of what the published plan holds at ample supply; spread over all "
            "configurations, so that much of it suits no model."
        ),
    ] = 2.5,
    simulate: Annotated[bool, Parameter(help="Simulate each plan, not only cost it.")] = True,
    minutes: Annotated[float, Parameter(help="Simulated minutes of each run.")] = 3.0,
    seeds: Annotated[tuple[int, ...], Parameter(help="Of the requests.", consume_multiple=True, negative="")] = (0,),
    report: ReportPath = None,
    markdown: Annotated[Path | None, Parameter(help="Write the table here, as Markdown.")] = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Plan a scenario with mixed replicas, free split, aggregated service, variants and spot nodes: each, and all.

    Costs are predicted, goodput is simulated. All plans count on the scenario's headroom. Two libraries that hold all of it are built
    first where they are missing. Nothing is rented. Exit code 3 where a plan failed; the others are shown.
    """
    from coral_core.clock import SystemClock
    from coral_core.config.settings import load_settings
    from coral_core.report.lever_report import lever_markdown, lever_notes, lever_page, lever_tables
    from coral_core.report.page import page_or_none
    from tasks.levers import LeverRun, full_scenario, lever_methods, lever_table
    from tasks.library import build_spec_from_scenario
    from tasks.template_source import fresh_library

    run = LeverRun(
        rates=tuple(dict.fromkeys(rates)),
        supplies=tuple(dict.fromkeys(supply)),
        seeds=tuple(dict.fromkeys(seeds)) if simulate else (),
        simulated_s=minutes * 60,
        memory_frac=memory_frac,
    )
    check_file(markdown, such_as="levers.md")
    check_report(report)
    base = resolved_scenario(scenario).scenario
    opened, user_models = open_configured_store(store), load_settings().models
    snapshots = {}
    for method in lever_methods(base):
        full = full_scenario(base, method, user_models=user_models)
        executor = choose_executor("auto", workers=os.cpu_count() or 1, spec=build_spec_from_scenario(full))
        with library_progress(full.scenario.library_name, quiet=as_json) as on_progress:
            snapshots[method] = fresh_library(full, opened, executor, on_progress=on_progress)
    document = lever_table(base, snapshots, run, user_models=user_models, on_step=step_note(quiet=as_json))
    if markdown is not None:
        write_file(markdown, lever_markdown(document))
        print_note(f"written to {markdown}")
    if report is not None:
        time = SystemClock().now().isoformat(timespec="seconds")
        write_report(report, page_or_none(lambda: lever_page(document, time=time)))
    if as_json:
        print_json(document)
    else:
        print_text(f"{base.name}: what each lever is worth")
        for table in lever_tables(document):
            print_text("")
            print_table(table.title, table.columns, table.rows)
        for note in lever_notes(document):
            print_text(f"note: {note}")
    return NoSolutionError.exit_code if any("failed" in row for row in document["rows"]) else 0
