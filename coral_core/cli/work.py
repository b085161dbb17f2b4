"""What commands that do work share: the store, the scenario, the executor and the progress bar."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from coral_core.config.settings import load_settings

if TYPE_CHECKING:
    from artifacts.store import Store
    from coral_core.config.resolve import ResolvedScenario
    from tasks.executor import Executor
    from tasks.library import BuildProgress


def open_configured_store(url: str | None) -> Store:
    """The store that was asked for, else the settings' one."""
    from artifacts.store import open_store

    return open_store(url or load_settings().store_url)


def resolved_scenario(name_or_path: str) -> ResolvedScenario:
    """A scenario, its names looked up in the catalogue and among the user's models."""
    from coral_core.config.resolve import resolve_scenario
    from coral_core.config.scenario import load_scenario

    return resolve_scenario(load_scenario(name_or_path), user_models=load_settings().models)


def choose_executor(name: Literal["auto", "ray", "inline"], *, workers: int, heavy: bool) -> Executor:
    """Ray, or processes of this machine; `auto` takes Ray only for heavy work, whose start-up it is worth."""
    from tasks.executor import InlineExecutor

    has_ray = importlib.util.find_spec("ray") is not None
    if name == "inline" or (name == "auto" and not (has_ray and heavy)):
        return InlineExecutor(processes=workers if heavy else 1)
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
