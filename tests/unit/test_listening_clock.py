"""Time in which nobody could listen is nobody's silence: a clock that jumps by a minute between two looks."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_core.clock import ListeningClock
from coral_core.engine import keeper
from coral_core.engine.plugin.kv_lease import LeaseTable, NoLeaseError
from coral_core.serving.control.held import Stage, Tell
from coral_core.serving.control.instances import Instances
from coral_core.serving.control.messages import Launch
from tests.fakes.control_world import TERMS, hello, plan_of

PAUSE_S = 60.0


class Time:
    """Seconds that move when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(gaps_s=st.lists(st.floats(0.0, 1.0), max_size=40), pause_s=st.floats(1.0, 1e6))
def test_time_counts_while_one_listens_and_a_pause_counts_as_one_look(gaps_s, pause_s):
    time = Time()
    listened_s = ListeningClock(time)
    for gap_s in gaps_s:
        time.now_s += gap_s
        assert listened_s() == pytest.approx(time.now_s - 1000.0, abs=1e-6)
    before_s = listened_s()
    time.now_s += pause_s
    assert listened_s() == pytest.approx(before_s + 1.0)
    time.now_s -= pause_s  # no clock does that; nothing is lost if one did
    assert listened_s() == pytest.approx(before_s + 1.0)


def test_the_grace_of_an_engine_that_ends_is_not_used_up_by_standing_still(monkeypatch):
    """What the keeper's loop sees: told to end within 5 s, it stands still for a minute, then looks on."""
    time, seen = Time(), []

    class Engine:
        exit = None
        root = 1

        def reap(self) -> bool:
            return "killed" in seen

        def signal_root(self, number: int) -> None:
            seen.append(number)

        def kill_all(self) -> None:
            seen.append("killed")

    def looks():
        yield "stop 5.0"
        for gap_s in (PAUSE_S, *[0.5] * 7):
            time.now_s += gap_s
            yield ""
            assert "killed" not in seen
        time.now_s += 0.5
        yield ""

    monkeypatch.setattr(keeper, "commands", looks)
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=time, sleep=lambda _: None))
    keeper.keep(Engine())
    assert seen == [signal.SIGTERM, signal.SIGCONT, "killed"]


def test_a_lease_does_not_end_while_its_producer_stands_still_but_it_ends():
    time = Time()
    leases = LeaseTable(30.0, time)
    leases.grant("lease", "request", [1], 10)
    time.now_s += PAUSE_S
    assert leases.take_ended() == set()
    with leases.reading("lease"):
        time.now_s += PAUSE_S
        assert leases.take_ended() == set()
    for _ in range(58):
        time.now_s += 0.5
        leases.tick()
        assert leases.take_ended() == set()
    time.now_s += PAUSE_S
    leases.tick()
    assert leases.take_ended() == {"request"}  # 30 s in which it could have been asked for
    with pytest.raises(NoLeaseError), leases.reading("lease"):
        pass


@pytest.mark.parametrize("first", ["planned", "tick", "heartbeat", "bye"])
def test_nobody_is_lost_whatever_a_coordinator_hears_first_after_a_pause(first):
    instances = Instances(TERMS, name="c")
    instances.hello(b"0", "k", hello(node=0, nodes=2), 0.0)
    [question] = [e for e in instances.hello(b"1", "k", hello(node=1, nodes=2), 0.0) if not isinstance(e, Tell)]
    instances.hello(b"x", "k", hello("other"), 0.0)
    one = instances.held["i"]
    if first != "planned":
        instances.planned("i", plan_of(question), 0.0)
    match first:
        case "planned":
            effects = instances.planned("i", plan_of(question), PAUSE_S)
            assert any(isinstance(e, Tell) and isinstance(e.message, Launch) for e in effects)
        case "tick":
            instances.tick(PAUSE_S)
        case "heartbeat":
            instances.heartbeat(b"0", one.seats[0].report, PAUSE_S)
        case "bye":
            instances.bye(b"x", PAUSE_S)
            instances.tick(PAUSE_S)
    assert one.stage is Stage.STARTING
    patience_s = int(TERMS.lost_s + TERMS.unheard_grace_s)  # with one that starts
    for second in range(patience_s - 1):
        instances.tick(PAUSE_S + second)
    assert one.stage is Stage.STARTING
    for second in range(3):
        instances.tick(PAUSE_S + patience_s + second)
    assert one.stage is Stage.FAILED
    assert "has not been heard of" in one.reason
