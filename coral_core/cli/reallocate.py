"""`coral reallocate`: the flow of the same name from a shell, and what it would do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from coral_core.cli.fleet import usd_text
from coral_core.cli.options import AsJson, ScenarioName, StoreUrl
from coral_core.cli.output import print_json, print_text
from coral_core.errors import ProvisionError


def reallocate(
    *,
    scenario: ScenarioName = "tiny",
    mode: Annotated[
        Literal["plan", "apply"], Parameter(help="`plan` records the cheapest plan, `apply` makes it so.")
    ] = "plan",
    dry_run: Annotated[
        bool, Parameter(negative="", help="List the steps and the difference in cost; record and change nothing.")
    ] = False,
    max_nodes: Annotated[int | None, Parameter(help="Go never beyond; default: CORAL_MAX_NODES.")] = None,
    max_usd_per_h: Annotated[float | None, Parameter(help="Go never beyond; default: CORAL_MAX_USD_PER_H.")] = None,
    fleet: Annotated[str, Parameter(help="The fleet; default: CORAL_FLEET, else `default`.")] = "",
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Look at the fleet and the supply, plan the cheapest fleet, and in mode `apply` make it so.

    Exit code 7 where the fleet is not the plan afterwards, or another run acts.
    """
    from coral_core.cli.flows import flows_extra_missing

    try:
        from flows.reallocate import Reallocated, open_run
        from flows.reallocate import reallocate as flow
    except ModuleNotFoundError as error:
        raise flows_extra_missing(error) from None
    params = parameters(
        {
            "scenario": scenario,
            "mode": mode,
            "fleet": fleet,
            "store": store or "",
            "max_nodes": max_nodes,
            "max_usd_per_h": max_usd_per_h,
        }
    )
    if dry_run:
        from tasks.reallocate import dry_run as what_a_run_would_do

        found = what_a_run_would_do(*open_run(params))
        document = {
            "steps": list(found.steps),
            "cost_now_usd_per_h": found.cost_now_usd_per_h,
            "cost_planned_usd_per_h": found.cost_planned_usd_per_h,
            "plan": dict(found.outcome.plan),
        }
        if as_json:
            print_json(document)
        else:
            show_steps(document)
        return 0
    ended = flow(params, return_state=True).result(raise_on_failure=False)
    if not isinstance(ended, Reallocated):
        raise ended if isinstance(ended, BaseException) else AssertionError(ended)
    if as_json:
        print_json({name: getattr(ended, name) for name in ("outcome", "message", "plan_url", "result_url")})
    else:
        print_text(ended.message)
    return 0 if ended.outcome in {"planned", "converged"} else ProvisionError.exit_code


def parameters(given: dict[str, Any]) -> Any:  # noqa: ANN401 - the flow's parameters, which need Prefect's extra
    """The flow's parameters. Raises InputError where one is wrong."""
    from pydantic import ValidationError

    from coral_core.errors import InputError
    from flows.parameters import ReallocateParameters

    try:
        return ReallocateParameters.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = "-".join(map(str, first["loc"])).replace("_", "-")
        raise InputError(str(first["msg"]), where=f"--{option}") from None


def show_steps(document: dict[str, Any]) -> None:
    """Both costs, then the steps one line each."""
    now, planned = document["cost_now_usd_per_h"], document["cost_planned_usd_per_h"]
    change = "" if now is None else f", a change of {planned - now:+.2f} USD/h"
    print_text(
        f"dry run: {len(document['steps'])} steps, from {usd_text(now)} (measured) to {usd_text(planned)} (predicted){change}"
    )
    for line in document["steps"]:
        print_text(f"- {line}")
