"""`coral simulate`: one policy on a scenario, epoch by epoch."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from coral_core.cli.evaluate_scenario import Decode, Prefill, Scenario, Seed, chosen_utilization, prepared, step_note
from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_table, print_text


def simulate(
    scenario: Scenario = "tiny",
    *,
    policy: Annotated[str, Parameter(help="coral, coral_paper, homo_joint, homo, cauchy or helix.")] = "coral",
    seed: Annotated[Seed | None, Parameter(help="Of the requests; default: the scenario's first.")] = None,
    prefill_utilization: Prefill = None,
    decode_utilization: Decode = None,
    routing: Annotated[
        Literal["weighted_round_robin", "least_work"],
        Parameter(help="In turns by weight, as the gateway does, or to where the prompt would be done first."),
    ] = "weighted_round_robin",
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Plan a scenario's epochs by one policy and simulate its requests on that fleet; nothing is recorded."""
    from coral_core.report.evaluation_report import epochs_table, evaluation_notes, models_table
    from coral_core.sim import Routing
    from tasks.evaluate import evaluate

    utilization = chosen_utilization(prefill_utilization, decode_utilization)
    source, chosen = prepared(scenario, [policy], store=store, quiet=as_json)
    seeds = [source.resolved.scenario.seeds[0] if seed is None else seed]
    found = evaluate(
        source,
        chosen,
        seeds,
        utilization=utilization,
        routing=Routing(routing),
        on_step=step_note(quiet=as_json),
    )
    if as_json:
        print_json({**found.document, "tables": found.tables})
        return
    print_text(f"Simulation of {found.document['scenario']} under {policy}")
    for note in evaluation_notes(found.document):
        print_text(f"note: {note}")
    for table in (epochs_table(found.tables), models_table(found.document)):
        print_text("")
        print_table(table.title, table.columns, table.rows)
