"""`coral keys`: the CURVE keys with which coordinator and agents prove themselves to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson
from coral_core.cli.output import print_json, print_note, print_text
from coral_core.errors import InputError

app = App(name="keys", help="Keys of coordinator and agents.")
new = App(name="new", help="Make keys; private files can be read by their owner only.")
app.command(new)

COORDINATOR_FILE = "coordinator.keys"
ALLOWED_FILE = "agents.allowed"
Folder = Annotated[Path, Parameter(help="Where the keys lie.")]
AgentName = Annotated[str, Parameter(help="Name of the agents' key: one for the whole fleet, or one per node.")]


@new.command(name="coordinator")
def new_coordinator(folder: Folder = Path("keys"), *, as_json: AsJson = False) -> None:
    """A coordinator's key pair, and an empty list of the agents that it lets in."""
    _refuse_without_zmq()
    from coral_core.serving.control.curve import KeyPair, changing_allowed, write_private
    from coral_core.serving.control.wire import new_pair

    public, secret = new_pair()
    path, allowed = folder / COORDINATOR_FILE, folder / ALLOWED_FILE
    write_private(path, KeyPair(public=public, secret=secret))
    with changing_allowed(allowed):  # is there now
        pass
    _tell({"name": "coordinator", "file": str(path), "public": public, "allowed": str(allowed)}, as_json=as_json)


@new.command(name="agent")
def new_agent(name: AgentName = "fleet", folder: Folder = Path("keys"), *, as_json: AsJson = False) -> None:
    """A key pair for agents; it is let in at once, also by a coordinator that runs. Earlier keys stay let in."""
    _refuse_without_zmq()
    from coral_core.serving.control.curve import NAME, KeyPair, changing_allowed, read_private, write_private
    from coral_core.serving.control.wire import new_pair

    if not NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name of a key", where="name", fix="lowercase letters, digits, ._-")
    server = read_private(folder / COORDINATOR_FILE).public
    path, listed = folder / f"agent-{name}.keys", folder / ALLOWED_FILE
    with changing_allowed(listed) as allowed:
        if name in allowed.values():
            raise InputError(f"a key of the name {name} is let in already", where=str(listed), fix="give another name")
        public, secret = new_pair()
        write_private(path, KeyPair(public=public, secret=secret, server=server))
        allowed[public] = name
    _tell({"name": name, "file": str(path), "public": public, "allowed": str(listed)}, as_json=as_json)


@app.command
def show(folder: Folder = Path("keys"), *, as_json: AsJson = False) -> None:
    """The public keys: the coordinator's, and those of the agents that are let in."""
    _refuse_without_zmq()
    from coral_core.serving.control.curve import read_allowed, read_private

    coordinator = read_private(folder / COORDINATOR_FILE).public
    allowed = {name: key for key, name in read_allowed(folder / ALLOWED_FILE).items()}
    if as_json:
        print_json({"coordinator": coordinator, "agents": allowed})
        return
    print_text(f"coordinator  {coordinator}")
    for name, key in allowed.items():
        print_text(f"agent {name}  {key}")
    if not allowed:
        print_note("note: no agent is let in; coral keys new agent makes a key")


@app.command
def revoke(name: AgentName, folder: Folder = Path("keys"), *, as_json: AsJson = False) -> None:
    """Let agents with this key in no more; a coordinator that runs notices at once, and their instances fail."""
    _refuse_without_zmq()
    from coral_core.errors import unknown_name
    from coral_core.serving.control.curve import changing_allowed

    path = folder / ALLOWED_FILE
    with changing_allowed(path) as allowed:
        key = next((key for key, other in allowed.items() if other == name), None)
        if key is None:
            raise unknown_name("key", name, allowed.values(), where=str(path))
        del allowed[key]
    if as_json:
        print_json({"revoked": name})
    else:
        print_text(f"{name} is let in no more")


def _tell(made: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    print_text(f"{made['name']}: {made['file']} (private), public key {made['public']}")
    print_text(f"let in: {made['allowed']}")


def _refuse_without_zmq() -> None:
    from coral_core.cli.serve_extra import refuse_without

    refuse_without("keys and agents", "msgspec", "zmq")
