"""Nodes as processes of this machine: their shares, deaths of the provisioner anywhere, of the nodes, and recycled pids."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coral_core.clock import ManualClock, SystemClock
from coral_core.cloud.local_processes import Process, boot_id, end_all, members, reap, see_process, send
from coral_core.cloud.provisioner import NodeOrder, Refusal, Refused, Started
from coral_core.domain.fleet import FleetId, Node, NodeState, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import ProvisionError
from tests.fakes.local_nodes import FIRST_PORT, WITH_ENGINE, LocalNodes, machine
from tests.fakes.waiting import until


def order(number: int = 0, *, config: str = "one", zone: str = "here-a") -> NodeOrder:
    tags = NodeTags(
        instance_id=f"a-{number}", template_id="a", model="tiny", phase=Phase.AGGREGATED,
        config=config, stage=0, node=0, nodes=1, epoch=1,
    )  # fmt: skip
    return NodeOrder(region="here", zone=zone, market=Market.ON_DEMAND, tags=tags)


def fleet_of(nodes: LocalNodes) -> FleetId:
    return FleetId(name="demo", account=nodes.account())


def start(nodes: LocalNodes, number: int = 0, **how) -> Node:
    outcome = nodes.start(fleet_of(nodes), order(number, **how))
    assert isinstance(outcome, Started), outcome
    return outcome.node


def state(nodes: LocalNodes) -> list[NodeState]:
    return [node.state for node in nodes.describe(fleet_of(nodes), "here").nodes]


def record(nodes: LocalNodes, node: Node) -> dict:
    return json.loads((nodes.folder / "nodes" / node.node_id / "node.json").read_text())


def processes(nodes: LocalNodes) -> tuple[Process, ...]:
    return tuple(p for path in (nodes.folder / "nodes").glob("*") for p in members(path))


# Shares of the machine ---------------------------------------------------------------------------------------------


def test_an_agent_runs_on_its_cpus_with_its_file_and_its_mark(tmp_path):
    shell = ("/bin/sh", "-c", 'cat "$0"; echo "$CORAL_LOCAL_NODE" "$EXTRA" >&2; exec sleep 600')
    with LocalNodes(tmp_path, argv=shell) as nodes:
        node = start(nodes)
        path, found = nodes.folder / "nodes" / node.node_id, record(nodes, node)
        (pid,) = nodes.agents()
        assert os.sched_getaffinity(pid) == set(found["cpus"])
        assert os.getsid(pid) == pid != os.getsid(0)
        until(lambda: str(path) in (path / "agent.log").read_text())
        assert node.node_id in (path / "agent.log").read_text()
        assert os.sched_getaffinity(0) == set(machine().cpus), "this thread keeps its own"


def test_shares_are_disjoint_and_the_full_machine_refuses(tmp_path):
    """Four slots of CPU: two nodes per core on two cores."""
    two = machine(cpus=machine().cpus[:1], nodes_per_cpu=3, memory_bytes=350 * 2**20)
    with LocalNodes(tmp_path, machine=two) as nodes:
        started = [start(nodes, number) for number in range(3)]
        ports = [record(nodes, node)["first_port"] for node in started]
        assert sorted(ports) == [FIRST_PORT, FIRST_PORT + 16, FIRST_PORT + 32]
        full = nodes.start(fleet_of(nodes), order(3))
        assert isinstance(full, Refused)
        assert (full.refusal, full.code) == (Refusal.CAPACITY, "MachineFull")
        assert "no free CPUs for a one beside 3 nodes" in full.message
        nodes.stop(fleet_of(nodes), "here", started[:1])
        until(lambda: NodeState.GONE in state(nodes))
        assert record(nodes, start(nodes, 4))["first_port"] == FIRST_PORT


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"memory_bytes": 99 * 2**20}, "memory"),
        ({"last_port": FIRST_PORT + 14}, "ports"),
        ({"nodes_per_cpu": 0}, "CPUs"),
    ],
)
def test_what_is_lacking_is_named(tmp_path, changes, lacking):
    with LocalNodes(tmp_path, machine=machine(**changes)) as nodes:
        full = nodes.start(fleet_of(nodes), order())
        assert isinstance(full, Refused)
        assert f"no free {lacking} for a one" in full.message
        assert not processes(nodes)
        assert state(nodes) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", ""])
def test_ports_that_somebody_listens_on_are_left_out(tmp_path, address):
    with socket.socket() as other, LocalNodes(tmp_path) as nodes:
        other.bind((address, FIRST_PORT + 3))
        other.listen()
        assert record(nodes, start(nodes))["first_port"] == FIRST_PORT + 16


def test_fleets_in_other_folders_get_other_ports_while_the_first_ones_agents_live(tmp_path):
    """No agent listens yet: what was rented is another's all the same."""
    with LocalNodes(tmp_path / "a") as nodes, LocalNodes(tmp_path / "b") as others:
        ours, theirs = start(nodes), start(others)
        assert record(nodes, ours)["first_port"] == FIRST_PORT
        assert record(others, theirs)["first_port"] == FIRST_PORT + 16
        shifted = LocalNodes(tmp_path / "c", machine=machine(first_port=FIRST_PORT + 8, last_port=FIRST_PORT + 23))
        full = shifted.start(fleet_of(shifted), order())
        assert isinstance(full, Refused), "blocks that overlap collide too"
        assert "no free ports" in full.message
        nodes.stop(fleet_of(nodes), "here", [ours])
        until(lambda: state(nodes) == [NodeState.GONE])
        assert record(others, start(others, 1))["first_port"] == FIRST_PORT


