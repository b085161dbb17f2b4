"""`coral doctor`: what is installed, licensed and reachable, and how old each input is."""

from __future__ import annotations

import os
import platform
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from importlib import metadata

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_table
from coral_core.errors import CoralError

STALE_PRICE_DAYS = 180
REFRESH = (
    "Stale prices: bring the dated tables in coral_core/catalog/data up to date (CONTRIBUTING.md, 'A node configuration "
    "or price'), or name today's in a scenario of your own (own_configs, docs/scenarios.md)."
)
EXTRAS = {
    "flows": ("prefect", "ray"),
    "aws": ("boto3",),
    "gurobi": ("gurobipy",),
    "report": ("jinja2", "pandas"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. `state`: ok, absent (optional and not there), stale, or failed."""

    group: str
    what: str
    state: str
    detail: str


def doctor(*, store: StoreUrl = None, as_json: AsJson = False) -> int:
    """Say what is installed, licensed and reachable, and how old each input is. Exit code 1 where something failed."""
    findings = [
        *_guarded("installed", _installed),
        *_guarded("solvers", _solvers),
        *_guarded("store", lambda: _store(store)),
        *_guarded("server", _prefect_server),
        *_guarded("server", _ray_cluster),
        *_guarded("inputs", _catalogs),
    ]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        print_table(
            "Coral doctor",
            ("group", "what", "state", "detail"),
            [(f.group, f.what, f.state, f.detail) for f in findings],
            note=REFRESH if any(finding.state == "stale" for finding in findings) else "",
        )
    return int(any(finding.state == "failed" for finding in findings))


def _guarded(group: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """One broken part does not hide the others."""
    try:
        yield from look()
    except CoralError as error:
        yield Finding(group=group, what=group, state="failed", detail=str(error))


def _installed() -> Iterator[Finding]:
    yield Finding(group="installed", what="python", state="ok", detail=platform.python_version())
    for package in ("coral-serve", "highspy", "numba", "numpy", "pyarrow", "obstore"):
        yield _package(package, "")
    for extra, packages in EXTRAS.items():
        for package in packages:
            yield _package(package, extra)


def _package(package: str, extra: str) -> Finding:
    try:
        return Finding(group="installed", what=package, state="ok", detail=metadata.version(package))
    except metadata.PackageNotFoundError:
        fix = f"optional: pip install 'coral-serve[{extra}]'" if extra else "reinstall coral-serve"
        return Finding(group="installed", what=package, state="absent" if extra else "failed", detail=fix)


def _solvers() -> Iterator[Finding]:
    from coral_core.solver.choose import solver_status

    for status in solver_status():
        size = "any size" if status.size_limit is None else f"up to {status.size_limit:,} columns and rows"
        detail = f"{status.version or 'not installed'}, {size}" if status.licensed else status.note
        state = "ok" if status.licensed else "absent"
        yield Finding(group="solvers", what=status.name, state=state, detail=detail)


def _store(url: str | None) -> Iterator[Finding]:
    from artifacts.library import list_libraries, open_library
    from artifacts.plans import list_plans
    from artifacts.store import open_store
    from coral_core.config.settings import load_settings

    settings = load_settings()
    opened = open_store(url or settings.store_url)
    origin = "--store" if url else "CORAL_STORE" if settings.store else "default, in the working folder"
    opened.check()
    names = list_libraries(opened)
    yield Finding(group="store", what=opened.url, state="ok", detail=f"{len(names)} libraries; from {origin}")
    now = datetime.now(UTC)
    for name in names:
        manifest = open_library(opened, name).manifest
        yield Finding(
            group="inputs",
            what=f"library {name}",
            state="ok",
            detail=f"version {manifest.version}, {_age(now, manifest.created_at)}",
        )
    times = list_plans(opened, settings.fleet)
    if times:
        yield Finding(group="inputs", what=f"last plan of {settings.fleet}", state="ok", detail=_age(now, max(times)))


def _prefect_server() -> Iterator[Finding]:
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        yield Finding(
            group="server",
            what="Prefect",
            state="absent",
            detail="PREFECT_API_URL is not set: flows use their own server",
        )
        return
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5) as answer:  # noqa: S310 - the user's URL
            yield Finding(group="server", what="Prefect", state="ok", detail=f"{url} answers {answer.status}")
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        yield Finding(group="server", what="Prefect", state="failed", detail=f"{url} does not answer: {error}")


def _ray_cluster() -> Iterator[Finding]:
    from coral_core.config.settings import load_settings

    address = load_settings().ray_address
    if address == "local":
        yield Finding(
            group="server", what="Ray", state="absent", detail="CORAL_RAY_ADDRESS is `local`: started per build"
        )
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            yield Finding(group="server", what="Ray", state="ok", detail=f"{address} answers")
    except (OSError, ValueError, OverflowError) as error:
        yield Finding(group="server", what="Ray", state="failed", detail=f"{address} does not answer: {error}")


def _catalogs() -> Iterator[Finding]:
    from coral_core.catalog import catalog_names, load_catalog, load_models
    from coral_core.catalog.spot import load_spot
    from coral_core.config.settings import load_settings

    today = datetime.now(UTC).date()
    for name in catalog_names():
        catalog = load_catalog(name)
        oldest = min(price.as_of for price in catalog.prices.values())
        yield _dated(f"prices of {name}", oldest, today)
        spot = load_spot(name)
        if spot:
            yield _dated(f"spot discounts of {name}", min(fact.as_of for fact in spot.values()), today)
    shapes = load_models(load_settings().models)
    oldest_model: date = min(shape.as_of for shape in shapes.values())
    yield Finding(group="inputs", what="models", state="ok", detail=f"{len(shapes)}, oldest entry {oldest_model}")


def _dated(what: str, oldest: date, today: date) -> Finding:
    days = (today - oldest).days
    state = "stale" if days > STALE_PRICE_DAYS else "ok"
    return Finding(group="inputs", what=what, state=state, detail=f"oldest {oldest}, {days} days old")


def _age(now: datetime, then: datetime) -> str:
    minutes = (now - then).total_seconds() / 60
    return (
        f"{minutes:.0f} min old"
        if minutes < 120
        else f"{minutes / 60:.0f} h old"
        if minutes < 2880
        else f"{minutes / 1440:.0f} d old"
    )
