"""`coral scenario`: list, show and copy scenarios."""

from __future__ import annotations

from cyclopts import App

from coral_core.cli.options import AsJson
from coral_core.cli.output import print_json, print_table
from coral_core.config.scenario import load_scenario, scenario_names, scenario_text

app = App(name="scenario", help="What to serve, where, on what: list, show and copy scenarios.")


@app.command(name="list")
def list_scenarios(*, as_json: AsJson = False) -> None:
    """List the scenarios that ship with Coral."""
    scenarios = [load_scenario(name) for name in scenario_names()]
    if as_json:
        print_json([{"name": s.name, "description": s.description, "catalog": s.catalog} for s in scenarios])
        return
    rows = [(s.name, len(s.models), s.catalog, len(s.regions), s.library.n_max, s.description) for s in scenarios]
    print_table("Scenarios", ("name", "models", "catalog", "regions", "N_max", "description"), rows)


@app.command
def show(name: str, *, as_json: AsJson = False) -> None:
    """Print a scenario: its YAML as shipped (redirect it to a file to make your own), or all values as JSON."""
    scenario = load_scenario(name)
    if as_json:
        print_json(scenario.model_dump(mode="json"))
    elif name in scenario_names():
        print(scenario_text(name), end="")
    else:
        import yaml

        print(yaml.safe_dump(scenario.model_dump(mode="json"), sort_keys=False), end="")
