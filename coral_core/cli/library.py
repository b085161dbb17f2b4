"""`coral library`: build, list, show, compare and tidy template libraries."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from coral_core.cli.options import AsJson, ScenarioName, StoreUrl
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.retention import (
    DEFAULT_KEEP,
    DEFAULT_OLDER_THAN,
    DryRun,
    Keep,
    OlderThan,
    Yes,
    remove_from_library,
)
from coral_core.cli.work import choose_executor, library_progress, open_configured_store, resolved_scenario
from coral_core.config.scenario import LibraryMethod
from coral_core.errors import StoreError, unknown_name
from coral_core.report.figures import stages_text, throughput_text

app = App(name="library", help="Build, list, show, compare and tidy template libraries.")

ExecutorName = Annotated[
    Literal["auto", "ray", "inline"],
    Parameter(name="--executor", help="auto: Ray where it is installed and pays, else processes of this machine."),
]


@app.command
def build(
    *,
    scenario: ScenarioName = "tiny",
    method: Annotated[LibraryMethod | None, Parameter(help="Default: the scenario's.")] = None,
    executor: ExecutorName = "auto",
    workers: Annotated[int | None, Parameter(help="Processes or CPUs; default: all of this machine's.")] = None,
    allow_partial: Annotated[
        bool, Parameter(negative="", help="Commit even where shards failed; plans may then be dearer than need be.")
    ] = False,
    keep_all: Annotated[
        bool, Parameter(negative="", help="Store dominated templates too; plans are the same without them.")
    ] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Only say what would be solved.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Build a scenario's template library; an interrupted build goes on where it was."""
    from tasks.library import Build, build_library, build_spec_from_scenario

    spec = build_spec_from_scenario(resolved_scenario(scenario), method=method, keep_all=keep_all)
    opened = open_configured_store(store)
    if dry_run:
        progress = Build(spec, opened).progress
        document = {"library": spec.library, "shards": progress.total, "finished": progress.done}
        if as_json:
            print_json(document)
        else:
            print_text(f"library {spec.library}: {progress.total} shards, {progress.done} of them finished already")
        return
    run = choose_executor(executor, workers=os.cpu_count() or 1 if workers is None else workers, spec=spec)
    with library_progress(spec.library, quiet=as_json) as on_progress:
        manifest = build_library(spec, opened, run, on_progress=on_progress, allow_partial=allow_partial)
    if as_json:
        print_json(manifest.model_dump(mode="json"))
        return
    print_text(
        f"library {manifest.library} version {manifest.version}: {manifest.rows:,} templates in "
        f"{manifest.shards_present} shards, {manifest.statistics.get('dominated', 0):,.0f} dominated ones dropped "
        f"-> {opened.url_of(f'libraries/{manifest.library}')}"
    )
    for record in manifest.failed:
        print_note(f"failed: {record.shard}: {record.error}")


@app.command(name="list")
def list_all(*, store: StoreUrl = None, as_json: AsJson = False) -> int:
    """List the libraries in the store and their newest version (exit code 6 where one cannot be read)."""
    from artifacts.library import list_libraries, list_versions, open_library

    opened = open_configured_store(store)
    found = []
    damaged = []
    for name in list_libraries(opened):
        try:
            manifest = open_library(opened, name).manifest
        except StoreError as error:
            damaged.append(f"library {name}: {error}")
            continue
        found.append(
            {
                "library": name,
                "version": manifest.version,
                "versions": len(list_versions(opened, name)),
                "templates": manifest.rows,
                "shards": manifest.shards_present,
                "failed": manifest.shards_failed,
                "created_at": manifest.created_at.isoformat(timespec="seconds"),
            }
        )
    if as_json:
        print_json(found)
    else:
        columns = ("library", "newest version", "versions", "templates", "shards", "failed", "created")
        print_table(f"Libraries in {opened.url}", columns, [tuple(item.values()) for item in found])
    for text in damaged:
        print_note(text)
    return StoreError.exit_code if damaged else 0


