"""Retention beside builders, planners and readers, any of them interrupted or killed between any two calls.

The store's calls are the steps: before a chosen one, another actor does all of its work (itself interrupted by a third),
or the actor dies there. Time is the test's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import artifacts.library
import artifacts.retention
from artifacts.library import commit, draft_manifest, list_versions, newest_version, open_library, read_manifest
from artifacts.plans import list_plans, read_plan, write_plan
from artifacts.retention import GUARD, Rule, remove_unneeded
from artifacts.shards import find_shard, write_shard
from artifacts.store import Entry, Store, open_store
from coral_core.clock import ManualClock
from coral_core.errors import CoralError
from tests.fakes.artifact_cases import capacity_table, rows_of, shard_key_of

START = datetime(2030, 1, 1, tzinfo=UTC)
CAPACITY = capacity_table()
ROWS = rows_of(CAPACITY, 2)
SHARDS = 2
EVERY = settings(deadline=None, max_examples=60)


@pytest.fixture(scope="module", autouse=True)
def _one_call_at_a_time():
    with pytest.MonkeyPatch.context() as patch:
        for module in (artifacts.library, artifacts.retention):
            patch.setattr(module, "_IN_FLIGHT", 1)
        yield


class Killed(BaseException):
    """The actor's process is gone."""


class SteppedStore(Store):
    """A store in memory that calls `before_call` first, and whose objects are as old as the clock says."""

    def __init__(self, clock: ManualClock, modified: dict[str, datetime]) -> None:
        whole = open_store("memory://retention laws")
        super().__init__(whole.url, type(whole._objects)())
        self.clock, self.modified = clock, modified
        self.before_call: Callable[[], None] = lambda: None

    def put_if_absent(self, key, data):
        self.before_call()
        super().put_if_absent(key, data)
        self.modified[key] = self.clock.now()

    def put(self, key, data):
        self.before_call()
        super().put(key, data)
        self.modified[key] = self.clock.now()

    def find(self, key):
        self.before_call()
        return super().find(key)

    def size_bytes(self, key):
        self.before_call()
        return super().size_bytes(key)

    def delete(self, key):
        self.before_call()
        super().delete(key)

    def list_entries(self, prefix):
        self.before_call()
        return [
            Entry(key=entry.key, size_bytes=entry.size_bytes, modified=self.modified[entry.key])
            for entry in super().list_entries(prefix)
        ]


class World:
    def __init__(self) -> None:
        self.clock = ManualClock(start=START)
        self.store = SteppedStore(self.clock, {})
        self.plans = 0
        self.removed = 0

    def build(self, seed: int, *_: int) -> None:
        """Two shards, the second shared by every other build; reused where they are, as a build does."""
        records = []
        for part, inputs in enumerate((seed, seed % 2)):
            shard = shard_key_of(CAPACITY, part=part, parts=SHARDS, seed=inputs)
            index = ROWS.schema.get_field_index("throughput_tokens_per_s")
            marked = ROWS.set_column(index, ROWS.schema.field(index), pa.array([1.0 + inputs] * len(ROWS)))
            # The time that solving took differs from run to run, and so do the bytes.
            statistics = {"solve_s": self.clock.elapsed_s}
            found = find_shard(self.store, "lib", shard)
            records.append(found or write_shard(self.store, "lib", shard, marked, statistics=statistics))
        commit(
            self.store,
            draft_manifest(
                library="lib",
                shards=records,
                shards_expected=SHARDS,
                created_at=self.clock.now(),
                code_version="test",
                inputs={},
                parameters={},
                statistics={"seed": float(seed)},
            ),
        )

    def plan(self, choice: int, *_: int) -> None:
        """A plan from one of the versions, at times an old one."""
        versions = list_versions(self.store, "lib")
        if not versions:
            return
        snapshot = open_library(self.store, "lib", versions[-1 - choice % len(versions)])
        self.plans += 1
        plan = {
            "scenario": "s",
            "status": "optimal",
            "cost_usd_per_h": 1.0,
            "churn_usd_per_h": 0.0,
            "objective_usd_per_h": 1.0,
            "instances": [],
            "shortfall": [],
        }
        decision = {"library": {"name": "lib", "version": snapshot.manifest.version}, "explanation": {}}
        time = START + timedelta(seconds=self.plans)
        write_plan(self.store, "blue", time, plan=plan, decision=decision, report_md="r")

    def remove(self, keep: int, *_: int) -> None:
        rule = Rule(keep=1 + keep % 3, older_than=timedelta())
        self.removed += len(remove_unneeded(self.store, "lib", rule, self.clock).keys)

    def read(self, *_: int) -> None:
        """The newest is whole unless it was replaced while it was read."""
        version = newest_version(self.store, "lib")
        if version:
            require_whole(self.store, version)

    def wait(self, hours: int, *_: int) -> None:
        self.clock.advance(3600.0 * 7 * hours)

    def act(self, actor: str, choice: int, interruptions: list[tuple[int, str, int]]) -> int:
        """The actor's work; at its n-th call the first of the interruptions, itself interrupted by the next.

        Returns how many calls it came to.
        """
        calls, outer = 0, self.store.before_call

        def before_call() -> None:
            nonlocal calls
            calls += 1
            if interruptions and calls == interruptions[0][0]:
                _, other, how = interruptions[0]
                if other == "killed":
                    raise Killed
                self.act(other, how, interruptions[1:])

        self.store.before_call = before_call
        try:
            getattr(self, actor)(choice)
        except CoralError as error:
            if actor == "read":
                raise AssertionError("the newest version could not be read") from error
            # Everyone else is told, and may try again.
        except Killed:
            pass
        finally:
            self.store.before_call = outer
        return calls


