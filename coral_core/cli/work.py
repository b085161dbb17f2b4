"""What commands that do work share: the store, the scenario, the executor and the progress bar."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from coral_core.config.settings import load_settings
from coral_core.errors import CoralError, InputError

if TYPE_CHECKING:
    from artifacts.store import Store
    from coral_core.config.resolve import ResolvedScenario
    from tasks.executor import Executor
    from tasks.library import BuildProgress, BuildSpec

SMALL_N_MAX = 4


def open_configured_store(url: str | None) -> Store:
    """The store that was asked for, else the settings' one."""
    from artifacts.store import open_store

    return open_store(url or load_settings().store_url)


def resolved_scenario(name_or_path: str, *, pessimistic: bool = False) -> ResolvedScenario:
    """A scenario, its names looked up in the catalogue and among the user's models; `pessimistic` as if it said so itself."""
    from coral_core.config.resolve import resolve_scenario
    from coral_core.config.scenario import load_scenario, scenario_place

    scenario = load_scenario(name_or_path)
    if pessimistic:
        capacity = scenario.capacity.model_copy(update={"pessimistic": True})
        scenario = scenario.model_copy(update={"capacity": capacity})
    try:
        return resolve_scenario(scenario, user_models=load_settings().models)
    except CoralError as error:
        raise type(error)(error.what, where=scenario_place(name_or_path, error.where), fix=error.fix) from None


def choose_executor(name: Literal["auto", "ray", "inline"], *, workers: int, spec: BuildSpec) -> Executor:
    """Ray, or processes of this machine; `auto` takes Ray for integer programs only, which are worth its start-up."""
    from tasks.executor import InlineExecutor

    if workers < 1:
        raise InputError(f"{workers} workers cannot build anything", where="--workers", fix="give 1 or more")
    has_ray = importlib.util.find_spec("ray") is not None
    slow = spec.method == "ilp"
    if name == "inline" or (name == "auto" and not (has_ray and slow)):
        # Small libraries are done before a second process has imported what it needs.
        return InlineExecutor(processes=workers if slow or spec.n_max > SMALL_N_MAX else 1)
    if not has_ray:
        from coral_core.cli.flows import flows_extra_missing

        raise flows_extra_missing(ModuleNotFoundError("ray", name="ray"))
    from tasks.fanout import RayExecutor

    return RayExecutor(address=load_settings().ray_address, workers=workers)


@contextmanager
def library_progress(library: str, *, quiet: bool) -> Iterator[Callable[[BuildProgress], None]]:
    """A progress bar on stderr for the build of a library; nothing where `quiet`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("shards, {task.fields[rows]:,} templates"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task(f"library {library}", total=None, rows=0)
        yield lambda progress: bar.update(task, total=progress.total, completed=progress.done, rows=progress.rows)


@contextmanager
def counted_progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr for work that says how many parts of how many are done; nothing where `quiet`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, total=total, completed=done)
