"""`coral scenario`: list, show and copy scenarios."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from coral_core.cli.options import AsJson
from coral_core.cli.output import print_json, print_table, print_text
from coral_core.config.scenario import load_scenario, scenario_names, scenario_text
from coral_core.errors import InputError, unknown_name

app = App(name="scenario", help="What to serve, where, on what: list, show and copy scenarios.")


@app.command(name="list")
def list_scenarios(*, as_json: AsJson = False) -> None:
    """List the scenarios that ship with Coral."""
    scenarios = [load_scenario(name) for name in scenario_names()]
    if as_json:
        print_json([{"name": s.name, "description": s.description, "catalog": s.catalog} for s in scenarios])
        return
    rows = [(s.name, len(s.models), s.catalog, len(s.regions), s.library.n_max) for s in scenarios]
    descriptions = "\n".join(f"{s.name}: {s.description}" for s in scenarios)
    print_table("Scenarios", ("name", "models", "catalog", "regions", "N_max"), rows, note=descriptions)


@app.command
def show(name: str, *, as_json: AsJson = False) -> None:
    """Print a scenario: its YAML as shipped, or all values as JSON (`coral scenario copy` makes your own)."""
    scenario = load_scenario(name)
    if as_json:
        print_json(scenario.model_dump(mode="json"))
    elif name in scenario_names():
        print(scenario_text(name), end="")
    else:
        import yaml

        print(yaml.safe_dump(scenario.model_dump(mode="json"), sort_keys=False), end="")


@app.command
def copy(name: str, file: Path) -> None:
    """Copy a shipped scenario to a new file, to be changed and planned; nothing is overwritten."""
    if name not in scenario_names():
        raise unknown_name("scenario", name, scenario_names(), where="NAME")
    if file.suffix not in {".yaml", ".yml"}:
        raise InputError("scenario files end in .yaml", where=str(file), fix=f"{file.with_suffix('.yaml')}")
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(scenario_text(name))
    except FileExistsError:
        raise InputError("the file is there already", where=str(file), fix="choose another name") from None
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(file)) from None
    print_text(f"{name} -> {file}; the keys: docs/scenarios.md; next: coral plan --scenario {file}")