def require_whole(store: Store, version: int) -> None:
    snapshot = open_library(store, "lib", version)
    table = snapshot.read(columns=["throughput_tokens_per_s"])
    seed = int(snapshot.manifest.statistics["seed"])
    assert sorted(table["throughput_tokens_per_s"].to_pylist()) == sorted([1.0 + seed] * 2 + [1.0 + seed % 2] * 2)


def require_kept_whole(world: World) -> None:
    """Every version that there is, those of recorded plans among them."""
    versions = list_versions(world.store, "lib")
    for version in versions:
        require_whole(world.store, version)
    pinned = {
        read_plan(world.store, "blue", time).decision["library"]["version"] for time in list_plans(world.store, "blue")
    }
    assert pinned <= set(versions)


choices = st.integers(0, 5)
others = st.sampled_from(["remove", "remove", "build", "plan", "wait", "killed"])
interruptions = st.lists(st.tuples(st.integers(1, 25), others, choices), max_size=3)
steps = st.tuples(st.sampled_from(["build", "plan", "remove", "wait", "read"]), choices, interruptions)


@EVERY
@given(
    old=st.lists(st.tuples(st.sampled_from(["build", "build", "build", "plan"]), choices), max_size=6),
    history=st.lists(steps, min_size=1, max_size=5),
)
def test_what_is_kept_always_reads_whole(old, history):
    world = World()
    for actor, choice in old:
        world.act(actor, choice, [])
    world.clock.advance(GUARD.total_seconds() * 1.5)
    for actor, choice, interrupted in history:
        # A reader is only promised the newest version: it is not disturbed by what replaces that.
        world.act(actor, choice, [] if actor == "read" else interrupted)
        require_kept_whole(world)
    if not list_versions(world.store, "lib"):
        return
    # In the end, undisturbed: all that is old goes, and nothing else.
    world.clock.advance(GUARD.total_seconds() * 40)
    remove_unneeded(world.store, "lib", Rule(keep=1, older_than=timedelta()), world.clock)
    require_kept_whole(world)
    versions = list_versions(world.store, "lib")
    decided = {
        int(read_version(world.store, key)) for key in world.store.list_keys("plans") if key.endswith("decision.json")
    }
    contents = {v: {record.key for record in read_manifest(world.store, "lib", v).present} for v in versions}
    wanted = [contents[version] for version in {*decided, versions[-1]} if version in contents]
    assert all(content in wanted for content in contents.values())
    needed = set().union(*contents.values())
    assert set(world.store.list_keys("libraries/lib/data")) == needed
    # And builders find their way afterwards, whatever has been retired.
    world.build(7)
    require_kept_whole(world)


def read_version(store: Store, key: str) -> str:
    return store.get(key).decode().partition('"version":')[2].partition("}")[0]


def aged_world() -> World:
    """Versions of seeds 0 to 3, all but the last long replaced; a plan needs the second."""
    world = World()
    for seed in range(4):
        world.act("build", seed, [])
    world.act("plan", 2, [])
    world.clock.advance(GUARD.total_seconds() * 1.5)
    return world


INTERRUPTED = [
    (("build", 0), ("remove", 0)),
    (("build", 2), ("remove", 0)),
    (("plan", 3), ("remove", 0)),
    (("plan", 1), ("remove", 0)),
    (("remove", 0), ("build", 0)),
    (("remove", 0), ("build", 5)),
    (("remove", 0), ("plan", 3)),
    (("remove", 0), ("plan", 1)),
    (("remove", 0), ("remove", 1)),
    (("remove", 0), ("killed", 0)),
    (("build", 5), ("killed", 0)),
    (("plan", 3), ("killed", 0)),
]


@pytest.mark.parametrize(("outer", "inner"), INTERRUPTED)
def test_every_place_to_be_interrupted(outer, inner):
    for call in itertools.count(1):
        world = aged_world()
        done = world.act(*outer, [(call, *inner)])
        require_kept_whole(world)
        world.act("remove", 0, [])
        require_kept_whole(world)
        if done < call:
            break
    assert call > 8


@pytest.mark.parametrize("outer", [("build", 0), ("plan", 3)])
def test_every_place_where_a_removal_can_die_meanwhile(outer):
    for call in itertools.count(1, 2):
        for inner_call in range(1, 45, 4):
            world = aged_world()
            done = world.act(*outer, [(call, "remove", 0), (inner_call, "killed", 0)])
            require_kept_whole(world)
            world.act(*outer, [])
            require_kept_whole(world)
        if done < call:
            break


def test_removal_takes_part_in_the_histories():
    """That the laws above are not kept by doing nothing."""
    world = aged_world()
    world.act("remove", 0, [])
    assert list_versions(world.store, "lib") == [2, 4, 5]
    assert world.removed == 2 + 3
