"""`coral evaluate split`: what the free latency split is worth beside the published equal shares."""

from __future__ import annotations

from dataclasses import asdict

from coral_core.cli.options import AsJson, ScenarioName, StoreUrl
from coral_core.cli.output import print_json, print_table
from coral_core.cli.work import open_configured_store, resolved_scenario


def split(*, scenario: ScenarioName = "paper-core", store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Compare the free latency split with the published one: throughput of each combination, cost of each phase's plan.

    Builds both libraries with every combination in them first where they are missing.
    """
    from artifacts.templates import template_columns
    from coral_core.cli.plan import usable_library
    from coral_core.config.scenario import LibraryMethod
    from tasks.plan import scenario_templates
    from tasks.split_gain import split_gains, with_method

    resolved, opened = resolved_scenario(scenario), open_configured_store(store)
    configs = [config.name for config in resolved.configs]
    columns = []
    methods: tuple[LibraryMethod, LibraryMethod] = ("lattice", "lattice-free")
    for method in methods:
        apart = with_method(resolved, method)
        snapshot = usable_library(apart, opened, version=None, executor="auto", dry_run=False, quiet=as_json)
        columns.append(template_columns(scenario_templates(apart, snapshot), configs))
    gains = split_gains(resolved, columns[0], columns[1])
    if as_json:
        print_json({"scenario": scenario, "predicted": True, "gains": [asdict(gain) for gain in gains]})
        return
    rows = [
        (
            gain.model,
            gain.phase,
            gain.combinations,
            gain.free_only,
            *(f"{frac:.1%}" for frac in (gain.median_gain_frac, gain.p90_gain_frac, gain.most_gain_frac)),
            gain.equal_usd_per_h,
            gain.free_usd_per_h,
        )
        for gain in gains
    ]
    names = ("model", "phase", "combinations", "free only", "median", "90th", "most", "equal USD/h", "free USD/h")
    note = "gain in throughput over the combinations that both splits serve; USD/h: the phase's cheapest plan at ample supply"
    print_table(f"{scenario}: free latency split beside the published equal one (predicted)", names, rows, note=note)
