"""`coral demo`: the main job on the scenario `tiny`, end to end, through Prefect and Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from coral_core.cli.flows import flows_extra_missing
from coral_core.cli.options import ScenarioName, StoreUrl
from coral_core.cli.output import print_text
from coral_core.cli.plan import plan
from coral_core.cli.work import library_progress, resolved_scenario
from coral_core.config.settings import load_settings


def demo(
    *,
    scenario: ScenarioName = "tiny",
    workers: Annotated[int | None, Parameter(help="CPUs for Ray; default: all of this machine's.")] = None,
    store: StoreUrl = None,
) -> int:
    """Build a scenario's library with the Prefect flow on Ray, solve the allocation, print and record the plan."""
    # A demo leaves the user's Prefect alone: its server's database sits beside the store unless they said otherwise.
    home = Path(os.environ.setdefault("PREFECT_HOME", str(Path.cwd() / ".coral" / "prefect")))
    home.mkdir(parents=True, exist_ok=True)  # the server does not make it, and fails without a word
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    try:
        from flows.build_library import build_library, watched_by
        from flows.parameters import BuildLibraryParameters
    except ModuleNotFoundError as error:
        raise flows_extra_missing(error) from None

    library = resolved_scenario(scenario).scenario.library_name
    url = store or load_settings().store_url
    print_text(f"1. Build the template library of scenario {scenario}: Prefect flow build-library, shards as Ray tasks")
    with library_progress(library, quiet=False) as on_progress, watched_by(on_progress):
        version = build_library(BuildLibraryParameters(scenario=scenario, store=url, executor="ray", workers=workers))
    print_text(f"   library {library} version {version} -> {url}/libraries/{library}")
    print_text("2. Solve the allocation: the cheapest instances that meet every demand within its latency bounds")
    return plan(scenario=scenario, store=url)
