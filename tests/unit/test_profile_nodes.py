"""Renting one node at a time: what is asked of the cloud, in which zone, and that nothing is left."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import pytest

from artifacts.leases import LeaseTerms, take_lease
from artifacts.store import Store, open_store
from coral_core.clock import ManualClock
from coral_core.cloud.ports import LeaseLostError
from coral_core.cloud.provisioner import CloudBusyError, Listing, NodeOrder, Refusal, Refused, Started
from coral_core.config.settings import Settings
from coral_core.domain.fleet import FleetId, Node, NodeState
from coral_core.domain.launch import NodePlace
from coral_core.errors import (
    DataGapError,
    InputError,
    MeasurementError,
    ProvisionError,
    ServingError,
    StoreUnreachableError,
)
from coral_core.perf.profiling import Sweep
from tasks.measure import TimeUpError, begun
from tasks.profile_nodes import Ground, Meeting, NodeLateError, Place, Rental, local_places
from tasks.profile_run import Guarded, ProfileRun, ProfileWish
from tests.fakes.profile_cases import SWEEP, ClosedFormEngines

NUMBERS = itertools.count()
PLACE = Place(region="here", zones=("a", "b"), price_usd_per_h=1.0)
FLEET = FleetId(name="blue-profile", account="1")


@dataclass
class Cloud:
    """`refusals` are given in order; a node that is told to end is there for one more look, if `stubborn` for ever."""

    refusals: list[Refusal] = field(default_factory=list)
    stubborn: bool = False
    busy_looks: int = 0
    nodes: list[Node] = field(default_factory=list)
    orders: list[NodeOrder] = field(default_factory=list)
    call_timeout_s: float = 1.0

    def account(self) -> str:
        return "1"

    def describe(self, fleet, region) -> Listing:
        if self.busy_looks:
            self.busy_looks -= 1
            raise CloudBusyError("busy")
        seen = tuple(self.nodes)
        if not self.stubborn:
            self.nodes = [node for node in self.nodes if node.state is not NodeState.ENDING]
        return Listing(nodes=seen)

    def start(self, fleet, order):
        self.orders.append(order)
        if self.refusals:
            refusal = self.refusals.pop(0)
            return Refused(refusal=refusal, code=refusal.value, message="no")
        node = Node(
            node_id=f"n{len(self.orders)}", region=order.region, zone=order.zone, market=order.market,
            state=NodeState.RUNNING, launched_at=datetime(2026, 1, 1, tzinfo=UTC), tags=order.tags,
        )  # fmt: skip
        self.nodes.append(node)
        return Started(node=node)

    def stop(self, fleet, region, nodes):
        from dataclasses import replace

        ids = {node.node_id for node in nodes}
        self.nodes = [replace(n, state=NodeState.ENDING) if n.node_id in ids else n for n in self.nodes]

    def release_group(self, fleet, region, instance_id) -> bool:
        return True


class Met:
    """In the place of the coordinator: every node is ready at once, or fails."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.expected: list[str] = []

    def expect(self, instance_id, launch) -> None:
        self.expected.append(instance_id)

    def await_ready(self, instance_id, *, within_s, meanwhile) -> str:
        meanwhile()
        if self.fault:
            raise ServingError(self.fault)
        return "http://node"


def rental(cloud: Cloud, met: Met | None = None) -> Rental:
    clock = ManualClock(start=datetime(2026, 1, 1, tzinfo=UTC))
    store = open_store(f"memory://nodes-{next(NUMBERS)}")
    ground = Ground(
        provisioner=cloud, clock=clock, sleep=clock.advance, settle_s=0.0, regions=("here",), places=lambda _: [PLACE]
    )
    lease = take_lease(store, FLEET.name, holder="a test", terms=LeaseTerms(), clock=clock)
    return Rental(ground=ground, meeting=met or Met(), lease=lease, fleet=FLEET, on_step=print)


def node_of(given: Rental):
    return given.node(name="profile-1", model="m", config="c", place=PLACE, launch=lambda *_: None, within_s=10.0)


