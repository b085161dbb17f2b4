"""`coral profile`: measured layer times in the store, and the factors of estimates made again from reference data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from coral_core.cli.ledger import DataFolder
from coral_core.cli.options import AsJson, StoreUrl, WholeNumber
from coral_core.cli.output import print_json, print_note, print_table, print_text
from coral_core.cli.profile_run import run
from coral_core.cli.report_file import check_file, write_file
from coral_core.cli.work import open_configured_store
from coral_core.errors import InputError, StoreError

if TYPE_CHECKING:
    from artifacts.store import Store
    from coral_core.perf.profile import Profile

app = App(name="profile", help="Measured layer times, and the factors that estimates rest on.")
app.command(run)
_CATALOG = Annotated[
    str, Parameter(help="Catalogue that has the node configuration, or a scenario's YAML file whose own_configs do.")
]


@app.command
def fit(
    *,
    data: DataFolder = None,
    out: Annotated[Path | None, Parameter(help="Write the fitted tables into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit expert kernels, the engine's costs and error bars to reference data, beside those that ship.

    Nothing that ships changes: the tables can take the place of those under coral_core/perf/data.
    """
    from coral_core.clock import SystemClock
    from coral_core.config.layer_times import reference_folder
    from tasks.fit_factors import changes, fit_tables

    if out is not None and not out.is_dir():
        raise InputError("no such folder", where=str(out), fix="create it")
    tables = fit_tables(reference_folder(data), as_of=SystemClock().now().date())
    rows = changes(tables)
    for name, text in tables.items() if out is not None else ():
        assert out is not None
        write_file(out / name, text)
        print_note(f"written to {out / name}")
    if as_json:
        print_json({"factors": rows, "tables": tables})
        return
    print_table(
        "Factors (fitted to measurements)", ("what", "fitted", "shipped"), [tuple(row.values()) for row in rows]
    )


