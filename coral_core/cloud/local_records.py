"""What is written of local nodes: small files that are never changed and appear whole.

<folder>/lock                        held by whoever starts or stops
<folder>/account.json                whose nodes these are
<folder>/nodes/<id>/node.json        the order and what the node may use; written before its process is started
<folder>/nodes/<id>/agent.yaml       what the agent reads
<folder>/nodes/<id>/process.json     pid, start time and boot of the agent
<folder>/nodes/<id>/stopped.json     when it was told to end
<folder>/nodes/<id>/agent.log        and what else the agent keeps there
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from coral_core.cloud.provisioner import NodeOrder
from coral_core.cloud.tags import write_tags
from coral_core.domain.fleet import FleetId
from coral_core.domain.hardware import Market

RECORD: Final = "node.json"
PROCESS: Final = "process.json"
STOPPED: Final = "stopped.json"
AGENT_FILE: Final = "agent.yaml"
AGENT_LOG: Final = "agent.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """A node's record: what was ordered, and what of the machine it may use. `tags` are as in any cloud."""

    node_id: str
    account: str
    token: str
    region: str
    zone: str
    market: Market
    tags: Mapping[str, str]
    cpus: tuple[int, ...]
    memory_bytes: int
    first_port: int
    ports: int
    launched_at: datetime
    folder: Path

    def ordered_as(self, fleet: FleetId, order: NodeOrder) -> bool:
        """Whether this is what such an order makes."""
        asked = (order.region, order.zone, order.market, write_tags(fleet, order.tags))
        return asked == (self.region, self.zone, self.market, self.tags)


def own_account(folder: Path) -> str:
    """The folder's own name, made when first asked for; the first of several that ask at once gives it."""
    path = folder / "account.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".account.{uuid.uuid4().hex}"
        partial.write_text(json.dumps({"account": f"local-{uuid.uuid4().hex[:12]}"}), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(partial, path)
        partial.unlink()
    return str(read_document(path)["account"])


def record_document(record: LocalNode) -> dict[str, object]:
    """The record as it is written."""
    names = [name for name in LocalNode.__slots__ if name != "folder"]
    return {name: getattr(record, name) for name in names} | {"launched_at": record.launched_at.isoformat()}


def read_record(path: Path) -> LocalNode | str:
    """The record in a node's folder, or what is wrong with it."""
    try:
        item = read_document(path / RECORD)
        changed = {
            "market": Market(item["market"]),
            "cpus": tuple(item["cpus"]),
            "launched_at": datetime.fromisoformat(item["launched_at"]),
        }
        return LocalNode(**{**item, **changed, "folder": path})
    except (ValueError, KeyError, TypeError) as error:
        return f"its record is damaged: {error!r}"


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in a file; OSError, ValueError, TypeError."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise TypeError(f"{path.name} holds no object")
    return found


def write_whole(path: Path, document: Mapping[str, object]) -> None:
    """The file whole, on disk before the name is; what an earlier call that was cut off has left is replaced."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
