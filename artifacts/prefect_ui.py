"""Prefect's own artifacts: tables, Markdown, links and progress in its UI. The only file here that needs Prefect.

For use inside a synchronous flow or task run; nothing is shown elsewhere. Prefect has no artifact type for files, so
what lies in the store is shown as links to it.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Final, Self, cast
from uuid import UUID

from artifacts.browse import link_of
from artifacts.canonical import plain_value
from artifacts.store import Store
from coral_core.clock import Clock, SystemClock
from coral_core.errors import InputError

PROGRESS_INTERVAL_S: Final = 2.0
"""An update costs about 14 ms and a row in the server's database."""

_LOG: Final = logging.getLogger(__name__)
_KEY: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def checked_key(key: str) -> str:
    """`key`, if Prefect takes it: lower-case letters, digits and single dashes. Raises InputError."""
    if not _KEY.fullmatch(key):
        raise InputError(f"{key!r} is not an artifact key", where="artifact", fix="use a-z, 0-9 and single dashes")
    return key


def publish_table(key: str, rows: Sequence[Mapping[str, object]], *, description: str = "") -> UUID:
    """Show rows as a sortable table, columns in the order of the first row; returns the artifact's id."""
    table = [plain_value(row, f"rows[{index}]") for index, row in enumerate(rows)]
    return _created("create_table_artifact", table=table, key=checked_key(key), description=description or None)


def publish_markdown(key: str, markdown: str, *, description: str = "") -> UUID:
    """Show a Markdown text; returns the artifact's id."""
    return _created(
        "create_markdown_artifact", markdown=markdown, key=checked_key(key), description=description or None
    )


def publish_link(text: str, url: str, *, key: str | None = None, description: str = "") -> UUID:
    """Show a link, such as to an object of the store; returns the artifact's id.

    With a key it has a history on the artifacts page, without it is on the page of its run only.
    """
    return _created(
        "create_link_artifact",
        link=url,
        link_text=text,
        key=None if key is None else checked_key(key),
        description=description or None,
    )


def publish_objects(key: str, store: Store, objects: Mapping[str, str], *, description: str = "") -> UUID:
    """Show where objects of the store (URL or key, by name) are to be opened, and the command that shows each.

    A page that came over http cannot open a local file, so there is no link to one, but its address.
    """
    lines = []
    for name, place in objects.items():
        object_key = place.removeprefix(f"{store.url}/")
        url, link = store.url_of(object_key), link_of(store, object_key)
        where = f"`{url}`" if link.startswith("file:") else f"[{url}]({link})"
        lines += [f"**{name}**", f"- {where}", f"- `coral artifacts show {object_key}`", ""]  # a table cuts them off
    return publish_markdown(key, "\n".join(lines), description=description)


class ProgressReporter:
    """A progress bar of `total` units in the UI, updated every two seconds at most.

    Use as a context manager: it shows 0 at once and the last state at the end, whether the work succeeded or not. A
    server that does not answer costs the bar, never the work: that is logged.
    """

    def __init__(self, key: str, *, total: int, description: str = "", clock: Clock | None = None) -> None:
        if total < 0:
            raise InputError(f"{total} units cannot be done", where=f"artifact {key}")
        self._key = checked_key(key)
        self._total = total
        self._description = description
        self._clock = clock or SystemClock()
        self._artifact: UUID | None = None
        self._done = 0
        self._shown: tuple[int, str] | None = None
        self._shown_at_s = -float("inf")

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown != (self._done, self._description):
            self._show()

    def update(self, done: int, *, description: str | None = None) -> None:
        """Say that `done` units in all are done; shown when two seconds have passed since the last time."""
        self._done = done
        if description is not None:
            self._description = description
        if self._clock.monotonic_s() - self._shown_at_s >= PROGRESS_INTERVAL_S:
            self._show()

    @property
    def percent(self) -> float:
        """Done of total, 0 to 100; nothing to do is all done."""
        return 100.0 * min(max(self._done / self._total, 0.0), 1.0) if self._total else 100.0

    def _show(self) -> None:
        self._shown, self._shown_at_s = (self._done, self._description), self._clock.monotonic_s()
        state = {"progress": self.percent, "description": self._description or None}
        try:
            if self._artifact is None:
                self._artifact = _created("create_progress_artifact", key=self._key, **state)
            else:
                _prefect().artifacts.update_progress_artifact(artifact_id=self._artifact, **state)
        except _server_faults() as error:
            _LOG.warning("progress %s is not shown: %s", self._key, error)


def _created(function: str, **content: object) -> UUID:
    return cast("UUID", getattr(_prefect().artifacts, function)(**content))


def _server_faults() -> tuple[type[Exception], ...]:
    """What a server that is away, busy or refusing makes the client raise."""
    return importlib.import_module("httpx").HTTPError, _prefect().exceptions.PrefectException


def _prefect() -> ModuleType:
    """Prefect takes seconds to import and is in no base install: only who shows something pays for it."""
    try:
        importlib.import_module("prefect.artifacts")
    except ImportError as error:
        raise InputError(
            "Prefect is not installed", where="artifacts", fix="pip install 'coral-serve[flows]'"
        ) from error
    return importlib.import_module("prefect")