def test_a_node_is_released_at_the_end_and_after_any_fault():
    cloud = Cloud()
    with node_of(rental(cloud)) as url:
        assert url == "http://node"
        assert [node.tags.config for node in cloud.nodes] == ["c"]
    assert cloud.nodes == []
    for error in (RuntimeError("a bug"), KeyboardInterrupt()):
        with pytest.raises(type(error)), node_of(rental(cloud)):
            raise error
        assert cloud.nodes == []
    with pytest.raises(ServingError, match="no engine"), node_of(rental(cloud, Met("no engine"))):
        pass
    assert cloud.nodes == []


@pytest.mark.parametrize(("held_s", "left"), [(100.0, 0), (299.5, 1)])
def test_a_node_is_released_while_the_store_is_away_and_the_lease_is_not_over(held_s, left, monkeypatch):
    cloud = Cloud()
    given = rental(cloud)

    def away(*_):
        raise StoreUnreachableError("no answer")

    def measure():
        monkeypatch.setattr(Store, "exists", away)
        given.ground.clock.advance(held_s)
        given.lease.guard()

    with pytest.raises(StoreUnreachableError), node_of(given):
        measure()
    assert len(cloud.nodes) == left  # later another run may have the lease


def test_zones_are_tried_in_turn_and_passing_refusals_again():
    cloud = Cloud(refusals=[Refusal.THROTTLED, Refusal.CAPACITY])
    with node_of(rental(cloud)):
        pass
    assert [order.zone for order in cloud.orders] == ["a", "a", "b"]
    assert len({order.tags.instance_id for order in cloud.orders}) == 1


def test_where_no_zone_has_any_all_are_named():
    with (
        pytest.raises(ProvisionError, match="a: capacity; b: quota"),
        node_of(rental(Cloud(refusals=[Refusal.CAPACITY, Refusal.QUOTA]))),
    ):
        pass


def test_a_start_of_unknown_end_is_not_tried_elsewhere():
    cloud = Cloud(refusals=[Refusal.UNKNOWN] * 3)
    with pytest.raises(ProvisionError, match="unknown: no"), node_of(rental(cloud)):
        pass
    assert {order.zone for order in cloud.orders} == {"a"}


def test_a_node_that_will_not_end_is_named():
    cloud = Cloud(stubborn=True)
    with (
        pytest.raises(ProvisionError, match=r"nodes are left: n1.*coral teardown blue-profile"),
        node_of(rental(cloud)),
    ):
        pass


def test_a_busy_cloud_is_asked_again():
    cloud = Cloud(busy_looks=2)
    with node_of(rental(cloud)):
        pass
    given = rental(cloud)
    assert given.release_all() == 0


def test_what_is_left_of_earlier_runs_is_counted():
    cloud = Cloud()
    first = rental(cloud)
    first._started(PLACE, next(iter(orders_tags(cloud, first))))
    assert rental(cloud).release_all() == 1


def orders_tags(cloud: Cloud, given: Rental):
    with node_of(given):
        pass
    return [order.tags for order in cloud.orders]


class Late(Met):
    def await_ready(self, instance_id, *, within_s, meanwhile) -> str:
        raise NodeLateError(f"not ready after {within_s:g} s")


def test_a_node_that_the_time_is_too_short_for_is_told_from_one_that_does_not_come(engine_file):
    run = run_of(engine_file)
    given = rental(Cloud(), Late())
    until_s = given.ground.clock.monotonic_s() + 12.0
    measurement = begun(run.subjects[0], run.store)
    with pytest.raises(TimeUpError, match="used up before its node was: not ready after 12 s"):
        run._measure(measurement, given, PLACE, until_s=until_s)
    with pytest.raises(NodeLateError, match="not ready after 1800 s"):
        run._measure(measurement, given, PLACE, until_s=until_s + 1e6)


