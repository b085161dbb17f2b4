"""What the stage executor says is left of its instance, in a file that it replaces whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STATUS_FILE: Final = "stage_status.json"
_MOST_BYTES: Final = 1 << 20
STATUS_VARIABLE: Final = "CORAL_STAGE_STATUS"
"""As `plugin.stage_layout` has it, which needs libraries that only engines and agents have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """`weight_frac`: the share of the throughput that is left, 0 for a failed one; `lost_nodes`: why, by name."""

    weight_frac: float
    lost_nodes: Mapping[str, str]


class StatusFile:
    """The status file in a node's folder. An engine that writes none, or has not begun to, has no status."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.resolve() / STATUS_FILE
        self._stamp: tuple[int, int] | None = None
        self._status: StageStatus | None = None

    @property
    def env(self) -> dict[str, str]:
        """What tells the engine where to write."""
        return {STATUS_VARIABLE: str(self._path)}

    def clear(self) -> None:
        """Nothing of an earlier engine is left. OSError where it cannot be taken away."""
        self._path.unlink(missing_ok=True)
        self._stamp = self._status = None

    def read(self) -> StageStatus | None:
        """The newest status; None where there is none, or what is there is none."""
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_mtime_ns)
            if stamp != self._stamp:
                self._status = _parsed(self._path.read_bytes()[:_MOST_BYTES])
                self._stamp = stamp
        except OSError:
            self._stamp = self._status = None
        return self._status


def _parsed(text: bytes) -> StageStatus | None:
    try:
        said = json.loads(text)
        share = 0.0 if said["state"] == "failed" else float(said["weight_frac"])
        lost = {str(name): str(node["lost"]) for name, node in said["nodes"].items() if node["lost"] is not None}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    # Sums of throughputs may round to a little more than the whole.
    return StageStatus(weight_frac=min(share, 1.0), lost_nodes=lost) if 0 <= share < float("inf") else None
