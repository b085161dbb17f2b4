"""`coral fleet metrics`: what the records of fleets say, for Prometheus."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

from cyclopts import Parameter

from coral_core.cli.options import StoreUrl
from coral_core.cli.output import print_note
from coral_core.cli.work import open_configured_store
from coral_core.errors import InputError


def metrics(
    *fleets: Annotated[str, Parameter(help="Fleets; default: all in the store.")],
    listen: Annotated[str, Parameter(help="Where Prometheus may ask, as HOST:PORT.")] = "127.0.0.1:9464",
    once: Annotated[bool, Parameter(negative="", help="Print the metrics and end.")] = False,
    store: StoreUrl = None,
) -> None:
    """Serve cost, nodes, capacity, shortfall, outcomes and refusals of fleets to Prometheus, read anew at each scrape.

    infra/prometheus/alerts.yaml and infra/grafana/coral.json are written for these names.
    """
    host, port = _address(listen)
    try:
        from prometheus_client import start_http_server

        from tasks.fleet_metrics import FleetMetrics, exposition, registry_of
    except ModuleNotFoundError as error:
        raise InputError(
            f"{error.name} is not installed", where="extra `serve`", fix="pip install 'coral-serve[serve]'"
        ) from None
    from coral_core.clock import SystemClock

    collector = FleetMetrics(open_configured_store(store), SystemClock(), tuple(dict.fromkeys(fleets)))
    if once:
        sys.stdout.write(exposition(collector))
        return
    try:
        server, thread = start_http_server(port, host, registry_of(collector))
    except OSError as error:
        raise InputError(
            f"cannot listen there: {error.strerror or error}", where=listen, fix="choose another --listen"
        ) from None
    print_note(f"metrics on http://{host}:{server.server_port}/metrics; Ctrl-C ends")
    try:
        threading.Event().wait()
    finally:
        server.shutdown()
        thread.join()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise InputError(f"{text!r} is no address", where="--listen", fix="give HOST:PORT, such as 127.0.0.1:9464")
    return host.strip("[]"), int(port)
