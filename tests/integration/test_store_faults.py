"""The store and the commit protocol against a real S3 server that is slow, errs, cuts connections and loses answers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

import artifacts.store
from artifacts.library import commit, commit_as, list_versions, newest_version, open_library
from artifacts.retention import Rule, remove_unneeded
from artifacts.store import Store, open_store
from coral_core.clock import ManualClock, SystemClock
from coral_core.errors import StoreConflictError, StoreError, StoreUnreachableError
from tests.fakes.artifact_cases import draft_of, shards_of
from tests.fakes.artifact_writer import ROWS, SHARDS
from tests.fakes.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.fakes.s3_servers import BUCKET, S3Server, seaweedfs
from tests.fakes.waiting import until

pytestmark = pytest.mark.servers

BROKEN = [Fault.REFUSED, Fault.CUT_REQUEST, Fault.ERROR_500, Fault.SLOW_DOWN, Fault.LOST_ANSWER, Fault.CUT_ANSWER]
AFTER = [Fault.LOST_ANSWER, Fault.ERROR_AFTER]


@pytest.fixture(scope="module")
def weed():
    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="module")
def open_proxy(weed):
    with faulty_proxy(weed.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(open_proxy) -> FaultyProxy:
    open_proxy.clear()
    return open_proxy


def reached(server: S3Server, monkeypatch, name: str) -> Store:
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    return open_store(f"s3://{BUCKET}/{name}")


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def direct(weed, monkeypatch, name) -> Store:
    """The store without the proxy: what really is there."""
    return reached(weed, monkeypatch, name)


@pytest.fixture
def store(direct, weed, proxy, monkeypatch, name) -> Store:
    return reached(replace(weed, endpoint=proxy.endpoint), monkeypatch, name)


@pytest.mark.parametrize("fault", BROKEN)
def test_one_fault_costs_a_retry_and_nothing_else(store, direct, proxy, fault):
    data = uuid.uuid4().bytes * 10_000
    store.put("base", data)
    for method, call in {
        "PUT": lambda: store.put_if_absent("created", data),
        "GET": lambda: store.get("base") == data or pytest.fail("other bytes"),
        "HEAD": lambda: store.size_bytes("base") == len(data) or pytest.fail("another size"),
    }.items():
        proxy.clear()
        proxy.add(fault, method)
        call()
        assert proxy.asked(method, "")[0] is fault
    proxy.add(fault, "GET", "list-type")
    assert store.list_keys("") == ["base", "created"]
    proxy.add(fault, "GET", "list-type")
    assert [entry.key for entry in store.browse("")[1]] == ["base", "created"]
    proxy.clear()
    proxy.add(fault, "POST", "delete")
    store.delete("base")
    assert proxy.asked("POST", "delete")[0] is fault
    assert direct.list_keys("") == ["created"]
    assert direct.get("created") == data


@pytest.mark.parametrize("fault", AFTER)
@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_write_whose_answer_was_lost_is_known_for_ones_own(store, direct, proxy, fault, times):
    proxy.add(fault, "PUT", times=times)
    store.put_once("token", b"mine")
    assert direct.get("token") == b"mine"
    with pytest.raises(StoreConflictError, match="token: an object exists under this key"):
        store.put_once("token", b"of another")
    assert direct.get("token") == b"mine"


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LOST_ANSWER, Fault.CUT_REQUEST])
def test_a_lost_answer_about_anothers_write_is_a_conflict(store, direct, proxy, fault):
    direct.put_if_absent("token", b"of another")
    proxy.add(fault, "PUT")
    with pytest.raises(StoreConflictError, match="an object exists"):
        store.put_if_absent("token", b"mine")
    assert direct.get("token") == b"of another"


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (Fault.REFUSED, "the store cannot be reached while"),
        (Fault.SLOW_DOWN, "the store fails by itself while .*SlowDown"),
        (Fault.CUT_ANSWER, "the store cannot be reached while"),
    ],
)
def test_faults_that_do_not_end_are_told_within_bounds(store, proxy, fault, what):
    store.put("base", b"x" * 1000)
    calls = {
        "writing": lambda: store.put_if_absent("a", b"1"),
        "reading": lambda: store.get("base"),
        "listing": lambda: store.list_keys(""),
        "removing": lambda: store.delete("base"),
    }
    if fault is Fault.CUT_ANSWER:
        del calls["writing"]  # its answer has no body
    for action, call in calls.items():
        proxy.clear()
        proxy.add(fault, times=10_000)
        with pytest.raises(StoreUnreachableError, match=f"^{store.url}/.*{what}") as told:
            call()
        assert f"while {action}: " in told.value.what
        assert len(proxy.seen) <= 50


def test_a_slow_server_is_waited_for(store, proxy):
    data = bytes(300_000)
    proxy.add(Fault.SLOW, times=3, wait_s=0.7)
    store.put_if_absent("a", data)
    assert store.size_bytes("a") == len(data)
    proxy.clear()
    proxy.add(Fault.TRICKLE, "GET", wait_s=1.5)
    start_s = time.monotonic()
    assert store.get("a") == data
    assert time.monotonic() - start_s > 1.0


def test_a_silent_server_is_given_up(direct, weed, proxy, monkeypatch, name):
    monkeypatch.setattr(artifacts.store, "_TIMEOUT", timedelta(seconds=1))
    store = reached(replace(weed, endpoint=proxy.endpoint), monkeypatch, name)
    proxy.add(Fault.SILENT, "PUT", wait_s=5.0)
    store.put_if_absent("a", b"mine")  # it had arrived, which reading shows
    assert proxy.asked("PUT", "/a$") == [Fault.SILENT]
    proxy.clear()
    proxy.add(Fault.SILENT, times=100, wait_s=5.0)
    with pytest.raises(StoreUnreachableError, match=f"{store.url}/b: the store cannot be reached while writing"):
        store.put_if_absent("b", b"mine")
    assert 1 < len(proxy.seen) <= 20


@pytest.mark.parametrize("fault", [*AFTER, Fault.REFUSED, Fault.SLOW_DOWN])
def test_a_commit_takes_one_version_whatever_becomes_of_its_answer(store, direct, proxy, fault):
    draft = draft_of(shards_of(store))
    proxy.add(fault, "PUT", "/manifests/")
    assert commit(store, draft).version == 1
    assert list_versions(direct, "lib") == [1]
    assert open_library(direct, "lib").read().num_rows == 80
    proxy.add(fault, "PUT", "/manifests/")
    with pytest.raises(StoreConflictError):
        commit_as(store, draft_of(shards_of(store)), 1)


def test_two_racing_writers_through_faults_share_the_versions(store, direct, proxy):
    drafts = [draft_of(shards_of(store, models=[model])) for model in ("m1", "m2")]
    for fault in [*AFTER, Fault.SLOW, Fault.REFUSED, Fault.SLOW_DOWN, *AFTER, Fault.SLOW] * 2:
        proxy.add(fault, "PUT", "/manifests/", wait_s=0.3)
    start = threading.Barrier(2)

    def write(draft) -> list[int]:
        start.wait()
        return [commit(store, draft.model_copy(update={"commit_id": uuid.uuid4().hex})).version for _ in range(6)]

    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(write, drafts))
    assert sorted(taken[0] + taken[1]) == list_versions(direct, "lib") == list(range(1, 13))
    for model, versions in zip(("m1", "m2"), taken, strict=True):
        assert versions == sorted(versions)
        assert {open_library(direct, "lib", version).models for version in versions} == {(model,)}


def test_a_writer_killed_while_its_answers_are_lost_leaves_whole_versions_only(store, direct, proxy):
    for fault in (Fault.LOST_ANSWER, Fault.SLOW, Fault.ERROR_AFTER) * 20:
        proxy.add(fault, "PUT", wait_s=0.2)
    command = [sys.executable, "-m", "tests.fakes.artifact_writer", "snapshots", store.url, "lib", "100", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        until(lambda: newest_version(direct, "lib") >= 2, "two versions")
        proxy.add(Fault.SLOW, "PUT", times=100, wait_s=0.5)
        time.sleep(0.7)
        writer.kill()
    versions = list_versions(direct, "lib")
    assert len(versions) >= 2
    for version in versions:
        table = open_library(direct, "lib", version).read(columns=["throughput_tokens_per_s"])
        assert table.num_rows == SHARDS * ROWS
        assert len(set(table["throughput_tokens_per_s"].to_pylist())) == 1
    proxy.clear()
    # What the dead one left without a manifest is taken up by the next, as it is, or tidied when it is old.
    later = ManualClock(start=SystemClock().now() + timedelta(days=40))
    remove_unneeded(store, "lib", Rule(keep=1), later)
    needed = {record.key for record in open_library(direct, "lib").manifest.present}
    assert set(direct.list_keys("libraries/lib/data")) == needed


def test_a_removal_through_faults_keeps_what_is_kept(store, direct, proxy):
    for models in (["m1"], ["m2"]):
        commit(store, draft_of(shards_of(store, models=models)))
    later = ManualClock(start=SystemClock().now() + timedelta(days=40))
    proxy.add(Fault.LOST_ANSWER, "PUT", "/manifests/")
    for fault in (Fault.LOST_ANSWER, Fault.REFUSED, Fault.ERROR_AFTER):
        proxy.add(fault, "POST", "delete")
    proxy.add(Fault.ERROR_500, "POST", "delete", times=10_000)
    with pytest.raises(StoreError, match="while removing"):
        remove_unneeded(store, "lib", Rule(keep=1), later)
    assert open_library(direct, "lib").read().num_rows == 40
    proxy.clear()
    remove_unneeded(store, "lib", Rule(keep=1), later)
    assert open_library(direct, "lib").read().num_rows == 40
    assert len(direct.list_keys("libraries/lib/data")) == 4
    assert 1 not in list_versions(direct, "lib")
