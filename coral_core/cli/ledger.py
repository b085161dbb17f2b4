"""`coral ledger`: predicted against measured, per model, GPU and phase."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.report_file import ReportPath, check_file, check_report, write_file, write_report
from coral_core.cli.work import open_configured_store
from coral_core.errors import DataGapError

DataFolder = Annotated[
    Path | None, Parameter(name="--data", help="Folder of reference data; default: CORAL_REFERENCE_DATA.")
]


def ledger(
    *,
    data: DataFolder = None,
    runs: Annotated[
        Path | None,
        Parameter(
            help="Your own serving runs instead: CSV with "
            "model,dtype,gpu,tp,input_tokens,output_tokens,concurrency,ttft_s,tpot_s."
        ),
    ] = None,
    engine: Annotated[str, Parameter(help="Engine of these runs.")] = "vllm",
    profiles: Annotated[bool, Parameter(negative="", help="The profiles in the store instead.")] = False,
    store: StoreUrl = None,
    report: ReportPath = None,
    markdown: Annotated[Path | None, Parameter(help="Write the tables here, as Markdown.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with reference data: serving runs, layer times, latencies; the worst first.

    With --runs or --profiles your own measurements are compared, and nothing else. No model is scored with costs fitted
    to its own runs. Nothing is corrected: what plans count on changes only by profiles, or by tables of `coral profile
    fit` that are put in place of those that ship.
    """
    from coral_core.clock import SystemClock
    from coral_core.config.layer_times import reference_folder
    from coral_core.report.ledger_report import ledger_markdown, ledger_notes, ledger_page, ledger_tables
    from coral_core.report.page import page_or_none
    from tasks.ledger import ledger as make_ledger
    from tasks.ledger import ledger_document
    from tasks.ledger_own import own_runs, stored_profiles_compared

    check_report(report)
    check_file(markdown, such_as="ledger.md")
    if runs is None and not profiles:
        document = make_ledger(reference_folder(data))
    else:
        own, left_out = ([], {}) if runs is None else own_runs(runs, engine=engine)
        more, unknown = stored_profiles_compared(open_configured_store(store)) if profiles else ([], {})
        own, left_out = own + more, {**left_out, **unknown}
        if not own and not left_out:
            raise DataGapError(
                "there is nothing to compare: no runs and no profiles",
                where="the store" if runs is None else runs.name,
                fix="give runs with --runs, or store profiles with coral profile import or run",
            )
        document = ledger_document(own, left_out, 0, held_out=False)
    if report is not None:
        time = SystemClock().now().isoformat(timespec="seconds")
        write_report(report, page_or_none(lambda: ledger_page(document, time=time)))
    if markdown is not None:
        write_file(markdown, ledger_markdown(document))
        print_note(f"written to {markdown}")
    if as_json:
        print_json(document)
        return
    for table in ledger_tables(document):
        print_table(table.title, table.columns, table.rows)
        print_text("")
    for note in ledger_notes(document):
        print_text(f"note: {note}")
