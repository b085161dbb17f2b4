"""Leases over every store: one taker of many, renewal, hand-over, and what a loser is told."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from artifacts.keys import lease_key
from artifacts.leases import Lease, LeaseTaken, LeaseTerms, read_lease, take_lease
from artifacts.store import Store, open_store
from coral_core.clock import ManualClock, SystemClock
from coral_core.cloud.ports import LeaseLostError
from coral_core.errors import InputError, StoreError
from tests.fakes.s3_servers import BUCKET, moto_s3, seaweedfs

START = datetime(2030, 5, 6, 7, 8, 9, tzinfo=UTC)
TERMS = LeaseTerms(duration_s=100.0, skew_s=10.0)
SEAWEEDFS = pytest.param("seaweedfs", marks=pytest.mark.servers)
every_store = pytest.mark.parametrize("kind", ["file", "memory", "moto", SEAWEEDFS], indirect=True)
# moto's threads do not make If-None-Match atomic, so it cannot take part in races.
atomic_store = pytest.mark.parametrize("kind", ["file", "memory", SEAWEEDFS], indirect=True)


@pytest.fixture(scope="module")
def moto():
    with moto_s3() as server:
        yield server


@pytest.fixture(scope="module")
def weed():
    with seaweedfs() as server:
        yield server


@pytest.fixture
def kind(request):
    return getattr(request, "param", "memory")


@pytest.fixture
def store(request, kind, tmp_path, monkeypatch) -> Store:
    name = uuid.uuid4().hex
    if kind == "file":
        return open_store((tmp_path / "store").as_uri())
    if kind == "memory":
        return open_store(f"memory://{name}")
    server = request.getfixturevalue("moto" if kind == "moto" else "weed")
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    return open_store(f"s3://{BUCKET}/{name}/deep")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=START)


def take(store, clock, holder="a", *, terms=TERMS) -> Lease | LeaseTaken:
    return take_lease(store, "blue", holder=holder, terms=terms, clock=clock)


def held(store, clock, holder="a", *, terms=TERMS) -> Lease:
    lease = take(store, clock, holder, terms=terms)
    assert isinstance(lease, Lease)
    return lease


@every_store
def test_one_holds_the_other_is_told_who_since_and_until_when(store, clock):
    first = held(store, clock, "run one at host:1")
    clock.advance(5)
    loser = take(store, clock, "run two")
    assert isinstance(loser, LeaseTaken)
    assert (loser.holder, loser.epoch, loser.since) == ("run one at host:1", 1, START)
    assert (loser.until - START).total_seconds() == 100
    assert str(loser) == (
        "fleet blue is being changed by run one at host:1 since 2030-05-06 07:08:09 UTC; its lease (epoch 1) runs "
        "until 07:09:49 UTC unless renewed, and may be taken 10 s later"
    )
    assert read_lease(store, "blue") is not None
    first.give_back()
    assert read_lease(store, "blue") is None
    assert held(store, clock, "run two").epoch == 3
    assert [int(key[-25:-5]) for key in store.list_keys("leases/blue")] == [1, 2, 3]


@every_store
def test_a_dead_holder_blocks_for_its_term_and_the_allowance_and_no_longer(store, clock):
    dead = held(store, clock)
    clock.advance(109.9)
    assert isinstance(take(store, clock, "b"), LeaseTaken)
    clock.advance(0.1)
    heir = held(store, clock, "b")
    assert heir.epoch == 2
    assert heir.guard() == 100
    with pytest.raises(LeaseLostError, match=r"lease blue: b holds it since .* \(epoch 2\)"):
        dead.guard()
    dead.give_back()
    assert heir.guard() == 100


@every_store
def test_guarding_renews_when_less_than_half_is_left(store, clock):
    lease = held(store, clock)
    for _ in range(20):
        clock.advance(40)
        left = lease.guard()
        assert left >= 50
        assert isinstance(take(store, clock, "b"), LeaseTaken)
    assert 10 <= lease.epoch <= 20
    assert read_lease(store, "blue").since == START


@atomic_store
def test_of_many_takers_at_once_exactly_one_gets_it(store):
    clock, barrier = SystemClock(), threading.Barrier(8)

    def compete(number: int) -> Lease | LeaseTaken:
        barrier.wait()
        return take_lease(store, "blue", holder=str(number), terms=LeaseTerms(), clock=clock)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(compete, range(8)))
    (winner,) = [lease for lease in found if isinstance(lease, Lease)]
    assert {loser.holder for loser in found if isinstance(loser, LeaseTaken)} == {winner.holder}


@pytest.mark.parametrize("newest", [1, 2, 3, 7, 8, 9, 31, 64, 100])
def test_the_newest_epoch_is_found_however_many_there_are(store, clock, newest):
    lease = held(store, clock)
    while lease.epoch < newest:
        clock.advance(60)
        lease.guard()
    loser = take(store, clock, "b")
    assert isinstance(loser, LeaseTaken)
    assert loser.epoch == newest


@every_store
def test_removed_old_epochs_are_looked_past(store, clock):
    lease = held(store, clock)
    while lease.epoch < 9:
        clock.advance(60)
        lease.guard()
    for epoch in (1, 2, 5):
        store.delete(lease_key("blue", epoch))
    store.put("leases/blue/notes.txt", b"somebody's")
    loser = take(store, clock, "b")
    assert isinstance(loser, LeaseTaken)
    assert loser.epoch == 9


def test_a_holder_whose_record_was_removed_stops(store, clock):
    lease = held(store, clock)
    store.delete(lease_key("blue", 1))
    with pytest.raises(LeaseLostError, match="its record was removed"):
        lease.guard()


class Flaky:
    """A store that puts, and then answers as if it had not."""

    def __init__(self, store: Store) -> None:
        self.store, self.error = store, StoreError("no answer")

    def __getattr__(self, name):
        return getattr(self.store, name)

    def put_if_absent(self, key, data):
        self.store.put_if_absent(key, data)
        raise self.error


def test_a_renewal_whose_answer_was_lost_is_adopted(store, clock):
    lease = held(store, clock)
    lease._store = Flaky(store)
    clock.advance(60)
    with pytest.raises(StoreError, match="no answer"):
        lease.guard()
    assert (lease.epoch, lease.left_s) == (1, 40)
    assert (lease.guard(), lease.epoch) == (100, 2)


def test_a_put_that_was_repeated_by_the_client_is_recognised(store, clock):
    """The first attempt is done and its answer lost; the client repeats it and meets its own object."""
    flaky = Flaky(store)
    from coral_core.errors import StoreConflictError

    flaky.error = StoreConflictError("exists")
    lease = take_lease(flaky, "blue", holder="a", terms=TERMS, clock=clock)
    assert isinstance(lease, Lease)
    clock.advance(60)
    assert lease.guard() == 100


def test_a_renewal_that_loses_the_race_is_the_end(store, clock):
    lease = held(store, clock)
    clock.advance(111)

    class Overtaken(Flaky):
        def put_if_absent(self, key, data):
            held(self.store, clock, "b")
            self.store.put_if_absent(key, data)

    lease._store = Overtaken(store)
    with pytest.raises(LeaseLostError, match="b holds it"):
        lease.guard()


def test_a_run_out_lease_that_nobody_took_goes_on(store, clock):
    lease = held(store, clock)
    clock.advance(500)
    assert lease.left_s == -400
    assert (lease.guard(), lease.epoch) == (100, 2)


def test_the_wall_clock_going_back_lengthens_nothing(store, clock):
    lease = held(store, clock)
    clock.start = clock.start.replace(year=2029)
    clock.advance(70)
    assert lease.left_s == 30


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "record: Invalid JSON"),
        (b"{}", "name: Field required"),
        (b'{"name":"blue","epoch":2,"holder":"a","token":"t","since":"2030-01-01T00:00:00Z","until":"nan"}', "until: "),
        (
            b'{"name":"red","epoch":1,"holder":"a","token":"t","since":"2030-01-01T00:00:00Z","until":"2030-01-01T00:00:00Z"}',
            "is epoch 1 of red",
        ),
    ],
)
def test_a_damaged_record_stops_everybody_and_says_where(store, clock, data, message):
    store.put(lease_key("blue", 1), data)
    with pytest.raises(StoreError, match=message) as caught:
        take(store, clock)
    assert "leases/blue/00000000000000000001.json" in caught.value.where
    assert "when no run is acting" in caught.value.fix


@pytest.mark.parametrize("changes", [{"duration_s": 0}, {"skew_s": float("nan")}, {"duration_s": float("inf")}])
def test_terms_are_positive(changes):
    with pytest.raises(InputError, match="not a positive number of seconds"):
        LeaseTerms(**changes)


@every_store
def test_keys_after_a_key_are_listed_in_order(store):
    for key in ("g/a", "g/b", "g/c", "h/z"):
        store.put(key, b"")
    assert store.list_keys_after("g", "g/a") == ["g/b", "g/c"]
    assert store.list_keys_after("g", "g/c") == []
