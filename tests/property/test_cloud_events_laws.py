"""News of a fleet becomes runs: laws of the debouncing, against a scripted world of runs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.cloud.events import Debounce, EventKind, Look, debounced, news, what_holds
from coral_core.cloud.fleet_view import Condition
from coral_core.errors import InputError

WINDOW_S = 60


class World:
    """Looks once a second. A run that is asked for begins `delay_s` later (due meanwhile) and lasts `lasts_s`."""

    def __init__(self, news_s, cron_s, *, delay_s, lasts_s, lost=()):
        self.news_s, self.cron_s, self.delay_s, self.lasts_s, self.lost = (
            news_s,
            set(cron_s),
            delay_s,
            lasts_s,
            set(lost),
        )
        self.asked_s, self.begun_s = [], []
        self.runs = []  # (begin, end)
        self.state = Debounce()

    def play(self, until_s):
        for now in range(until_s):
            if now in self.cron_s and not self.running(now):
                self.begin(now)
            began = [begin for begin, _ in self.runs if begin <= now]
            self.state, ask = debounced(
                self.state,
                now_s=now,
                news=now in self.news_s,
                running=self.running(now) or any(begin > now for begin, _ in self.runs),
                last_start_s=max(began, default=None),
                window_s=WINDOW_S,
            )
            if ask:
                self.asked_s.append(now)
                if len(self.asked_s) not in self.lost:
                    self.begin(now + self.delay_s)
        return self

    def running(self, now):
        return any(begin <= now < end for begin, end in self.runs)

    def begin(self, at):
        self.runs.append((at, at + self.lasts_s))


seconds = st.integers(0, 900)
scripts = st.builds(
    World,
    st.sets(seconds, max_size=30),
    st.sets(seconds, max_size=4),
    delay_s=st.integers(1, 20),
    lasts_s=st.integers(1, 200),
    lost=st.sets(st.integers(1, 3), max_size=2),
)


@settings(max_examples=150)
@given(scripts)
def test_no_news_is_lost_no_run_is_idle_and_no_window_sees_two(world):
    world.play(2500)
    asked = world.asked_s
    assert all(later - earlier >= WINDOW_S for earlier, later in itertools.pairwise(asked))
    assert len(asked) <= len(world.news_s) + len(world.lost)
    begins = [begin for begin, _ in world.runs]
    assert all(any(begin > at for begin in begins) for at in world.news_s)
    for at in asked:  # nothing is asked for without news that no run has begun after
        assert any(n <= at and not any(n < begin <= at for begin in begins) for n in world.news_s)
        assert not any(begin <= at < end for begin, end in world.runs)


@settings(max_examples=60)
@given(st.sets(st.integers(101, 299), min_size=1, max_size=20))
def test_whatever_happens_during_a_run_leads_to_exactly_one_more(during):
    world = World({50, *during}, (), delay_s=1, lasts_s=250).play(2500)
    assert len(world.asked_s) == 2
    assert world.asked_s[1] >= 301


def test_a_burst_before_the_window_is_over_waits_for_its_end_and_is_one_run():
    world = World({10, 30, 31, 32}, (), delay_s=1, lasts_s=5).play(500)
    assert world.asked_s == [10, 11 + WINDOW_S]


def test_a_scheduled_run_that_begins_after_the_news_serves_it():
    assert World({20}, {5, 40}, delay_s=1, lasts_s=5).play(500).asked_s == []


def test_a_negative_window_is_refused():
    with pytest.raises(InputError, match="window_s"):
        debounced(Debounce(), now_s=0, news=True, running=False, last_start_s=None, window_s=math.nan)


def look(**changes):
    empty = {"instances": {}, "wanted": {}, "live": {}, "asked": {}, "held": {}, "lacked": {}, "to_be_had": {}}
    return Look(**empty | changes)


def test_what_holds_of_a_fleet():
    found = what_holds(
        look(
            instances={
                "i-1": (Condition.FAILED, "one of its nodes has ended"),
                "i-2": (Condition.LEAVING, "the cloud takes a spot node back"),
                "i-3": (Condition.UP, ""),
                "i-4": (Condition.STARTING, "its engine does not answer yet"),
            },
            wanted={("t", "r"): 2, ("u", "r"): 1},
            live={("t", "r"): 1, ("u", "r"): 1},
            asked={"a": 11.5, "b": 10.4, "c": 3.0, "d": 0.0},
            held={"a": 10.0, "b": 10.0, "d": 0.0},
            lacked={("r", "L4"): 0, ("r", "A100"): 3, ("s", "L4"): 0},
            to_be_had={("r", "L4"): 2, ("r", "A100"): 3},
        ),
        tolerance_frac=0.1,
    )
    assert [(c.kind, c.subject) for c in found] == [
        (EventKind.CAPACITY_BACK, "L4 in r"),
        (EventKind.DEMAND_ABOVE_PLAN, "a"),
        (EventKind.INSTANCE_DEAD, "i-1"),
        (EventKind.INSTANCE_DEAD, "t in r"),
        (EventKind.SPOT_NOTICE, "i-2"),
    ]
    details = {c.subject: c.detail for c in found}
    assert details["a"] == "a: 11.5 requests/s are asked for, the plan holds 10"
    assert details["L4 in r"] == "L4 in r: 2 can be had, 0 when the plan fell short"


def test_only_what_did_not_hold_before_is_news_whatever_its_figures():
    before = what_holds(look(asked={"a": 2.0}, held={"a": 1.0}), tolerance_frac=0.0)
    now = what_holds(look(asked={"a": 3.0, "b": 1.0}, held={"a": 1.0, "b": 0.5}), tolerance_frac=0.0)
    assert [c.subject for c in news(now, before)] == ["b"]
    assert news(before, now) == ()
