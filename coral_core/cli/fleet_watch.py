"""`coral fleet watch`: start a reallocation when something happens that cannot wait for the schedule."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter, validators

from coral_core.cli.flows import flows_extra_missing
from coral_core.cli.options import StoreUrl
from coral_core.cli.work import open_configured_store


def watch(
    *,
    scenario: Annotated[str, Parameter(help="Scenario that the fleet serves.")] = "tiny",
    poll_s: Annotated[float, Parameter(validator=validators.Number(gte=1), help="Seconds between looks.")] = 30.0,
    window_s: Annotated[
        float, Parameter(validator=validators.Number(gte=0), help="At most one run is asked for in so many seconds.")
    ] = 120.0,
    tolerance_frac: Annotated[
        float,
        Parameter(validator=validators.Number(gte=0), help="How far demand may pass what the plan holds; 0.1 is 10%."),
    ] = 0.1,
    once: Annotated[bool, Parameter(negative="", help="Look once, say what holds, and end.")] = False,
    store: StoreUrl = None,
) -> None:
    """Watch the fleet CORAL_FLEET until Ctrl-C: dead instances, spot notices, demand above the plan, capacity back.

    News goes to the Prefect server at PREFECT_API_URL; its automation (made by `coral flows serve`) starts `reallocate`.
    What happens while a run is under way leads to one more run after it.
    """
    try:
        from flows.events import PrefectRuns
    except ModuleNotFoundError as error:
        raise flows_extra_missing(error) from None
    import time

    from coral_core.clock import SystemClock
    from coral_core.config.demand import DemandSpec
    from coral_core.config.resolve import resolve_scenario
    from coral_core.config.scenario import load_scenario
    from coral_core.config.settings import load_settings
    from flows.server import require_server
    from tasks.providers import open_provider
    from tasks.watch import Watched, WatchPolicy, keep_watch, look

    settings = load_settings()
    require_server()
    watched = Watched(
        resolved=resolve_scenario(load_scenario(scenario), user_models=settings.models),
        store=open_configured_store(store),
        fleet=settings.fleet,
        provider=open_provider(settings),
        demand=DemandSpec(),
    )
    keep_watch(
        lambda: look(watched),
        PrefectRuns(settings.fleet),
        WatchPolicy(poll_s=poll_s, window_s=window_s, tolerance_frac=tolerance_frac),
        clock=SystemClock(),
        sleep=time.sleep,
        say=lambda line: print(line, flush=True),
        looks=1 if once else None,
    )
