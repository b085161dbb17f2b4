"""Flow `build-library`: scenario -> shards -> executor -> Parquet -> one committed snapshot, shown in the UI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from artifacts.keys import library_group, manifest_key
from artifacts.library import Manifest
from artifacts.prefect_ui import ProgressReporter, publish_objects, publish_table
from artifacts.store import open_store
from coral_core.clock import SystemClock
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import load_settings
from flows.parameters import BuildLibraryParameters, artifact_key
from tasks.executor import Executor
from tasks.fanout import choose_executor
from tasks.library import (
    Build,
    BuildProgress,
    ProgressCallback,
    build_spec_from_scenario,
    failure_rows,
    manifest_rows,
)

_watcher: ContextVar[ProgressCallback | None] = ContextVar("progress watcher", default=None)


@contextmanager
def watched_by(on_progress: ProgressCallback) -> Iterator[None]:
    """Flow runs in this block, in this process, report their progress to `on_progress` too (a terminal's bar)."""
    token = _watcher.set(on_progress)
    try:
        yield
    finally:
        _watcher.reset(token)


@flow(name="build-library", flow_run_name="build-library-{params.scenario_name}")
def build_library(params: BuildLibraryParameters = BuildLibraryParameters()) -> int:  # noqa: B008 - frozen
    """Build a scenario's template library and commit it; the version of the snapshot.

    Shards that an earlier build finished are reused, so a run that was interrupted goes on where it was.
    """
    settings = load_settings()
    store = open_store(params.store or settings.store_url)
    resolved = resolve_scenario(load_scenario(params.scenario), user_models=settings.models)
    spec = replace(
        build_spec_from_scenario(
            resolved, method=None if params.method == "scenario" else params.method, keep_all=params.keep_all
        ),
        combinations_per_ilp_shard=params.combinations_per_ilp_shard,
        lattice_parts=params.lattice_parts,
    )
    executor = choose_executor(
        params.executor, ray_address=params.ray_address or settings.ray_address, workers=params.workers
    )
    build = Build(spec, store)
    with _progress_shown(build), executor.session() if build.missing else nullcontext():
        for group in build.groups:
            solve_group(build, executor, group, f"{group[0] + 1}-to-{group[-1] + 1}-of-{len(build.shards)}")
    manifest = commit_snapshot(build, allow_partial=params.allow_partial)
    get_run_logger().info(
        "library %s version %d: %s; committed at %s",
        manifest.library,
        manifest.version,
        progress_text(build.progress),
        store.url_of(manifest_key(manifest.library, manifest.version)),
    )
    return manifest.version


@task(
    name="solve-shards", task_run_name="solve-shards-{label}", cache_policy=NO_CACHE, retries=1, retry_delay_seconds=5
)
def solve_group(build: Build, executor: Executor, group: Sequence[int], label: str) -> None:  # noqa: ARG001 - in the name
    """Solve one group of shards on the executor, a bounded number in flight; a retry goes on with those missing."""
    build.run(executor, group)


@task(name="commit-snapshot", cache_policy=NO_CACHE)
def commit_snapshot(build: Build, *, allow_partial: bool) -> Manifest:
    """Commit the snapshot, and show in the UI what it holds, what failed, and where it lies."""
    key = artifact_key("library", build.spec.library)
    failures = failure_rows(build.records)
    if failures:
        publish_table(f"{key}-failures", failures, description=f"Shards of {build.spec.library} that failed")
    manifest = build.commit(allow_partial=allow_partial, clock=SystemClock())
    name = f"library {manifest.library} version {manifest.version}"
    publish_table(key, manifest_rows(manifest), description=f"Templates in {name}")
    places = {
        "manifest": manifest_key(manifest.library, manifest.version),
        "all of the library": library_group(manifest.library),
    }
    publish_objects(f"{key}-stored", build.store, places, description=f"Where {name} lies")
    return manifest


@contextmanager
def _progress_shown(build: Build) -> Iterator[None]:
    """The build's progress in the UI, and to whoever watches from this process."""
    watcher = _watcher.get()
    with ProgressReporter(artifact_key("library", build.spec.library, "progress"), total=len(build.shards)) as bar:

        def show(progress: BuildProgress) -> None:
            bar.update(progress.done, description=progress_text(progress))
            if watcher is not None:
                watcher(progress)

        build.on_progress = show
        show(build.progress)
        yield


def progress_text(progress: BuildProgress) -> str:
    """How far the build is, for people."""
    text = f"{progress.done} of {progress.total} shards ({progress.reused} reused), {progress.rows:,} templates"
    return f"{text}, {progress.failed} failed" if progress.failed else text
