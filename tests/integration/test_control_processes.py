"""Agents, coordinator and gateway as processes: killed and started again, each with its expected end."""

from __future__ import annotations

import signal
import time

import pytest

from tests.fakes.control_processes import LOST_S, Processes
from tests.fakes.waiting import until

pytestmark = pytest.mark.servers
NOTICED_S = 45.0
"""Three times what is promised: these processes share a machine with all the others. What noticed it, the reasons tell."""


@pytest.fixture
def processes(tmp_path, capsys):
    with Processes(tmp_path) as found:
        found.start_gateway()
        found.start_coordinator()
        yield found


def ready(processes: Processes, *names: str) -> None:
    for name in names:
        until(lambda name=name: processes.row(name).get("ready"), f"{name} is ready")


def test_who_is_killed_and_who_comes_back(processes):
    processes.start_agent("one")
    processes.start_agent("two", 0, 2)
    processes.start_agent("two", 1, 2)
    ready(processes, "one", "two")
    assert [processes.row(name)["weight"] for name in ("one", "two")] == [0.0, 0.0]
    processes.admin("PUT", "/instances/one/weight", {"weight": 3.0})
    processes.admin("PUT", "/instances/two/weight", {"weight": 5.0})
    assert processes.ask() == 200

    # Without a coordinator all serves on; one that starts, also without what the last one wrote, fails nothing.
    processes.kill("coordinator")
    time.sleep(LOST_S + 1.0)
    assert processes.ask() == 200
    (processes.folder / "coordinator" / "state.json").unlink()
    processes.start_coordinator()
    until(lambda: processes.stage("one") == processes.stage("two") == "ready", "taken over")
    time.sleep(LOST_S)
    assert [processes.stage(name) for name in ("one", "two")] == ["ready", "ready"]
    assert [processes.row(name)["weight"] for name in ("one", "two")] == [3.0, 5.0]

    # A gateway that starts again is told what it has lost.
    processes.kill("gateway")
    processes.start_gateway()
    until(lambda: processes.ask() == 200, "requests are served again")
    assert [processes.row(name)["weight"] for name in ("one", "two")] == [3.0, 5.0]

    # An agent that is killed takes its engine with it, and the whole instance.
    processes.kill("two-1")
    until(lambda: processes.row("two").get("failed"), "two has failed", within_s=NOTICED_S)
    until(lambda: not processes.engines("two"), "no process of two is left", within_s=NOTICED_S)
    assert "node 1" in processes.row("two")["failed"]
    assert processes.ask() == 200
    processes.start_agent("two", 1, 2)  # too late
    until(lambda: processes.events("two-1").count("welcome") == 2, "the agent is back")
    assert processes.stage("two") == "failed"
    assert not processes.engines("two")

    # One that is told to end lets requests run out first.
    process = processes.running["one-0"]
    assert processes.kill("one-0", signal.SIGTERM) == 0
    assert process.returncode == 0
    assert processes.events("one-0")[-1] == "stopped"
    assert not processes.engines("one")
    until(lambda: processes.stage("one") == "ended", "one has ended")
    assert processes.ask() == 503
    assert processes.kill("coordinator", signal.SIGTERM) == 0


def test_an_engine_that_dies_or_hangs_condemns_its_instance_and_nothing_else(processes):
    for name in ("one", "other", "hung"):
        processes.start_agent(name)
    ready(processes, "one", "other", "hung")
    [engine] = processes.engines("one")
    [stopped] = processes.engines("hung")
    engine.kill()
    stopped.suspend()
    until(lambda: processes.row("one").get("failed"), "one has failed", within_s=NOTICED_S)
    assert "killed by signal 9" in processes.row("one")["failed"]  # at once, and not because nothing is heard of it
    until(lambda: processes.row("hung").get("failed"), "hung has failed", within_s=NOTICED_S)
    assert "its /metrics was not answered" in processes.row("hung")["failed"]
    until(lambda: not processes.engines("hung"), "the hung engine is ended")
    assert processes.stage("other") == "ready"
    assert not processes.row("other")["failed"]


