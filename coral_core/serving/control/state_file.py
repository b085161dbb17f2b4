"""What a coordinator writes down: enough to go on after a restart, and what `coral coordinator status` shows."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from coral_core.domain.workload import Phase
from coral_core.errors import ServingError
from coral_core.serving.control.held import Held, Seat, Stage
from coral_core.serving.control.messages import MOST_NODES, Name, as_document

STATE_FILE: Final = "state.json"
FORMAT: Final = 1
_KEPT: Final = ("template_id", "model", "nodes", "epoch", "region", "reason", "launch_id", "url", "weight", "draining")
_KEPT_SINCE: Final = ("weight_frac", "lost_nodes")
"""Which a coordinator of an earlier version has not written."""


class NoStateError(ServingError):
    """Nothing has been written down here yet."""


class _Row(msgspec.Struct, kw_only=True):
    """What is taken from an instance's row."""

    instance: Name
    phase: Phase
    stage: Stage
    template_id: str
    model: str
    nodes: Annotated[int, msgspec.Meta(ge=1, le=MOST_NODES)]
    epoch: int
    region: str
    reason: str
    launch_id: str
    url: str
    weight: Annotated[float, msgspec.Meta(ge=0)] | None
    draining: bool
    weight_frac: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    lost_nodes: dict[str, str] = {}


def state_document(
    held: Iterable[Held], *, name: str, endpoint: str, now: datetime, now_s: float, counts: Mapping[str, object]
) -> dict[str, object]:
    """All that is held, as JSON; `counts` says what was refused and dropped, and how the gateway is."""
    return {
        "format": FORMAT,
        "coordinator": name,
        "endpoint": endpoint,
        "pid": os.getpid(),
        "at": now.isoformat(),
        **counts,
        "instances": [_instance(one, now_s) for one in sorted(held, key=lambda one: one.instance_id)],
    }


@contextmanager
def alone_in(folder: Path, who: str) -> Iterator[None]:
    """One of a kind, `who`, per folder at a time. ServingError where one is there.

    Another coordinator would take the first one's instances for lost; another agent would end the first one's engine.

    A folder that cannot be written to belongs to whoever comes: nothing can be kept in it.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / ".lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "end it first, or give this one a folder of its own"
                raise ServingError(f"another {who} runs here", where=str(folder), fix=fix) from None
        yield


def write_state(folder: Path, document: Mapping[str, object]) -> None:
    """The file whole. Raises ServingError where it cannot be written."""
    partial = folder / f".{STATE_FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
        partial.replace(folder / STATE_FILE)
    except OSError as error:
        what = f"cannot write down the state: {error.strerror or error}"
        fix = "make it a folder that can be written to; until then a restart learns only what agents and gateway say"
        raise ServingError(what, where=str(folder), fix=fix) from None


def read_state(folder: Path) -> dict[str, Any]:
    """What was written down last. Raises NoStateError where nothing was, ServingError where it is damaged."""
    path = folder / STATE_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NoStateError(
            "no coordinator has run here", where=str(path), fix="coral coordinator run --config FILE starts one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ServingError(f"cannot be read: {error}", where=str(path)) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ServingError("is no state of this version", where=str(path))
    return document


def restored(document: Mapping[str, Any], now_s: float) -> list[Held]:
    """What was held, without its agents: they come by themselves. Raises ServingError for a damaged document."""
    try:
        rows = msgspec.convert(document.get("instances"), list[_Row])
    except msgspec.ValidationError as error:
        raise ServingError(f"the state that was written down is damaged: {error}") from None
    return [
        Held(
            instance_id=row.instance,
            phase=row.phase,
            stage=row.stage,
            first_s=now_s,
            since_s=now_s,
            **{name: getattr(row, name) for name in (*_KEPT, *_KEPT_SINCE)},
        )
        for row in rows
        if row.stage != Stage.GATHERING
    ]


def _instance(one: Held, now_s: float) -> dict[str, object]:
    return {
        "instance": one.instance_id,
        "phase": one.phase.value,
        "stage": one.stage.value,
        "since_s": round(now_s - one.since_s, 1),
        **{name: getattr(one, name) for name in (*_KEPT, *_KEPT_SINCE)},
        "rejected": one.rejected,
        "agents": [_agent(number, seat, now_s) for number, seat in sorted(one.seats.items())],
    }


def _agent(number: int, seat: Seat, now_s: float) -> dict[str, object]:
    return {
        "node": number,
        "node_id": seat.hello.node_id,
        "host": seat.hello.host,
        "key": seat.key_name,
        "heard_s_ago": round(now_s - seat.heard_s, 1),
        "gone": seat.gone,
        **as_document(seat.report),
    }