class Slow(ClosedFormEngines):
    """Answers when the lease has been looked at so often while the question was open."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.left = looks, threading.Semaphore(0)

    def guard(self) -> None:
        self.left.release()

    def measure(self, shot, samples, *, within_s):
        assert all(self.left.acquire(timeout=60) for _ in range(self.looks))
        return super().measure(shot, samples, within_s=within_s)


def test_the_lease_is_kept_while_a_question_is_open(monkeypatch):
    monkeypatch.setattr("tasks.profile_run.GUARD_S", 0.01)
    engines = Slow(looks=4)
    guarded = Guarded(engines, engines.guard)
    assert guarded.open(1, 2, within_s=1.0).layers == 2
    assert len(guarded.measure(SWEEP.shots(1, 2)[0], 5, within_s=1.0)) == 5
    for error in (MeasurementError("dead"), InputError("too many tokens")):
        with pytest.raises(type(error), match=error.what):
            Guarded(engines, engines.guard)._asked(partial(throw, error))


def test_a_lost_lease_waits_for_no_answer(monkeypatch):
    monkeypatch.setattr("tasks.profile_run.GUARD_S", 0.01)
    never, looks = threading.Event(), iter([None, None])

    def guard() -> None:
        if next(looks, "lost"):
            raise LeaseLostError("another run holds it")

    with pytest.raises(LeaseLostError):
        Guarded(ClosedFormEngines(), guard)._asked(never.wait)
    never.set()


def throw(error: Exception) -> None:
    raise error


def test_this_machine_has_a_place_for_its_own_configurations_only():
    (place,) = local_places("local-large")
    assert (place.region, place.price_usd_per_h) == ("local", 0.1)
    with pytest.raises(DataGapError, match="no price of g5"):
        local_places("g5.xlarge")


def test_a_node_that_nobody_expects_is_not_launched():
    meeting = Meeting.__new__(Meeting)
    meeting._launches = {}
    where = NodePlace(node="0", config="c", host="h", first_port=1, ports=1, cpus=())

    class Question:
        instance_id = "stray"
        places = (where,)

    with pytest.raises(InputError, match="expects no such node"):
        meeting._launch(Question())


@pytest.fixture
def engine_file(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text(
        "device: cpu\nmodels: {tiny-chat: {fp32: {path: /m, dtype: float32, kv_cache_memory_bytes: 67108864}}}\n"
    )
    return path


def run_of(engine_file, **changes) -> ProfileRun:
    given = {
        "provider": "local", "model": "tiny-chat", "configs": ("local-large",), "engine_file": engine_file,
        "engine_version": "0.32.0", "sweep": Sweep(batches=(1,), prompts=(64,), contexts=(64,)), "max_s": 3600.0,
    }  # fmt: skip
    store = open_store(f"memory://run-{next(NUMBERS)}")
    return ProfileRun(
        wish=ProfileWish(**{**given, **changes}), settings=Settings(), store=store, folder=engine_file.parent
    )


def test_a_dry_run_says_what_is_missing_and_the_most_it_costs(engine_file):
    plan = run_of(engine_file).dry_run()
    (row,) = plan.rows
    assert (row["engines"], row["steps"], row["of"], row["price_usd_per_h"], row["minutes"]) == (2, 4, 4, 0.1, 59.0)
    assert run_of(engine_file, max_s=30.0).dry_run().rows[0]["minutes"] == 0.0
    assert (plan.bound_usd, plan.bound_s) == (pytest.approx(0.1), 3600.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "nope"}, "unknown model"),
        ({"configs": ("nope",)}, "unknown node configuration"),
        ({"configs": ()}, "at least one"),
        ({"provider": "aws", "configs": ("g5.xlarge",)}, "need a coordinator"),
        ({"max_usd": 0.0}, "max_usd"),
        ({"depths": (5, 3)}, "rising"),
        ({"dtype": "bf16"}, "tiny-chat bf16"),
        ({"fleet": "Not a fleet"}, "bad fleet name"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_started(engine_file, changes, words):
    with pytest.raises(InputError, match=words):
        run_of(engine_file, **changes)
