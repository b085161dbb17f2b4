"""`coral flows`: the same work through Prefect."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter, validators

from coral_core.errors import InputError

app = App(name="flows", help="Prefect: serve the deployments, set up the automations.")


@app.command
def serve(
    *,
    limit: Annotated[int, Parameter(validator=validators.Number(gte=1), help="Flow runs at once.")] = 2,
    port: Annotated[
        int, Parameter(validator=validators.Number(gte=1, lte=65535), help="Port of a server that is started here.")
    ] = 4200,
    scenario: Annotated[str, Parameter(help="Scenario that the forms, the schedule and events begin with.")] = "tiny",
    mode: Annotated[
        str, Parameter(help="Mode that reallocate begins with: `plan` only records, `approve` asks, `apply` acts.")
    ] = "plan",
    every: Annotated[
        str,
        Parameter(help="Switch the schedule of reallocate on: seconds between runs, or a cron expression (UTC)."),
    ] = "",
) -> None:
    """Serve all deployments, with forms, schedule and automations, until Ctrl-C.

    To the Prefect server that PREFECT_API_URL names; where none is set, to one started here, with its web page.
    CORAL_NOTIFY (an http(s) URL, or `type/name` of a notification block) is told of failed runs and of shortfalls.
    """
    try:
        from flows.deployments import absolute_scenario, serve_all
        from flows.parameters import ReallocateParameters
    except ModuleNotFoundError as error:
        raise flows_extra_missing(error) from None
    from pydantic import ValidationError

    from coral_core.config.scenario import load_scenario
    from coral_core.config.settings import load_settings

    settings = load_settings()
    load_scenario(scenario)  # a wrong name is told now, not by the first run
    given = {"scenario": absolute_scenario(scenario), "mode": mode, "fleet": settings.fleet}
    try:
        begin_with = ReallocateParameters.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(first["msg"], where=f"--{'.'.join(map(str, first['loc']))}") from None
    serve_all(begin_with, limit=limit, port=port, every=every, notify=settings.notify)


@app.command
def automations() -> None:
    """Create or update the automations at PREFECT_API_URL, for deployments of a work pool; `serve` does so itself.

    They start `reallocate` on news of the fleet CORAL_FLEET, and tell CORAL_NOTIFY of failed runs and of shortfalls.
    """
    try:
        from flows.automations import install_automations
        from flows.server import require_server
    except ModuleNotFoundError as error:
        raise flows_extra_missing(error) from None
    from coral_core.config.settings import load_settings

    settings = load_settings()
    require_server()
    for line in install_automations(fleet=settings.fleet, notify=settings.notify):
        print(line)


def flows_extra_missing(error: ModuleNotFoundError) -> InputError:
    """The error for a base install that is asked for Prefect or Ray."""
    return InputError(f"{error.name} is not installed", where="environment", fix="pip install 'coral-serve[flows]'")
