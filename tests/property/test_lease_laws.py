"""Never two at once: several holders, clocks that differ, crashes, pauses, and a store that others use in between."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.leases import Lease, LeaseTaken, LeaseTerms, take_lease
from artifacts.store import open_store
from coral_core.cloud.ports import LeaseLostError

START = datetime(2030, 1, 1, tzinfo=UTC)
TERMS = LeaseTerms(duration_s=60.0, skew_s=8.0)
CALL_S = 30.0
"""As long as a lease that is not renewed yet may have left: nothing to spare."""


@dataclass
class World:
    """True time, and who acted when."""

    now_s: float = 0.0
    acts: list[tuple[float, float, int]] = field(default_factory=list)


@dataclass
class Skewed:
    """A machine's clock: off by a constant, and its monotonic part from another origin."""

    world: World
    offset_s: float

    def now(self) -> datetime:
        return START + timedelta(seconds=self.world.now_s + self.offset_s)

    def monotonic_s(self) -> float:
        return self.world.now_s + 1000.0


class Interleaved:
    """The store as one holder sees it: each request takes time, in which the others may do things."""

    def __init__(self, store, between) -> None:
        self._store, self._between = store, between

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*arguments, **named):
            self._between()
            result = method(*arguments, **named)
            self._between()
            return result

        return call if callable(method) else method


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["act", "act", "act", "crash", "give back"]),
        st.sampled_from([0.0, 0.0, 1.0, 29.0, 30.0, 31.0, 37.0, 53.0, 61.0]),
    ),
    min_size=5,
    max_size=40,
)


@dataclass
class Runs:
    """Three runs on three machines over one store; while one waits for the store, the next may do something."""

    offsets: list[float]
    delays: list[tuple[float, bool]]
    world: World = field(default_factory=World)
    depth: int = 0

    def __post_init__(self) -> None:
        self.store = open_store(f"memory://{uuid.uuid4().hex}")
        self.clocks = [Skewed(self.world, offset) for offset in self.offsets]
        self.leases: list[Lease | None] = [None, None, None]

    def between(self, who: int) -> None:
        if not self.delays:
            return
        delay_s, intrude = self.delays.pop()
        self.world.now_s += delay_s
        if intrude and self.depth < 2:
            self.depth += 1
            self.act((who + 1) % 3)
            self.depth -= 1

    def act(self, who: int) -> None:
        if self.leases[who] is None:
            view = Interleaved(self.store, lambda: self.between(who))
            taken = take_lease(view, "x", holder=str(who), terms=TERMS, clock=self.clocks[who])
            if isinstance(taken, LeaseTaken):
                return
            self.leases[who] = taken
        try:
            left_s = self.leases[who].guard()
        except LeaseLostError:
            self.leases[who] = None
            return
        # What the executor does: no call with less of the lease left than it may take.
        if left_s >= CALL_S:
            self.world.acts.append((self.world.now_s, self.world.now_s + CALL_S, who))

    def give_back(self, who: int) -> None:
        """Only with nothing under way, as the executor does."""
        done = all(end <= self.world.now_s for _, end, by in self.world.acts if by == who)
        if self.leases[who] is not None and done:
            self.leases[who].give_back()
            self.leases[who] = None


@settings(max_examples=max(settings().max_examples, 400))
@given(
    steps=STEPS,
    offsets=st.lists(st.sampled_from([-TERMS.skew_s / 2, 0.0, TERMS.skew_s / 2]), min_size=3, max_size=3),
    delays=st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.0, 2.0, 15.0]), st.booleans()), max_size=60),
)
def test_never_two_act_at_once(steps, offsets, delays):
    runs = Runs(offsets, list(delays))
    for who, what, pause_s in steps:
        runs.world.now_s += pause_s
        if what == "act":
            runs.act(who)
        elif what == "crash":
            runs.leases[who] = None
        else:
            runs.give_back(who)
    acts = runs.world.acts
    for i, (begin, end, who) in enumerate(acts):
        for other_begin, other_end, other in acts[i + 1 :]:
            assert who == other or end <= other_begin or other_end <= begin


@given(
    holder_ahead_s=st.floats(-TERMS.skew_s, TERMS.skew_s),
    alive_s=st.floats(0.0, 500.0),
)
def test_whatever_a_holder_did_its_death_blocks_no_longer_than_stated(holder_ahead_s, alive_s):
    world, store = World(), open_store(f"memory://{uuid.uuid4().hex}")
    dead = take_lease(store, "x", holder="dead", terms=TERMS, clock=Skewed(world, holder_ahead_s))
    while world.now_s < alive_s:
        world.now_s += 7.0
        dead.guard()
    world.now_s += TERMS.duration_s + TERMS.skew_s + max(holder_ahead_s, 0.0)
    heir = take_lease(store, "x", holder="heir", terms=TERMS, clock=Skewed(world, 0.0))
    assert isinstance(heir, Lease)