@app.command(name="import")
def import_profile(
    file: Annotated[Path, Parameter(help="CSV with the times; its columns are named above.")],
    *,
    model: Annotated[str, Parameter(help="Model that was measured.")],
    config: Annotated[str, Parameter(help="Node configuration that it was measured on.")],
    engine: Annotated[str, Parameter(help="Engine that ran, such as vllm.")],
    version: Annotated[str, Parameter(help="Its version.")],
    source: Annotated[str, Parameter(help="Where the times come from.")],
    dtype: Annotated[
        str | None, Parameter(help="Variant of the model; default: what its id says, else its own.")
    ] = None,
    flag: Annotated[
        tuple[str, ...],
        Parameter(
            help="An engine flag it ran with; may be given several times.", allow_leading_hyphen=True, negative=""
        ),
    ] = (),
    catalog: _CATALOG = "aws-real",
    rows_of: Annotated[str | None, Parameter(help="Layer time tables: the model's name in the file.")] = None,
    node: Annotated[str | None, Parameter(help="Layer time tables: the node's name in the file.")] = None,
    tp: Annotated[WholeNumber, Parameter(help="Layer time tables: GPUs that the layer was split over.")] = 1,
    context: Annotated[float | None, Parameter(help="Layer time tables: context of the decode times, tokens.")] = None,
    dry_run: Annotated[bool, Parameter(negative="", help="Check the file, store nothing.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Check per-layer times from a CSV and store them as a profile.

    Columns: phase,tp,requests,tokens,layer_ms and any of fixed_ms,samples,cv_frac; or those of a layer time table
    (model,node,phase,x,time_ms_per_layer,x_meaning). Times faster than the GPU's peaks allow, NaN, zeros, rows that are there
    twice and times that fall as steps grow are refused, with row numbers.
    """
    from artifacts.profiles import write_profile
    from coral_core.catalog import load_models
    from coral_core.catalog.model_ids import model_by_any_name, variant_by_name
    from coral_core.clock import SystemClock
    from coral_core.config.settings import load_settings
    from coral_core.perf.profile import Profile, ProfileKey
    from coral_core.perf.profile_check import checked_points
    from tasks.profile_import import is_layer_time_table, points_of_layer_times, profiled_config, read_points

    models = load_models(load_settings().models)
    for option, text in (("--engine", engine), ("--version", version), ("--source", source)):
        if not text.strip():
            raise InputError("is empty", where=option, fix="profiles of an engine that nobody knows are of no use")
    shape = model_by_any_name(models, model)
    place = profiled_config(catalog, config)
    if is_layer_time_table(file):
        if rows_of is None or node is None or context is None:
            raise InputError(
                "is a layer time table", where=file.name, fix="say whose rows count: --rows-of, --node and --context"
            )
        if not 0 < context < math.inf:
            raise InputError(f"is {context!r}, must be a number above 0", where="--context")
        points, lines = points_of_layer_times(file, model=rows_of, node=node, tp=tp, context_tokens=context)
    else:
        points, lines = read_points(file)
    variant = variant_by_name(models, model, dtype)
    now = SystemClock().now()
    profile = Profile(
        key=ProfileKey(
            model=shape.name, variant=variant, config=place.name, engine=engine, version=version, flags=flag
        ),
        points=checked_points(points, shape, variant, place.gpu, place.gpu_count, where=file.name, lines=lines),
        source=source,
        as_of=now.date(),
    )
    key = "" if dry_run else write_profile(open_configured_store(store), profile, time=now)
    document = {**_summary(profile), "key": key or None}
    if as_json:
        print_json(document)
    else:
        what = "checked, not stored" if dry_run else f"stored as {key}"
        print_text(f"{len(points)} times of {shape.name} on {place.name}: {what}")


@app.command(name="list")
def list_all(*, store: StoreUrl = None, as_json: AsJson = False) -> int:
    """List the newest profile of each model, node configuration and engine; those that cannot be read are named (exit code 6)."""
    from artifacts.profiles import list_profiles, read_profile

    opened = open_configured_store(store)
    rows, damaged = [], 0
    for key in list_profiles(opened):
        try:
            rows.append({**_summary(read_profile(opened, key)), "key": key})
        except StoreError as error:
            damaged += 1
            print_note(f"coral: {error}")
    if as_json:
        print_json(rows)
    else:
        columns = ("model", "config", "engine", "points", "tps", "as_of", "source")
        print_table("Profiles (measured)", columns, [_cells(row, columns) for row in rows])
        if rows:
            print_text("their keys, in this order:")
        for row in rows:
            print_text(row["key"])
    return StoreError.exit_code if damaged else 0


@app.command
def show(
    key: Annotated[str, Parameter(help="The profile's key (coral profile list).")],
    *,
    chart: Annotated[Path | None, Parameter(help="Write times against step size here, as SVG.")] = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show a profile's times: as stored, one row per measured point."""
    from dataclasses import asdict

    profile = _found(open_configured_store(store), key)
    if chart is not None:
        check_file(chart, such_as="profile.svg")
        from tasks.profile_chart import profile_chart

        write_file(chart, profile_chart(profile))
        print_note(f"chart -> {chart}")
    rows = [{**asdict(point), "phase": point.phase.value} for point in profile.points]
    if as_json:
        facts = {"kv_tokens": dict(profile.kv_tokens), "start_s": dict(profile.start_s)}
        print_json({**_summary(profile), **facts, "points": rows})
        return
    columns = ("phase", "tp", "requests", "tokens", "layer_s", "fixed_s", "samples", "cv_frac")
    summary = _summary(profile)
    title = f"{summary['model']} on {summary['config']}, {summary['engine']} (measured): {summary['source']}"
    print_table(title, columns, [_cells(row, columns) for row in rows])


@app.command
def compare(
    first: Annotated[str, Parameter(help="A profile's key (coral profile list).")],
    second: Annotated[str | None, Parameter(help="Another profile's key; default: the analytic estimate.")] = None,
    *,
    catalog: _CATALOG = "aws-real",
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare a profile's points with another profile, or with what estimates say: quantiles of the relative error.

    `sources` counts how many of the values compared with were measured, interpolated, extrapolated or estimated.
    """
    from tasks.profile_compare import against_estimates, against_profile

    opened = open_configured_store(store)
    profile = _found(opened, first)
    rows = against_profile(profile, _found(opened, second)) if second else against_estimates(profile, catalog=catalog)
    if as_json:
        print_json({"profile": first, "with": second or "estimates", "rows": rows})
        return
    columns = ("phase", "tp", "n", "median_abs_error_frac", "p90_abs_error_frac", "median_error_frac", "sources")
    what = f"{second} (measured)" if second else "estimates (predicted)"
    for row in rows:
        row["sources"] = [f"{count} {source}" for source, count in row["sources"].items()]
    print_table(f"{what} against {first} (measured)", columns, [_cells(row, columns) for row in rows])


def _found(store: Store, key: str) -> Profile:
    from artifacts.profiles import list_profiles, read_profile
    from coral_core.errors import unknown_name

    if not store.exists(key):
        raise unknown_name("profile", key, list_profiles(store), where="KEY")
    return read_profile(store, key)


def _summary(profile: Profile) -> dict[str, Any]:
    return {
        "kind": "measured",
        "model": profile.key.model,
        "dtype": profile.key.variant,
        "config": profile.key.config,
        "engine": profile.key.engine_name,
        "flags": list(profile.key.flags),
        "points": len(profile.points),
        "tps": list(profile.tps),
        "source": profile.source,
        "as_of": profile.as_of.isoformat(),
    }


def _cells(row: dict[str, Any], columns: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(", ".join(map(str, row[c])) if isinstance(row[c], list) else row[c] for c in columns)
