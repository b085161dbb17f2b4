"""`coral fleet`: what runs, what a run would change, what earlier runs did. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, validators

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text

if TYPE_CHECKING:
    from tasks.apply import Job

app = App(name="fleet", help="What runs, what a run would change, what earlier runs did.")
app.command("coral_core.cli.fleet_metrics:metrics", name="metrics")
app.command("coral_core.cli.fleet_watch:watch", name="watch")

Name = Annotated[str, Parameter(help="The fleet; default: CORAL_FLEET, else `default`.")]


@app.command
def status(fleet: Name = "", *, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """What runs against what is wanted, what it costs an hour, its age, what is unhealthy, and who is changing it."""
    from tasks.fleet import status_document

    document = status_document(open_fleet(fleet, store))
    if as_json:
        print_json(document)
        return
    lease, plan = document["lease"], document["plan"]
    wanted = "no plan yet" if plan["time"] is None else f"{plan['mode']} of {plan['time']}"
    print_text(
        f"Fleet {document['fleet']} on {document['provider']} (account {document['account']}): "
        f"{usd_text(document['cost_usd_per_h'])} (measured), {usd_text(document['planned_usd_per_h'])} planned; {wanted}"
    )
    if lease:
        state = "which has run out: that run has died or hangs" if lease["over"] else "which holds"
        print_text(f"lease: {lease['holder']} since {lease['since']}, until {lease['until']}, {state}")
    show_counts(document)
    for note in document["notes"]:
        print_note(f"note: {note}")


@app.command
def diff(
    fleet: Name = "",
    *,
    at: Annotated[str, Parameter(help="Time of a recorded plan (`coral fleet history`), or `latest`.")] = "latest",
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """The steps that would be taken now to make the fleet a recorded plan, and both costs."""
    from artifacts.keys import parse_time
    from tasks.fleet import diff_document

    document = diff_document(open_fleet(fleet, store), None if at == "latest" else parse_time(at))
    if as_json:
        print_json(document)
        return
    print_text(
        f"Fleet {document['fleet']} against its plan of {document['plan']}: "
        f"{usd_text(document['cost_now_usd_per_h'])} now (measured), "
        f"{usd_text(document['cost_planned_usd_per_h'])} planned (predicted)"
    )
    for line in document["steps"]:
        print_text(f"- {line}")
    if not document["steps"]:
        print_text("the fleet is the plan")


@app.command
def history(
    fleet: Name = "",
    *,
    newest: Annotated[int, Parameter(validator=validators.Number(gte=1), help="So many runs.")] = 20,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Earlier runs, newest last: time, mode, outcome, what the fleet cost after it, what was refused."""
    from tasks.fleet import history_rows

    rows = history_rows(open_fleet(fleet, store, reads_store_only=True), newest=newest)
    if as_json:
        print_json(rows)
        return
    columns = ("time", "mode", "outcome", "USD/h after", "steps", "refusals", "reason")
    names = ("time", "mode", "outcome", "cost_usd_per_h", "steps", "failures", "reason")
    shown = [{**row, "cost_usd_per_h": _usd(row["cost_usd_per_h"]), "failures": len(row["failures"])} for row in rows]
    table = [tuple(row[name] for name in names) for row in shown]
    print_table("Runs (costs measured)", columns, table)


def open_fleet(fleet: str, store: str | None, *, reads_store_only: bool = False) -> Job:
    """The fleet, its store and its provider; where only the store is read, the provider needs no settings."""
    from coral_core.config.settings import load_settings
    from tasks.apply import holder_text, open_job

    return open_job(
        load_settings(),
        store=store or "",
        fleet=fleet,
        provider="fake" if reads_store_only else None,
        holder=holder_text("command line"),
    )


def show_counts(document: Mapping[str, Any]) -> None:
    """Running beside wanted by template, then every instance that is not up."""
    rows = [
        (row["template"], row["region"], row["market"], row["running"], row["wanted"]) for row in document["counts"]
    ]
    if rows:
        print_table("Serving instances", ("template", "region", "market", "running", "wanted"), rows)
    elif document["plan"]["time"] and document["planned_usd_per_h"] is None:
        print_text("nothing runs, and what is wanted is not known")
    else:
        print_text("nothing runs and nothing is wanted")
    sick = [row for row in document["instances"] if row["condition"] != "up"]
    if sick:
        columns = ("instance", "region", "condition", "reason", "age s")
        cells = [(r["instance"], r["region"], r["condition"], r["reason"], r["age_s"]) for r in sick]
        print_table("Not up", columns, cells)


def usd_text(usd_per_h: float | None) -> str:
    """A cost for people; unknown is not zero."""
    return "cost not known" if usd_per_h is None else f"{_usd(usd_per_h)} USD/h"


def _usd(usd_per_h: float | None) -> str | None:
    from coral_core.report.figures import usd

    return None if usd_per_h is None else usd(usd_per_h)
