"""`coral gateway`: OpenAI's API in front of the fleet's instances, and the keys that open it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson, StoreUrl
from coral_core.cli.output import print_json, print_note, print_text
from coral_core.cli.serve_extra import Teller, refuse_without
from coral_core.errors import InputError

if TYPE_CHECKING:
    from coral_core.config.gateway import GatewaySpec
    from coral_core.serving.demand_meter import DemandSink
    from coral_core.serving.run import GatewayPlan

app = App(name="gateway", help="OpenAI's API in front of the fleet's instances.")

_NEEDED = ("aiohttp", "httptools", "msgspec", "prometheus_client", "uvicorn")


@app.command
def run(
    *,
    config: Annotated[Path, Parameter(help="The gateway's YAML file (docs/serving.md).")],
    check: Annotated[bool, Parameter(negative="", help="Only read the files and say what would be served.")] = False,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what runs; a second signal breaks it off.

    With --json each thing that happens is one JSON line on stdout, the first one with the addresses.
    """
    from coral_core.clock import SystemClock
    from coral_core.config.gateway import load_gateway_file

    refuse_without("gateways", *_NEEDED)
    spec = load_gateway_file(config)
    plan = _plan(spec, store)
    if check:
        facts = {
            "models": [model.name for model in spec.models],
            "instances": [instance.name for instance in spec.instances],
            "keys": not plan.keys.is_open,
        }
        if as_json:
            print_json(facts)
        else:
            print_text(f"{config} is right: {_count(spec.models, 'model')} on {_count(spec.instances, 'instance')}")
        return

    from coral_core.serving.listener import bound_socket, run_loop
    from coral_core.serving.run import serve

    public = bound_socket(spec.listen.host, spec.listen.port)
    admin = bound_socket(spec.admin.host, spec.admin.port) if spec.admin else None
    url = _url(spec.listen.host, public.getsockname()[1])
    admin_url = _url(spec.admin.host, admin.getsockname()[1]) if spec.admin and admin else None

    say = Teller(as_json=as_json)

    def started(ready: list[str], waiting: list[str]) -> None:
        note = f"; {', '.join(waiting)} not yet" if waiting else ""
        text = f"serving on {url}{f', admin on {admin_url}' if admin_url else ''}; ready: {', '.join(ready) or 'none'}{note}"
        say("started", text, url=url, admin_url=admin_url, ready=ready, not_ready=waiting)
        if plan.keys.is_open:
            with contextlib.suppress(OSError):
                print_note("note: no keys_file: anybody on this machine may ask")

    run_loop(
        serve(
            plan,
            public,
            admin,
            SystemClock(),
            started=lambda gateway: started(
                [one.spec.name for one in gateway.table.members if one.ready],
                [one.spec.name for one in gateway.table.members if not one.ready],
            ),
        )
    )
    say("stopped", "stopped: all that ran is finished or broken off")


@app.command(name="hash-key")
def hash_key_command(
    *,
    new: Annotated[bool, Parameter(negative="", help="Make a new key and show it, this once.")] = False,
    as_json: AsJson = False,
) -> None:
    """The hash of a key, for the keys file. The key is read from standard input: as an argument others would see it."""
    refuse_without("gateways", *_NEEDED)
    from coral_core.serving.keys import hash_key, new_key

    if new:
        key = new_key()
    elif sys.stdin.isatty():
        from getpass import getpass

        key = getpass("key: ").strip()
    else:
        key = sys.stdin.readline().strip()
    found = hash_key(key)
    if as_json:
        print_json({"hash": found} | ({"key": key} if new else {}))
        return
    if new:
        print_text(f"key:  {key}")
        print_text(f"hash: {found}")
        print_note("note: the key is kept nowhere; the hash goes into the keys file")
    else:
        print_text(found)


def _plan(spec: GatewaySpec, store: str | None) -> GatewayPlan:
    """What the files say, as the gateway takes it."""
    from coral_core.config.gateway import load_keys_file
    from coral_core.domain.workload import Phase, Slo
    from coral_core.serving.keys import KeyRecord, KeyRing
    from coral_core.serving.limits import KeyTerms
    from coral_core.serving.run import GatewayPlan
    from coral_core.serving.table import InstanceSpec, ModelTerms
    from coral_core.serving.terms import GatewayTerms

    entries = load_keys_file(spec.keys_file).keys if spec.keys_file else ()
    limits = ("requests_per_s", "burst_requests", "concurrent_requests")
    records = [
        KeyRecord(
            name=entry.name,
            key_hash=entry.hash,
            terms=KeyTerms(**entry.model_dump(include=set(limits), exclude_none=True)),
        )
        for entry in entries
    ]
    return GatewayPlan(
        models=tuple(
            ModelTerms(**model.model_dump(exclude={"slo"}), slo=Slo(**model.slo.model_dump())) for model in spec.models
        ),
        instances=tuple(
            InstanceSpec(**entry.model_dump(exclude={"phase"}), phase=Phase(entry.phase)) for entry in spec.instances
        ),
        terms=GatewayTerms(**spec.limits.model_dump(exclude_none=True)),
        keys=KeyRing(records),
        admin_token=_token(spec.admin.token_file) if spec.admin else None,
        demand_sink=_sink(store) if spec.record_demand else None,
    )


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _token(path: Path) -> str:
    from coral_core.serving.admin import checked_token

    try:
        return checked_token(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        fix = "write one into it: openssl rand -hex 32"
        raise InputError(f"cannot read the admin token: {error}", where=str(path), fix=fix) from None
    except InputError as error:
        raise error.at(str(path)) from None


def _sink(store: str | None) -> DemandSink:
    """Into the store, as the fleet's measured demand. The process writes under a name of its own."""
    import os
    import socket

    from artifacts.demand import append_demand
    from coral_core.cli.work import open_configured_store
    from coral_core.config.settings import load_settings

    target, fleet = open_configured_store(store), load_settings().fleet
    host = "".join(c for c in socket.gethostname().lower() if c.isascii() and c.isalnum())[:24]
    source = f"gateway-{host or 'host'}-{os.getpid()}"
    return lambda samples: append_demand(target, fleet, samples, source=source)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
