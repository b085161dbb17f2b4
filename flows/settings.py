"""Defaults for Prefect that keep it quiet, offline and patient; what the user's environment says goes before them.

Prefect reads its environment when it is imported, so this runs when the package `flows` is (see `flows/__init__.py`).
"""

from __future__ import annotations

import os
from typing import Final

DEFAULTS: Final = {
    # Nothing calls home: the SDK's telemetry, the server's heartbeat, and the newer UI's configuration request.
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # The ephemeral server takes longer than the default 20 s where it makes its database or the machine is busy.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # In memory, leases leak their slots and end running flows when the server restarts.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # A flow whose process is gone is noticed in minutes.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def set_environment_defaults() -> None:
    """Set each default that the environment does not set already."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
