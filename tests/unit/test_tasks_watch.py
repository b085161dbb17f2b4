"""The watch over a fleet: news is told, runs are asked for once, failures lose nothing."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from coral_core.clock import ManualClock
from coral_core.cloud.events import Look
from coral_core.cloud.fleet_view import Condition
from coral_core.errors import CoralError, InputError, StoreError
from tasks.watch import RunsSeen, WatchPolicy, held_requests_per_s, keep_watch

START = datetime(2030, 1, 1, tzinfo=UTC)


def dead(*names):
    instances = dict.fromkeys(names, (Condition.FAILED, "one of its nodes has ended"))
    return Look(instances=instances, wanted={}, live={}, asked={}, held={}, lacked={}, to_be_had={}), ()


class Server:
    """Runs that are asked for begin at the next look and last `lasts_s`; `away` are times at which it does not answer.

    The first `kept_out` runs find that another one acts.
    """

    def __init__(self, clock, *, lasts_s=15.0, away=(), kept_out=0):
        self.clock, self.lasts_s, self.away, self.kept_out = clock, lasts_s, away, kept_out
        self.begun_s, self.told, self.asked = [], [], []

    def seen(self, now_s):
        self._answer()
        if self.asked and len(self.begun_s) < len(self.asked):
            self.begun_s.append(now_s)
        running = bool(self.begun_s) and now_s < self.begun_s[-1] + self.lasts_s
        counted = self.begun_s if running else self.begun_s[self.kept_out :]
        return RunsSeen(running=running, last_start_s=counted[-1] if counted else None)

    def tell(self, found):
        self._answer()
        self.told += [condition.subject for condition in found]

    def ask(self, found):
        self._answer()
        self.asked.append((self.clock.elapsed_s, sorted(condition.subject for condition in found)))

    def _answer(self):
        if self.clock.elapsed_s in self.away:
            raise CoralError("the Prefect server does not answer")


def watched(script, *, away=(), lasts_s=15.0, window_s=20.0, kept_out=0):
    """`script` by look (10 s apart): a Look, or an error to raise; the last one stays."""
    clock, said = ManualClock(start=START), []
    server = Server(clock, away=away, lasts_s=lasts_s, kept_out=kept_out)

    def look_once():
        found = script[min(int(clock.elapsed_s // 10), len(script) - 1)]
        if isinstance(found, Exception):
            raise found
        return found

    policy = WatchPolicy(poll_s=10.0, window_s=window_s)
    keep_watch(look_once, server, policy, clock=clock, sleep=clock.advance, say=said.append, looks=30)
    return server, said


def test_what_goes_on_holding_is_news_once_and_one_run():
    server, said = watched([dead(), dead("i-1")])
    assert server.asked == [(10.0, ["i-1"])]
    assert server.told == ["i-1"]
    assert said == [
        "instance-dead: i-1: one of its nodes has ended",
        "asked for a run because of 1 piece of news",
    ]


def test_news_during_a_run_is_one_more_run_after_it():
    server, _ = watched([dead("i-1"), dead("i-1"), dead("i-1", "i-2"), dead("i-1", "i-2", "i-3")], lasts_s=55.0)
    assert [subjects for _, subjects in server.asked] == [["i-1"], ["i-2", "i-3"]]
    assert server.asked[1][0] == 70.0


def test_a_run_that_found_the_lease_taken_has_served_no_news():
    server, _ = watched([dead("i-1")], kept_out=2)
    assert server.asked == [(0.0, ["i-1"]), (30.0, ["i-1"]), (60.0, ["i-1"])]


def test_a_look_that_fails_is_said_once_and_is_no_news():
    broken = StoreError("the store cannot be reached")
    server, said = watched([dead("i-1"), broken, broken, dead("i-1"), broken, dead("i-1", "i-2")])
    assert [subjects for _, subjects in server.asked] == [["i-1"], ["i-2"]]
    assert said.count("could not look: the store cannot be reached") == 2


def test_news_that_the_server_could_not_be_told_is_kept_until_it_can():
    server, said = watched([dead("i-1")], away=(0.0, 10.0, 20.0))
    assert server.asked == [(30.0, ["i-1"])]
    assert said.count("the Prefect server does not answer") == 1


def test_something_that_comes_again_is_news_again():
    server, _ = watched([dead("i-1"), *[dead()] * 9, dead("i-1")])
    assert [subjects for _, subjects in server.asked] == [["i-1"], ["i-1"]]


@pytest.mark.parametrize("change", [{"poll_s": 0.0}, {"window_s": -1.0}, {"tolerance_frac": float("nan")}])
def test_a_policy_that_makes_no_sense_is_refused(change):
    with pytest.raises(InputError, match=next(iter(change))):
        WatchPolicy(**change)


def test_a_plan_holds_what_its_scarcest_phase_does():
    demand = [
        {"model": m, "phase": p, "requests_per_s": r} for m, p, r in [("a", "prefill", 10.0), ("a", "decode", 10.0)]
    ]
    demand.append({"model": "b", "phase": "aggregated", "requests_per_s": 0.0})
    coverage = [
        {"model": "a", "demand": 1000.0, "capacity": 1500.0},
        {"model": "a", "demand": 200.0, "capacity": 240.0},
        {"model": "b", "demand": 0.0, "capacity": 0.0},
    ]
    assert held_requests_per_s({"demand": demand, "coverage": coverage}) == {"a": pytest.approx(12.0), "b": 0.0}