def test_an_instance_whose_engine_goes_on_without_a_node_is_degraded(processes):
    for node in range(2):
        processes.start_agent("wide", node, 2)
    ready(processes, "wide")
    processes.write_status("wide", "ready", 1.0, n0=None, n1=None)
    processes.admin("PUT", "/instances/wide/weight", {"weight": 4.0})

    def shares() -> list[object]:
        return [one["weight_frac"] for one in processes.state()["instances"]]

    processes.kill("wide-1")
    processes.write_status("wide", "degraded", 0.75, n0=None, n1="its connection ended")
    until(lambda: processes.row("wide").get("weight_frac") == 0.75, "its share falls", within_s=NOTICED_S)
    time.sleep(LOST_S + 6.0)  # its agent is long lost, and what it could have said overdue
    assert processes.stage("wide") == "ready"
    assert processes.ask() == 200

    # The reallocation's weight stays the full one, through restarts of both.
    for who, start in (("gateway", processes.start_gateway), ("coordinator", processes.start_coordinator)):
        processes.kill(who)
        start()
        until(lambda: processes.ask() == 200, f"served with a new {who}")
        until(lambda: processes.row("wide")["weight_frac"] == 0.75, f"kept by a new {who}")
        assert processes.row("wide")["weight"] == 4.0
    assert shares() == [0.75]

    processes.write_status("wide", "failed", 0.0, n0="its connection ended", n1="its connection ended")
    until(lambda: processes.row("wide").get("failed"), "it has failed whole", within_s=NOTICED_S)
    assert "a stage has no node left" in processes.row("wide")["failed"]
    until(lambda: not processes.engines("wide"), "its engine is ended", within_s=NOTICED_S)


def test_strangers_doubles_and_sleepers(processes, capsys):
    from coral_core.cli.entry import run as run_coral
    from coral_core.serving.control.curve import KeyPair, write_private
    from coral_core.serving.control.wire import new_pair

    keys = processes.folder / "keys"
    processes.start_agent("one")
    ready(processes, "one")

    # A key that is not on the list, and one that is taken off it.
    public, secret = new_pair()
    from coral_core.serving.control.curve import read_private

    write_private(
        keys / "agent-stranger.keys",
        KeyPair(public=public, secret=secret, server=read_private(keys / "coordinator.keys").public),
    )
    processes.start_agent("strange", keys="stranger")
    assert run_coral(["keys", "new", "agent", "second", str(keys)]) == 0
    processes.start_agent("late", keys="second")
    ready(processes, "late")

    # Another node with the same place in an instance; one whose instance is said to be something else.
    processes.start_agent("one", node_id="double")
    processes.start_agent("one", node_id="other-model", template="another")
    until(lambda: "refused" in processes.events("double"), "the double is refused")
    until(lambda: "refused" in processes.events("other-model"), "the contradiction is refused")
    assert any("one-0, whose agent is alive" in str(line.get("reason")) for line in processes.said("double"))

    # An agent that sleeps for less than `lost_s` is not lost.
    processes.running["one-0"].send_signal(signal.SIGSTOP)
    time.sleep(LOST_S / 3)
    processes.running["one-0"].send_signal(signal.SIGCONT)
    until(lambda: processes.state().get("refused_keys", 0) > 0, "the stranger is counted")
    assert "welcome" not in processes.events("strange-0")
    assert processes.stage("strange") == ""
    assert processes.stage("one") == "ready"

    assert run_coral(["keys", "revoke", "second", str(keys)]) == 0
    until(lambda: processes.stage("late") == "failed", "the withdrawn key fails late", within_s=NOTICED_S + 5)
    assert "refused" in processes.events("late-0")

    # What cannot be launched fails at once, and says why.
    processes.start_agent("wrong", template="none")
    until(lambda: processes.stage("wrong") == "failed", "it cannot be launched")
    assert "no such template" in until(lambda: processes.row("wrong").get("failed"), "told to the gateway")
