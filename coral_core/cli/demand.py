"""`coral demand`: what was measured of a fleet's demand, and what it is forecast to be."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.work import open_configured_store, resolved_scenario
from coral_core.errors import InputError

app = App(name="demand", help="Measured demand of a fleet, and its forecast.")

Fleet = Annotated[str, Parameter(help="The fleet; default: CORAL_FLEET, else `default`.")]


@app.command
def show(
    *,
    scenario: Annotated[str, Parameter(help="Scenario that the fleet serves.")] = "tiny",
    method: Annotated[Literal["last", "ewma", "seasonal"], Parameter(help="How the coming rate is told.")] = "last",
    season: Annotated[Literal["day", "week"], Parameter(help="What demand repeats with (seasonal).")] = "day",
    fleet: Fleet = "",
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """What each model's demand is forecast to be, from what was measured, beside the scenario's rate."""
    from coral_core.config.demand import DemandSpec
    from coral_core.config.settings import load_settings
    from coral_core.forecast import DemandForecast
    from tasks.demand import length_factor, measured_demand

    resolved = resolved_scenario(scenario)
    spec = DemandSpec(method=method, season=season)
    name = fleet or load_settings().fleet
    found, notes = measured_demand(resolved, open_configured_store(store), name, spec, now=datetime.now(UTC))
    rows = []
    for model in resolved.models:
        forecast = found[model.shape.name]
        known = forecast if isinstance(forecast, DemandForecast) else None
        rows.append(
            {
                "model": model.shape.name,
                "scenario_requests_per_s": model.demand.requests_per_s,
                "forecast_requests_per_s": known.requests_per_s if known else None,
                "length_factor": length_factor(model, known) if known else None,
                "method": known.method.value if known else None,
                "measured_until": datetime.fromtimestamp(known.as_of_s, UTC).isoformat() if known else None,
                "unknown_because": "" if isinstance(forecast, DemandForecast) else forecast.reason,
            }
        )
        notes += [f"{model.shape.name}: {note}" for note in (known.notes if known else ())]
    if as_json:
        print_json({"kind": "predicted", "fleet": name, "models": rows, "notes": notes})
        return
    cells = [["unknown" if value is None else value for value in list(row.values())[:-1]] for row in rows]
    head = ("model", "scenario/s", "forecast/s", "x length", "method", "measured until")
    print_table(f"Demand of fleet {name}, requests/s (predicted)", head, [tuple(map(_text, row)) for row in cells])
    for note in [*(f"{r['model']}: {r['unknown_because']}" for r in rows if r["unknown_because"]), *notes]:
        print_note(f"note: {note}")


@app.command(name="import")
def import_(
    trace: Annotated[Path, Parameter(help="A trace that `coral workload summarize` reads.")],
    *,
    model: Annotated[str, Parameter(help="Model that its requests asked.")],
    start: Annotated[str, Parameter(help="Time of its first request, such as 2026-11-29T10:00:00Z.")],
    every_s: Annotated[
        float, Parameter(validator=validators.Number(gte=1, lte=3600), help="Seconds that one measurement covers.")
    ] = 60.0,
    fleet: Fleet = "",
    store: StoreUrl = None,
) -> None:
    """Record a trace as measured demand of a fleet, for forecasts; doing it again changes nothing."""
    from artifacts.demand import append_demand
    from coral_core.config.settings import load_settings
    from coral_core.forecast import samples_from_trace
    from coral_core.workload import read_trace

    try:
        begun = datetime.fromisoformat(start)
    except ValueError as error:
        raise InputError(str(error), where="--start", fix="write it as 2026-11-29T10:00:00Z") from None
    if begun.tzinfo is None:
        raise InputError(f"{start} has no time zone", where="--start", fix=f"write {start}Z for UTC")
    samples = samples_from_trace(read_trace(trace), model=model, start_s=begun.timestamp(), duration_s=every_s)
    name = fleet or load_settings().fleet
    keys = append_demand(open_configured_store(store), name, samples, source=f"trace-{model}")
    last = datetime.fromtimestamp(samples[-1].time_s, UTC)
    print_text(
        f"{len(samples)} measurements of {model} until {last:%Y-%m-%d %H:%M:%S} UTC recorded for fleet {name}, "
        f"in {len(keys)} objects"
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
