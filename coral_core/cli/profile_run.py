"""`coral profile run`: the flow `profile-gpus` from a shell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.errors import InputError, MeasurementError

if TYPE_CHECKING:
    from flows.parameters import ProfileParameters

_Numbers = tuple[int, ...]


def run(
    *,
    model: Annotated[str, Parameter(help="The model.")],
    config: Annotated[
        tuple[str, ...], Parameter(help="Node configuration, one node of each; may be given several times.")
    ],
    engine_file: Annotated[Path, Parameter(help="How engines serve the model (docs/launch.md).")],
    provider: Annotated[Literal["local", "aws"], Parameter(help="This machine's CPU, or rented nodes.")] = "local",
    engine_version: Annotated[str, Parameter(help="What nodes run; default (local): what this machine has.")] = "",
    dtype: Annotated[str, Parameter(help="Variant of the model; default: its own.")] = "",
    depths: Annotated[_Numbers, Parameter(consume_multiple=True, help="Two numbers of layers to cut to.")] = (),
    batches: Annotated[_Numbers, Parameter(consume_multiple=True, help="Requests in a step.")] = (),
    prompts: Annotated[_Numbers, Parameter(consume_multiple=True, help="Prompt lengths, tokens.")] = (),
    contexts: Annotated[_Numbers, Parameter(consume_multiple=True, help="Contexts of decode steps, tokens.")] = (),
    max_batched_tokens: Annotated[int | None, Parameter(help="Tokens of a prefill step.")] = None,
    max_requests: Annotated[int | None, Parameter(help="Requests of any step.")] = None,
    samples: Annotated[int | None, Parameter(help="Steps timed of each kind.")] = None,
    max_cv: Annotated[float | None, Parameter(help="Coefficient of variation above which samples are refused.")] = None,
    max_minutes: Annotated[float, Parameter(help="The run's time is up after so long.")] = 240.0,
    max_usd: Annotated[float, Parameter(help="Its money is up here.")] = 20.0,
    region: Annotated[tuple[str, ...], Parameter(help="aws: where to rent; may be given several times.")] = (),
    coordinator_file: Annotated[
        Path | None, Parameter(help="aws: file of the coordinator that the nodes' launch template names.")
    ] = None,
    fleet: Annotated[str, Parameter(help="Its nodes are of the fleet FLEET-profile; default: CORAL_FLEET.")] = "",
    fresh: Annotated[bool, Parameter(negative="", help="Measure all of it anew.")] = False,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Show what would be measured, and the most it costs.")
    ] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> int:
    """Measure a model's steps on one node of each configuration, and store the profiles.

    Engines have dummy weights and two truncated depths. A run that was cut short goes on where it was when it is run
    again; nodes are released in any case. Exit code 9 where a configuration has no profile afterwards.
    """
    from coral_core.cli.flows import flows_extra_missing

    sweep = {
        "batches": batches,
        "prompts": prompts,
        "contexts": contexts,
        "max_batched_tokens": max_batched_tokens,
        "max_requests": max_requests,
        "samples": samples,
        "max_cv_frac": max_cv,
    }
    given = {
        "provider": provider,
        "model": model,
        "configs": config,
        "engine_file": str(engine_file),
        "engine_version": engine_version,
        "dtype": dtype,
        "depths": depths,
        "sweep": {name: value for name, value in sweep.items() if value not in {None, ()}},
        "max_minutes": max_minutes,
        "max_usd": max_usd,
        "regions": region,
        "coordinator_file": str(coordinator_file or ""),
        "fleet": fleet,
        "fresh": fresh,
        "store": store or "",
    }
    try:
        params = _parameters(given)
        if dry_run:
            return _show_plan(params, as_json=as_json)
        from flows.profile_gpus import profile_gpus
    except ModuleNotFoundError as error:
        raise flows_extra_missing(error) from None
    ended = profile_gpus(params)
    document = {"published": ended.keys, "refused": ended.refused, "unfinished": ended.unfinished}
    document["spent_usd"] = ended.spent_usd
    if as_json:
        print_json(document)
    else:
        for name, key in ended.keys.items():
            print_text(f"{name}: measured, stored as {key}")
            if refused := ended.refused[name]:
                print_note(f"{name}: {refused} kinds of step are not in it: noisy, or more than the engine takes")
        for name, why in ended.unfinished.items():
            print_note(f"{name}: no profile: {why}")
    return MeasurementError.exit_code if ended.unfinished else 0


def _parameters(given: dict[str, Any]) -> ProfileParameters:
    """The flow's parameters. Raises InputError where one is wrong."""
    from pydantic import ValidationError

    from flows.parameters import ProfileParameters

    try:
        return ProfileParameters.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(str(first["msg"]), where=".".join(map(str, first["loc"]))) from None


def _show_plan(params: ProfileParameters, *, as_json: bool) -> int:
    from dataclasses import asdict

    from artifacts.store import open_store
    from coral_core.config.settings import load_settings
    from flows.profile_gpus import wish_of
    from tasks.profile_run import ProfileRun

    settings = load_settings()
    run = ProfileRun(
        wish=wish_of(params, settings),
        settings=settings,
        store=open_store(params.store or settings.store_url),
        folder=Path(),
    )
    plan = run.dry_run()
    if as_json:
        print_json({**asdict(plan), "label": "predicted"})
        return 0
    columns = ("config", "engine", "engines", "steps", "of", "region", "price_usd_per_h", "minutes")
    title = f"To be measured: at most {plan.bound_usd:.3g} USD, {plan.bound_s / 60:g} minutes (predicted)"
    print_table(title, columns, [tuple(row[name] for name in columns) for row in plan.rows])
    return 0