def test_a_node_whose_ports_were_claimed_before_its_agent_was_started_is_given_up(tmp_path):
    with LocalNodes(tmp_path / "a") as nodes, LocalNodes(tmp_path / "b") as others:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("coral_core.cloud.local.spawn", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                start(nodes)
        start(others)
        outcome = nodes.start(fleet_of(nodes), order())
        assert isinstance(outcome, Refused)
        assert (outcome.refusal, outcome.code) == (Refusal.CONFLICT, "PortsTaken")
        assert not processes(nodes)


def test_the_least_used_cpus_come_first(tmp_path):
    cpus = machine().cpus
    if len(cpus) < 2:
        pytest.skip("one CPU leaves nothing to choose")
    with LocalNodes(tmp_path, machine=machine(cpus=cpus[:2])) as nodes:
        assert {tuple(record(nodes, start(nodes, number))["cpus"]) for number in range(2)} == {cpus[:1], cpus[1:2]}
        assert record(nodes, start(nodes, 2, config="big"))["cpus"] == list(cpus[:2])


def test_unknown_configurations_and_zones_are_not_offered(tmp_path):
    with LocalNodes(tmp_path) as nodes:
        for what in ({"config": "h100"}, {"zone": "here-z"}):
            outcome = nodes.start(fleet_of(nodes), order(**what))
            assert isinstance(outcome, Refused)
            assert outcome.refusal is Refusal.NOT_OFFERED


# Deaths ------------------------------------------------------------------------------------------------------------


def in_dying_process(act, moment: int) -> bool:
    """Run `act` in a child that kills itself at the n-th moment around a change; whether it died before it had ended."""
    pid = os.fork()
    if pid == 0:
        moments = [0]

        def mortal(call):
            def wrapped(*args, **kwargs):
                for step in (lambda: None, lambda: call(*args, **kwargs)):
                    answer = step()
                    moments[0] += 1
                    if moments[0] == moment:
                        os.kill(os.getpid(), signal.SIGKILL)
                return answer

            return wrapped

        for owner, name in ((os, "mkdir"), (os, "replace"), (os, "posix_spawn"), (os, "fsync")):
            setattr(owner, name, mortal(getattr(owner, name)))
        Path.replace = mortal(Path.replace)
        signal.pidfd_send_signal = mortal(signal.pidfd_send_signal)
        try:
            act()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def test_a_start_that_dies_anywhere_is_finished_by_the_same_order(tmp_path):
    died = 0
    for moment in range(1, 40):
        with LocalNodes(tmp_path / str(moment)) as nodes:
            nodes.account()
            died += (dead := in_dying_process(lambda nodes=nodes: start(nodes), moment))
            assert state(nodes) in ([], [NodeState.PENDING], [NodeState.RUNNING])
            node = start(nodes)
            assert node.state is NodeState.RUNNING
            assert state(nodes) == [NodeState.RUNNING]
            assert len(processes(nodes)) == 1, f"moment {moment}"
            assert nodes.agents() == [processes(nodes)[0].pid]
        if not dead:
            break
    assert died >= 10
    assert not dead, "every moment was met"


def test_a_stop_that_dies_anywhere_is_finished_by_another(tmp_path):
    died = 0
    for moment in range(1, 40):
        with LocalNodes(tmp_path / str(moment), argv=WITH_ENGINE, end_grace_s=0.1) as nodes:
            node = start(nodes)
            until(lambda nodes=nodes: len(processes(nodes)) == 2)
            fleet = fleet_of(nodes)
            died += (dead := in_dying_process(lambda: nodes.stop(fleet, "here", [node]), moment))  # noqa: B023
            nodes.stop(fleet, "here", [node])
            until(lambda nodes=nodes: state(nodes) == [NodeState.GONE])
            assert not processes(nodes)
        if not dead:
            break
    assert died >= 4
    assert not dead


def test_a_node_whose_start_was_cut_off_before_its_process_can_be_ended(tmp_path):
    with LocalNodes(tmp_path) as nodes:
        node = start(nodes)
        (path,) = (nodes.folder / "nodes").glob("*")
        (pid,) = nodes.agents()
        (path / "process.json").unlink()
        assert state(nodes) == [NodeState.PENDING], "its process is there, and not noted"
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        until(lambda: not processes(nodes))
        assert state(nodes) == [NodeState.PENDING]
        nodes.stop(fleet_of(nodes), "here", [node])
        assert state(nodes) == [NodeState.GONE]
        assert start(nodes).state is NodeState.GONE, "its token is used up"
        assert not processes(nodes)


def test_a_dead_agent_is_gone_and_one_with_engines_left_behind_is_halted(tmp_path):
    with LocalNodes(tmp_path, argv=WITH_ENGINE) as nodes:
        node = start(nodes)
        until(lambda: len(processes(nodes)) == 2)
        (pid,) = nodes.agents()
        os.kill(pid, signal.SIGKILL)
        until(lambda: state(nodes) == [NodeState.HALTED])
        nodes.stop(fleet_of(nodes), "here", [node])
        until(lambda: state(nodes) == [NodeState.GONE])
        assert not processes(nodes)


def test_engines_that_do_not_end_with_their_agent_are_killed_after_the_grace(tmp_path):
    """Neither the agent nor what it has started in sessions of their own hears SIGTERM."""
    deaf = ("/bin/sh", "-c", "trap '' TERM; setsid sh -c 'sleep 600 & exec sleep 600' & sleep 600 & wait; wait")
    clock = ManualClock(start=datetime(2030, 1, 1, tzinfo=UTC))
    with LocalNodes(tmp_path, argv=deaf, clock=clock, end_grace_s=30.0) as nodes:
        node = start(nodes)
        until(lambda: len(processes(nodes)) == 4)
        nodes.stop(fleet_of(nodes), "here", [node])
        clock.advance(29.0)
        assert state(nodes) == [NodeState.ENDING]
        assert len(processes(nodes)) == 4
        clock.advance(1.0)
        until(lambda: state(nodes) == [NodeState.GONE])
        assert not processes(nodes)


def test_a_clock_that_is_set_back_spares_nobody(tmp_path):
    deaf = ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 600 & wait; done")
    clock = ManualClock(start=datetime(2030, 1, 1, tzinfo=UTC))
    with LocalNodes(tmp_path, argv=deaf, clock=clock, end_grace_s=30.0) as nodes:
        node = start(nodes)
        until(lambda: len(processes(nodes)) == 2)
        nodes.stop(fleet_of(nodes), "here", [node])
        clock.elapsed_s -= 3600.0
        until(lambda: state(nodes) == [NodeState.GONE])
        assert not processes(nodes)


def test_a_process_that_has_another_title_keeps_its_mark(tmp_path):
    """Engines give themselves titles, which may overwrite the environment that marks them."""
    with LocalNodes(tmp_path, argv=("/bin/sh", "-c", "env; exec sleep 600")) as nodes:
        path = nodes.folder / "nodes" / start(nodes).node_id
        until(lambda: "SPT_NOENV=1" in (path / "agent.log").read_text())


def test_who_shares_a_session_with_a_marked_process_that_does_not_lead_it_is_left_alone(tmp_path):
    """A command with the mark, started in somebody's shell, must not take that shell with it."""
    shell = ("sh", "-c", 'sleep 600 & CORAL_LOCAL_NODE="$0" sleep 600 & wait', str(tmp_path))
    with subprocess.Popen(shell, start_new_session=True) as other:
        try:
            until(lambda: len(members(tmp_path)) == 1)
            assert end_all(tmp_path) == 1
            assert end_all(tmp_path) == 0
            assert other.poll() is None
        finally:
            os.killpg(other.pid, signal.SIGKILL)


def test_a_recycled_pid_is_not_taken_for_the_agent(tmp_path):
    with LocalNodes(tmp_path) as nodes, subprocess.Popen(["sleep", "600"]) as other:
        try:
            node = start(nodes)
            (pid,) = nodes.agents()
            os.kill(pid, signal.SIGKILL)
            reap(pid)
            path = nodes.folder / "nodes" / node.node_id / "process.json"
            found = json.loads(path.read_text())
            earlier = found["start_ticks"] - 1000  # both are started at about the same time
            path.write_text(json.dumps({**found, "pid": other.pid, "start_ticks": earlier}))
            assert state(nodes) == [NodeState.GONE]
            nodes.stop(fleet_of(nodes), "here", [node])
            now = see_process(other.pid)
            path.write_text(
                json.dumps({**found, "pid": other.pid, "start_ticks": now.start_ticks, "boot_id": "before"})
            )
            nodes.stop(fleet_of(nodes), "here", [node])
            assert state(nodes) == [NodeState.GONE]
            send(Process(pid=other.pid, start_ticks=1, parent=0, session=0, state="S"), signal.SIGKILL)
            send(Process(pid=2**22 - 1, start_ticks=1, parent=0, session=0, state="S"), signal.SIGKILL)
            assert other.poll() is None
        finally:
            other.kill()


def test_an_agent_that_fails_at_once_is_gone(tmp_path):
    with LocalNodes(tmp_path, argv=("/bin/sh", "-c", "echo no such model >&2; exit 3")) as nodes:
        node = start(nodes)
        until(lambda: state(nodes) == [NodeState.GONE])
        assert "no such model" in (nodes.folder / "nodes" / node.node_id / "agent.log").read_text()


# The folder --------------------------------------------------------------------------------------------------------


def test_a_program_that_is_not_there_says_so(tmp_path):
    with LocalNodes(tmp_path, argv=("/no/such/agent",)) as nodes, pytest.raises(ProvisionError, match="/no/such/agent"):
        start(nodes)


def test_a_damaged_record_is_foreign_and_refuses_its_order(tmp_path):
    with LocalNodes(tmp_path) as nodes:
        node = start(nodes)
        for text in ("{", "[]", '{"node_id": 1}'):
            (nodes.folder / "nodes" / node.node_id / "node.json").write_text(text)
            listing = nodes.describe(fleet_of(nodes), "here")
            assert listing.nodes == ()
            assert "damaged" in listing.foreign[0].reason
            with pytest.raises(ProvisionError, match="damaged"):
                start(nodes)
            with pytest.raises(ProvisionError, match="not the fleet's own"):
                nodes.stop(fleet_of(nodes), "here", [node])


def test_another_fleets_node_is_not_ended(tmp_path):
    with LocalNodes(tmp_path) as nodes:
        node = start(nodes)
        with pytest.raises(ProvisionError, match="not the fleet's own"):
            nodes.stop(FleetId(name="other", account=nodes.account()), "here", [node])
        assert state(nodes) == [NodeState.RUNNING]


def test_old_nodes_are_forgotten_at_the_next_start(tmp_path):
    with LocalNodes(tmp_path, keep=timedelta(hours=1)) as nodes:
        old, held = start(nodes), start(nodes, 1)
        nodes.stop(fleet_of(nodes), "here", [old])
        until(lambda: NodeState.GONE in state(nodes))
        path = nodes.folder / "nodes"
        for name in (old.node_id, held.node_id):
            for file in [*(path / name).iterdir(), path / name]:
                os.utime(file, (0, 0))
        start(nodes, 2)
        assert not (path / old.node_id).exists()
        assert (path / held.node_id).exists()


def test_the_account_is_made_once(tmp_path):
    first, second = LocalNodes(tmp_path), LocalNodes(tmp_path, clock=SystemClock())
    assert first.account() == second.account()
    assert LocalNodes(tmp_path / "other").account() != first.account()
    assert boot_id() == boot_id()
