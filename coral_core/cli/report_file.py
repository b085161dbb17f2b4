"""`--report PATH`: the report as one HTML file, wherever its reader wants it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from coral_core.cli.output import print_note
from coral_core.errors import InputError

ReportPath = Annotated[
    Path | None, Parameter(name="--report", help="Write the report here too, as one HTML file that opens offline.")
]


def check_report(path: Path | None) -> None:
    """Raise InputError where a report cannot be written there, or not be made: before the long work, not after."""
    from coral_core.report.page import can_render

    if path is not None and not can_render():
        raise InputError("jinja2 is not installed", where="--report", fix="pip install 'coral-serve[report]'")
    check_file(path, such_as="report.html")


def check_file(path: Path | None, *, such_as: str) -> None:
    """Raise InputError where a file, if one is asked for, cannot be written: before the long work, not after."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise InputError("no such folder", where=str(path.parent), fix="create it, or write elsewhere")
    if path.is_dir():
        raise InputError("is a folder", where=str(path), fix=f"name a file in it, such as {such_as}")


def write_report(path: Path | None, page: str | None) -> None:
    """Write the page where one was asked for. Raises InputError where the file cannot be written."""
    if path is not None and page is not None:
        write_file(path, page)
        print_note(f"report -> {path}")


def write_file(path: Path, text: str) -> None:
    """Write a text for people. Raises InputError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path), fix="name another file") from error