@app.command
def show(
    name: str,
    *,
    version: Annotated[int | None, Parameter(help="Default: the newest.")] = None,
    top: Annotated[
        int,
        Parameter(
            validator=validators.Number(gte=1),
            help="Templates shown per model and phase, most throughput per node first.",
        ),
    ] = 3,
    model: Annotated[str | None, Parameter(help="Only this model's templates.")] = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show a snapshot: what it was built from, what it holds, its best templates per model and phase."""
    from artifacts.library import open_library

    snapshot = open_library(open_configured_store(store), name, version)
    manifest = snapshot.manifest
    if as_json:
        print_json(manifest.model_dump(mode="json"))
        return
    rows = []
    for item in _best_templates(snapshot, top, model):
        stages = zip(item["stage_layers"], item["stage_nodes"], strict=True)
        rows.append(
            (
                item["model"],
                item["variant"],
                item["phase"],
                stages_text([{"layers": layers, "nodes": nodes} for layers, nodes in stages], "\n"),
                throughput_text(item["throughput_tokens_per_s"], item["throughput_requests_per_s"]),
                item["source"],
                item["template_id"],
            )
        )
    print_text(
        f"library {name} version {manifest.version}, created {manifest.created_at:%Y-%m-%d %H:%M} UTC by coral "
        f"{manifest.code_version}: {manifest.rows:,} templates, {manifest.shards_present} shards, "
        f"{manifest.shards_failed} failed; N_max {manifest.parameters.get('n_max')}, "
        f"rho {manifest.parameters.get('rho')}, method {manifest.parameters.get('method')}"
    )
    columns = ("model", "variant", "phase", "layers on nodes", "throughput", "source", "template")
    print_table("Best templates by throughput per node (predicted)", columns, rows)


@app.command
def diff(
    name: str,
    old: Annotated[int, Parameter(help="Version to compare from.")],
    new: Annotated[int | None, Parameter(help="Version to compare with; default: the newest.")] = None,
    *,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare two snapshots of a library: templates added, removed, and changed in throughput, per model and phase."""
    from artifacts.diff import DiffRow, diff_libraries
    from artifacts.library import open_library

    opened = open_configured_store(store)
    before, after = open_library(opened, name, old), open_library(opened, name, new)
    difference = diff_libraries(before, after)
    summary = [dataclasses.asdict(row) for row in difference.summary()]
    if as_json:
        print_json(summary)
        return
    columns = [field.name.replace("_", " ") for field in dataclasses.fields(DiffRow)]
    print_table(
        f"Library {name}: version {old} -> {after.manifest.version}", columns, [tuple(i.values()) for i in summary]
    )


@app.command
def gc(
    name: str,
    *,
    keep: Keep = DEFAULT_KEEP,
    older_than: OlderThan = DEFAULT_OLDER_THAN,
    yes: Yes = False,
    dry_run: DryRun = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Remove old versions and the data files that no kept one needs; without --yes, only say which.

    What a recorded plan needs stays, and so does all that was written or replaced within a day. Safe beside builds.
    """
    opened = open_configured_store(store)
    remove_from_library(opened, name, keep, older_than, yes=yes and not dry_run, as_json=as_json)


def _best_templates(snapshot: Any, top: int, model: str | None) -> list[dict[str, Any]]:  # noqa: ANN401 - a lazily imported type
    """The `top` rows of each model, variant and phase by throughput per node, best first; read a piece at a time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from artifacts.templates import phase_throughput

    if model is not None and model not in snapshot.models:
        raise unknown_name(f"model in library {snapshot.manifest.library}", model, snapshot.models, where="--model")
    best: dict[tuple[str, ...], Any] = {}
    for record, table in snapshot.tables(models=None if model is None else [model]):
        per_node = pc.divide(phase_throughput(table), pc.cast(table["n_nodes"], "float64"))
        rows = table.append_column("per_node", per_node)
        group = (record.shard.model, record.shard.variant, record.shard.phase.value)
        merged = pa.concat_tables([best[group], rows]) if group in best else rows
        best[group] = merged.sort_by([("per_node", "descending")]).slice(0, top)
    # Prefill before decode.
    groups = sorted(sorted(best, key=lambda group: group[2], reverse=True), key=lambda group: group[:2])
    return [row for group in groups for row in best[group].to_pylist()]
