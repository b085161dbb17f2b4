"""`coral artifacts`: look at what lies in the store, and fetch it, wherever the store is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, validators

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import console, print_json, print_note, print_table, print_text
from coral_core.cli.retention import (
    DEFAULT_KEEP,
    DEFAULT_OLDER_THAN,
    DryRun,
    Keep,
    OlderThan,
    Yes,
    remove_from_library,
    remove_from_records,
)
from coral_core.cli.work import open_configured_store
from coral_core.errors import InputError

if TYPE_CHECKING:
    from artifacts.browse import Description

app = App(name="artifacts", help="List, show and fetch what lies in the object store.")

Key = Annotated[str, Parameter(help="Key of an object, as `coral artifacts ls` prints it.")]


@app.command
def ls(
    prefix: Annotated[str, Parameter(help="Group to list; default: the whole store's groups.")] = "",
    *,
    recursive: Annotated[
        bool, Parameter(negative="", help="All objects below, not only those directly there.")
    ] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the groups and objects under a prefix, with sizes and times (UTC, by the store's clock)."""
    from artifacts.browse import listing
    from artifacts.group_pages import size_text

    opened = open_configured_store(store)
    found = listing(opened, prefix, recursive=recursive)
    if as_json:
        objects = [
            {"key": e.key, "size_bytes": e.size_bytes, "modified": e.modified.isoformat(timespec="seconds")}
            for e in found.entries
        ]
        print_json({"store": opened.url, "prefix": found.prefix, "groups": list(found.groups), "objects": objects})
        return
    rows: list[tuple[object, ...]] = [(f"{group}/", "", "") for group in found.groups]
    rows += [(e.key, size_text(e.size_bytes), f"{e.modified:%Y-%m-%d %H:%M:%S}") for e in found.entries]
    total = size_text(sum(entry.size_bytes for entry in found.entries))
    note = f"{len(found.groups)} groups, {len(found.entries)} objects, {total}"
    where = f"{opened.url}/{found.prefix}".rstrip("/")
    print_table(where, ("key", "size", "written (UTC)"), rows, note=note)


@app.command
def show(
    key: Annotated[str, Parameter(help="Key of an object, or of a group that has a page.")] = "",
    *,
    rows: Annotated[int, Parameter(validator=validators.Number(gte=0), help="Rows of a table to show at most.")] = 10,
    browser: Annotated[bool, Parameter(name="--open", negative="", help="Open it in the browser.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show an object: JSON indented, a table's columns and first rows, a manifest's counts, a text as it is."""
    from artifacts.browse import describe, link_of

    opened = open_configured_store(store)
    found = describe(opened, key, rows=rows)
    link = link_of(opened, found.key)
    if as_json:
        content = found.text or found.document
        head = {"key": found.key, "url": found.url, "link": link, "kind": found.kind, "size_bytes": found.size_bytes}
        print_json({**head, "content": content})
    else:
        _print_object(found, link)
    if browser:
        import webbrowser

        if not webbrowser.open(link):
            print_note(f"no browser could be started: open {link}")


@app.command
def get(
    key: Key,
    *,
    to: Annotated[
        Path,
        Parameter(
            allow_leading_hyphen=True, help="File or folder to write to, `-` for standard output; default: here."
        ),
    ] = Path(),
    force: Annotated[bool, Parameter(negative="", help="Replace a file that is there.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Fetch an object into a file, all of it or nothing; a file that is there stays unless --force is given."""
    from artifacts.browse import fetch

    opened = open_configured_store(store)
    if str(to) == "-":
        if as_json:
            raise InputError("--json and the object cannot both go to standard output", where="--to", fix="name a file")
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.buffer.write(fetch(opened, key, Path(folder)).read_bytes())
            sys.stdout.buffer.flush()
        return
    path = fetch(opened, key, to, force=force)
    size_bytes = path.stat().st_size
    if as_json:
        print_json({"key": key.strip("/"), "path": str(path.resolve()), "size_bytes": size_bytes})
    else:
        print_text(f"{opened.url_of(key.strip('/'))} -> {path} ({size_bytes:,} bytes)")


@app.command
def gc(
    group: Annotated[str, Parameter(help="plans/FLEET, evaluations/SCENARIO or libraries/NAME.")],
    *,
    keep: Keep = DEFAULT_KEEP,
    older_than: OlderThan = DEFAULT_OLDER_THAN,
    yes: Yes = False,
    dry_run: DryRun = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Remove old plans, evaluations or library versions; without --yes, only say which.

    A plan that the running fleet may come from stays, and so does all that was written within a day. Remove plans
    before library versions: a plan keeps the version it was made from.
    """
    kind, _, name = group.strip("/").partition("/")
    remove = {"plans": remove_from_records, "evaluations": remove_from_records, "libraries": remove_from_library}.get(
        kind
    )
    if remove is None or not name or "/" in name:
        raise InputError(
            f"{group!r} is no group with a retention",
            where="group",
            fix="name plans/FLEET, evaluations/SCENARIO or libraries/NAME",
        )
    what = name if kind == "libraries" else f"{kind}/{name}"
    remove(open_configured_store(store), what, keep, older_than, yes=yes and not dry_run, as_json=as_json)


def _print_object(found: Description, link: str) -> None:
    match found.kind:
        case "json":
            print_text(json.dumps(found.document, indent=2, ensure_ascii=False))
        case "parquet":
            _print_parquet(found)
        case "manifest":
            _print_manifest(found)
        case "markdown":
            _print_markdown(found.text)
        case "text":
            print_text(found.text.rstrip("\n"))
        case "html":
            print_text(f"a page of {found.size_bytes:,} bytes: open {link} in a browser (--open does)")
        case _:
            print_text(f"{found.size_bytes:,} bytes of no kind that can be shown: fetch it with `coral artifacts get`")


def _print_markdown(text: str) -> None:
    out = console()
    if out.is_terminal:
        from rich.markdown import Markdown

        out.print(Markdown(text))
    else:
        print_text(text.rstrip("\n"))


def _print_parquet(found: Description) -> None:
    table = found.document
    columns = [(c["column"], c["type"], "yes" if c["nullable"] else "no") for c in table["columns"]]
    print_table(f"{found.key}: {table['rows']:,} rows", ("column", "type", "may be null"), columns)
    for number, row in enumerate(table["head"], 1):
        print_table(f"row {number}", ("column", "value"), [(name, _cell(value)) for name, value in row.items()])


def _print_manifest(found: Description) -> None:
    manifest = found.document
    facts = {
        name: value for name, value in manifest.items() if isinstance(value, str | int | float) and not _is_empty(value)
    }
    print_table(found.key, ("fact", "value"), [(name, str(value)) for name, value in facts.items()])
    rows = [tuple(group.values()) for group in manifest["groups"]]
    print_table("Shards", [name.replace("_", " ") for name in manifest["groups"][0]] if rows else ("none",), rows)
    for name in ("parameters", "inputs", "statistics"):
        items = [(key, _cell(value)) for key, value in manifest[name].items()]
        if items:
            print_table(name.capitalize(), ("name", "value"), items)


def _is_empty(value: object) -> bool:
    return value == "" or value is None


def _cell(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
