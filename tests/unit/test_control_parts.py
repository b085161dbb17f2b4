"""Messages, keys and files of the control plane: what is right is kept, what is wrong is named."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_core.cli.entry import run
from coral_core.cli.keys import new_agent, new_coordinator, revoke
from coral_core.config.agent import load_agent_file
from coral_core.config.coordinator import load_coordinator_file
from coral_core.errors import InputError
from coral_core.serving.control.agent import agent_keys
from coral_core.serving.control.curve import (
    AllowedKeys,
    KeyPair,
    read_allowed,
    read_private,
    write_allowed,
    write_private,
)
from coral_core.serving.control.messages import (
    MOST_BYTES,
    PROTOCOL,
    Bye,
    GarbageError,
    Heartbeat,
    NodeReport,
    OtherVersionError,
    Refused,
    Welcome,
    as_document,
    framed,
    from_agent,
    from_coordinator,
    last_lines,
    shortened,
)
from coral_core.serving.control.wire import new_pair
from coral_core.serving.signals import on_signals
from tests.fakes.control_world import hello

ROOT = Path(__file__).resolve().parents[2]
KEY = "a" * 40


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_noise_is_garbage_or_another_version_and_nothing_worse(frames):
    for read in (from_agent, from_coordinator):
        with pytest.raises((GarbageError, OtherVersionError)):
            read(frames)


@given(st.binary(max_size=200))
def test_noise_under_our_own_name_is_garbage(payload):
    try:
        from_agent([PROTOCOL, payload])
    except GarbageError:
        return
    assert msgspec.msgpack.decode(payload)["type"] in {"bye", "hello", "heartbeat"}


def test_messages_arrive_as_they_were_said():
    for message in (hello(), Heartbeat(report=NodeReport(log=("a", "b"))), Bye(reason="x")):
        assert from_agent(framed(message)) == message
    assert from_coordinator(framed(Welcome(coordinator="c"))) == Welcome(coordinator="c")
    with pytest.raises(GarbageError):
        from_agent(framed(Welcome(coordinator="c")))
    with pytest.raises(GarbageError):
        from_agent([PROTOCOL, b"\x00" * (MOST_BYTES + 1)])
    with pytest.raises(GarbageError):
        from_agent(framed(Heartbeat(report=NodeReport(reason="x" * 3000))))
    assert shortened("x" * 3000) == "x" * 1999 + "…"
    assert len(last_lines(["y" * 600] * 30)) == 20
    assert as_document(NodeReport(reason="why")) == {
        "state": "idle",
        "reason": "why",
        "serves": False,
        "alive": False,
        "leaving": False,
        "draining": False,
    }


def test_another_version_is_told_and_its_refusal_is_read():
    frames = [b"coral-control/9", framed(Refused(reason="I speak 9", fix="update"))[1]]
    assert from_coordinator(frames) == Refused(reason="I speak 9", fix="update")
    with pytest.raises(OtherVersionError, match=r"the peer speaks coral-control/9, this one coral-control/1"):
        from_agent(frames)
    with pytest.raises(OtherVersionError):
        from_coordinator([b"coral-control/9", b"something else"])


def test_private_files_are_private_and_stay_what_they_are(tmp_path):
    path = tmp_path / "deep" / "agent.keys"
    public, secret = new_pair()
    pair = KeyPair(public=public, secret=secret, server="c" * 40)
    write_private(path, pair)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_private(path) == pair
    assert secret not in repr(pair)
    with pytest.raises(InputError, match="is there already"):
        write_private(path, pair)
    assert agent_keys(path) == pair
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(InputError, match="chmod 600"):
            read_private(path)
    path.chmod(0o600)
    for text, complaint in (
        ("{", "is no file of keys"),
        ("[]", "is no file of keys"),
        ('{"public": "x"}', "is no file of keys"),
        (json.dumps({"public": KEY, "secret": "short"}), "secret: is no CURVE key"),
        (json.dumps({"public": KEY, "secret": KEY, "more": 1}), "is no file of keys"),
        (json.dumps({"public": KEY, "secret": 5}), "is no file of keys"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=complaint):
            read_private(path)
    path.write_text(json.dumps({"public": public, "secret": secret}), encoding="utf-8")
    with pytest.raises(InputError, match="lacks `server`"):
        agent_keys(path)
    path.write_text(json.dumps({"public": KEY, "secret": secret, "server": KEY}), encoding="utf-8")
    with pytest.raises(InputError, match="does not belong to its secret one"):
        agent_keys(path)
    with pytest.raises(InputError, match="cannot read the keys"):
        read_private(tmp_path / "none")
    with pytest.raises(InputError, match="cannot be written"):
        write_private(path / "below", pair)


def test_who_is_let_in_may_change_and_what_is_wrong_changes_nothing(tmp_path):
    path = tmp_path / "agents.allowed"
    write_allowed(path, {KEY: "fleet"})
    allowed = AllowedKeys(path)
    assert (allowed.name_of(KEY), allowed.name_of("b" * 40)) == ("fleet", None)
    write_allowed(path, {KEY: "fleet", "b" * 40: "second"})
    assert allowed.name_of("b" * 40) == "second"
    path.write_text("second short\n", encoding="utf-8")
    assert allowed.name_of("b" * 40) == "second"
    assert f"{path}:1: is no line" in allowed.trouble
    path.unlink()
    assert allowed.name_of(KEY) == "fleet"
    assert "cannot read who is let in" in allowed.trouble
    write_allowed(path, {})
    assert (allowed.name_of(KEY), allowed.trouble) == (None, "")
    for text, line in (
        (f"a {KEY}\nA {'b' * 40}\n", 2),
        (f"# ok\n\na {KEY}\nb {KEY}\n", 4),
        (f"a {KEY}\na {'b' * 40}", 2),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=f"agents.allowed:{line}"):
            read_allowed(path)
    with pytest.raises(InputError, match="cannot be written"):
        write_allowed(path / "below", {})


def test_keys_are_made_shown_and_withdrawn(tmp_path, capsys):
    folder = str(tmp_path / "keys")
    assert run(["keys", "new", "agent", "fleet", folder]) == 2
    assert "they are made by: coral keys new" in capsys.readouterr().err
    assert run(["keys", "new", "coordinator", folder, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert run(["keys", "show", folder]) == 0
    assert "no agent is let in" in capsys.readouterr().err
    assert run(["keys", "new", "agent", "fleet", folder]) == 0
    assert run(["keys", "new", "agent", "fleet", folder]) == 2
    assert run(["keys", "new", "agent", "Not a name", folder]) == 2
    assert run(["keys", "new", "coordinator", folder]) == 2
    assert "is there already" in capsys.readouterr().err
    assert run(["keys", "new", "agent", "second", folder, "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    pair = read_private(tmp_path / "keys" / "agent-second.keys")
    assert (pair.server, pair.public) == (made["public"], second["public"])
    assert run(["keys", "show", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agents"].keys() == {"fleet", "second"}
    assert run(["keys", "show", folder]) == 0
    assert made["public"] in capsys.readouterr().out
    assert run(["keys", "revoke", "secnd", folder]) == 2
    assert "did you mean second?" in capsys.readouterr().err
    assert run(["keys", "revoke", "second", folder]) == 0
    assert run(["keys", "revoke", "fleet", folder, "--json"]) == 0
    assert read_allowed(tmp_path / "keys" / "agents.allowed") == {}


def test_a_key_that_is_withdrawn_while_another_is_made_stays_withdrawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new_coordinator()
    new_agent("fleet")
    withdraws = threading.Thread(target=revoke, args=("fleet",))

    def pair_at_leisure():
        withdraws.start()
        withdraws.join(0.5)  # it would be done in a few ms, if it did not wait
        return new_pair()

    monkeypatch.setattr("coral_core.serving.control.wire.new_pair", pair_at_leisure)
    new_agent("second")
    withdraws.join()
    assert list(read_allowed(tmp_path / "keys" / "agents.allowed").values()) == ["second"]


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "zmq" else found(name, *more))
    assert run(["keys", "show"]) == 2
    assert "pip install 'coral-serve[serve]'" in capsys.readouterr().err


NODE = {"node_id": "n", "tags": {"coral:instance": "i"}}
AGENT = {"coordinator": "tcp://h:5600", "keys_file": "agent.keys", "node": NODE}
COORDINATOR = {
    "listen": {"port": 5600},
    "keys_file": "c.keys",
    "agents_file": "agents.allowed",
    "gateway": {"url": "http://127.0.0.1:8001", "token_file": "token"},
    "scenario": "tiny",
    "engine_file": "engine.yaml",
}


def test_the_agents_file(tmp_path):
    path = tmp_path / "agent.yaml"
    path.write_text(json.dumps({**AGENT, "engine_python": "venv/bin/python"}), encoding="utf-8")
    spec = load_agent_file(path)
    assert (spec.keys_file, spec.folder) == (tmp_path / "agent.keys", tmp_path / "agent")
    assert spec.engine_python == tmp_path / "venv" / "bin" / "python"
    for change, complaint in (
        ({"coordinator": "http://h:5600"}, "`coordinator`"),
        ({"node": None}, "give either node"),
        ({"metadata": {}}, "give either node"),
        ({"first_port": 65530, "ports": 10}, "go beyond 65535"),
        ({"cpus": [1, 1]}, "cpus names a CPU twice"),
        ({"cpus": [-1]}, r"`cpus\[0\]`"),
        ({"heartbeat_s": 3.0}, "`heartbeat_s`"),
        ({"drain_s": float("nan")}, "drain_s"),
        ({"memory_bytes": 0}, "`memory_bytes`"),
        ({"key_file": "x"}, "did you mean `keys_file`"),
    ):
        path.write_text(json.dumps({**AGENT, **change}, indent=1), encoding="utf-8")
        with pytest.raises(InputError, match=complaint):
            load_agent_file(path)


def test_the_coordinators_file(tmp_path):
    path = tmp_path / "coordinator.yaml"
    path.write_text(json.dumps(COORDINATOR), encoding="utf-8")
    spec = load_coordinator_file(path)
    assert (spec.gateway.token_file, spec.engine_file) == (tmp_path / "token", tmp_path / "engine.yaml")
    for change, complaint in (
        ({"patience": {"lost_s": 1.0}}, "`patience.lost_s`"),
        ({"gateway": {"url": "https://x", "token_file": "t"}}, "`gateway.url`"),
        ({"listen": {"port": -1}}, "`listen.port`"),
        ({"scenario": None}, "`scenario`"),
    ):
        path.write_text(json.dumps({**COORDINATOR, **change}, indent=1), encoding="utf-8")
        with pytest.raises(InputError, match=complaint):
            load_coordinator_file(path)


def test_the_documented_files_are_right(tmp_path):
    text = (ROOT / "docs" / "control-plane.md").read_text(encoding="utf-8")
    for name, load in (("coordinator", load_coordinator_file), ("agent", load_agent_file)):
        written = re.search(rf"<!-- {name} file -->\n```yaml\n(.*?)```", text, re.DOTALL)
        (tmp_path / f"{name}.yaml").write_text(written[1], encoding="utf-8")
        load(tmp_path / f"{name}.yaml")


def test_a_second_signal_means_at_once():
    async def go():
        first, second = asyncio.Event(), asyncio.Event()
        with on_signals(first, second.set):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(first.wait(), 120)
            assert not second.is_set()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(second.wait(), 120)

    async def elsewhere():
        with on_signals(asyncio.Event()):
            await asyncio.sleep(0)

    asyncio.run(go())
    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    thread.join()


def test_no_temporary_file_is_left(tmp_path):
    write_allowed(tmp_path / "agents.allowed", {KEY: "fleet"})
    assert [path.name for path in tmp_path.iterdir()] == ["agents.allowed"]
