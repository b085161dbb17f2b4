"""`coral plan one-more`: what one more node of each scarce configuration would save."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter, validators

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_table, print_text
from coral_core.cli.plan import At, Fleet, recorded_plan
from coral_core.cli.work import open_configured_store


def one_more(
    *,
    at: At = "latest",
    fleet: Fleet = None,
    most: Annotated[int, Parameter(validator=validators.Number(gte=1), help="Nodes to try.")] = 10,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """What one more node of each scarce configuration would save: the plan is solved again with it, one at a time."""
    from artifacts.library import open_library
    from coral_core.report.figures import usd
    from tasks.one_more import one_more_document

    opened = open_configured_store(store)
    record = recorded_plan(opened, fleet, at)
    library = record.decision["library"]
    snapshot = open_library(opened, library["name"], library["version"])
    answers = one_more_document(record.decision, snapshot, most=most)
    if as_json:
        print_json(answers)
        return
    if not answers:
        print_text("All that is sold is to be had in plenty: one more node of anything saves nothing.")
        return
    rows = [
        (
            answer["region"],
            answer["config"],
            usd(answer["saved_usd_per_h"]),
            usd(answer["saved_usd_per_h_proven"]),
            f"{answer['shortfall_less_frac']:.2%}",
        )
        for answer in answers
    ]
    columns = ("region", "node", "saves USD/h", "of it proven", "less shortfall")
    note = "with start-up; where the shortfall falls, the cost may rise: that is no saving"
    print_table("One more node of (predicted)", columns, rows, note=note)
