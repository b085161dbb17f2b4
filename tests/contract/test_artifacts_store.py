"""What every store must do: local folders, memory, and S3 as moto and as SeaweedFS."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from artifacts.store import Store, open_store
from coral_core.errors import InputError, StoreConflictError, StoreError
from tests.fakes.s3_servers import BUCKET, S3Server, moto_s3, seaweedfs
from tests.fakes.waiting import until

SEAWEEDFS = pytest.param("seaweedfs", marks=pytest.mark.servers)


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
    return getattr(request, "param", "file")


def reach(server: S3Server, monkeypatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def store(request, kind, tmp_path, monkeypatch) -> Store:
    name = uuid.uuid4().hex
    match kind:
        case "file":
            return open_store((tmp_path / "a store").as_uri())
        case "memory":
            return open_store(f"memory://{name}")
        case "moto":
            reach(request.getfixturevalue("moto"), monkeypatch)
        case "seaweedfs":
            reach(request.getfixturevalue("weed"), monkeypatch)
    return open_store(f"s3://{BUCKET}/{name}/deep")


every_store = pytest.mark.parametrize("kind", ["file", "memory", "moto", SEAWEEDFS], indirect=True)
# moto's threads do not make If-None-Match atomic, so it cannot take part in races.
atomic_store = pytest.mark.parametrize("kind", ["file", "memory", SEAWEEDFS], indirect=True)


@every_store
def test_objects_come_back_as_they_were_put(store):
    big = random.Random(0).randbytes(7_000_000)
    objects = {"a/model=Qwen3-32B/part-0.parquet": big, "a/empty": b"", "b": b"\x00\xff"}
    for key, data in objects.items():
        store.put_if_absent(key, data)
    for key, data in objects.items():
        assert store.get(key) == store.find(key) == data
        assert store.exists(key)
        assert store.size_bytes(key) == len(data)
    assert store.list_keys("") == sorted(objects)
    assert store.list_keys("a") == sorted(key for key in objects if key.startswith("a/"))
    assert store.list_groups("a") == ["model=Qwen3-32B"]
    assert store.list_groups("") == ["a"]
    assert store.list_keys("nothing/here") == store.list_groups("nothing/here") == []


@every_store
def test_a_second_writer_is_refused_and_changes_nothing(store):
    store.put_if_absent("x/y", b"first")
    with pytest.raises(StoreConflictError, match=r"x/y: an object exists"):
        store.put_if_absent("x/y", b"second")
    assert store.get("x/y") == b"first"
    store.put_once("x/y", b"first")
    with pytest.raises(StoreConflictError):
        store.put_once("x/y", b"second")
    store.put_once("x/z", b"new")
    store.put("x/y", b"third")
    assert store.get("x/y") == b"third"


@every_store
def test_absent_objects(store):
    assert store.find("no/such") is None
    assert store.size_bytes("no/such") is None
    assert not store.exists("no/such")
    with pytest.raises(StoreError, match=rf"^{store.url}/no/such: no such object"):
        store.get("no/such")
    store.put("some", b"1")
    store.delete("some")
    store.delete("some")
    assert not store.exists("some")


@atomic_store
def test_of_racing_writers_exactly_one_wins(store, kind):
    n = 4 if kind == "seaweedfs" else 12
    for round_ in range(5):
        key, start = f"race/{round_}", threading.Barrier(n)

        def write(i, key=key, start=start):
            start.wait()
            try:
                store.put_if_absent(key, str(i).encode() * 1000)
            except StoreConflictError:
                return None
            return i

        with ThreadPoolExecutor(n) as pool:
            winners = [i for i in pool.map(write, range(n)) if i is not None]
        assert len(winners) == 1
        assert store.get(key) == str(winners[0]).encode() * 1000


@every_store
def test_a_fit_store_passes_its_check_and_keeps_nothing(store):
    store.check()
    assert store.list_keys("") == []


@every_store
def test_a_store_is_reopened_from_its_pickle(store):
    store.put("a", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert (again.url, again.get("a")) == (store.url, b"1")
    assert again.url_of("a") == f"{store.url}/a"
    assert store.url in repr(store)


@every_store
@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/./b", "a b/../c", "a\\b", "a#1", "a%2fb", "ä", "a\nb"]
)
def test_keys_that_a_store_would_rewrite_are_refused(store, key):
    with pytest.raises(InputError, match="not a plain relative key"):
        store.put(key, b"1")


def test_no_part_of_an_object_is_ever_seen_although_writers_are_killed(tmp_path):
    size = 20_000_000
    url = tmp_path.as_uri()
    store = open_store(url)
    command = [sys.executable, "-m", "tests.fakes.artifact_writer", "objects", url, str(size)]
    seen = 0
    for round_ in range(4):
        with subprocess.Popen([*command, f"round{round_}"]) as writer:
            until(lambda round_=round_: store.list_keys(f"round{round_}"), "its first object")
            time.sleep(random.uniform(0.0, 0.05))
            writer.kill()
        keys = store.list_keys(f"round{round_}")
        assert keys
        assert {store.size_bytes(key) for key in keys} == {size}
        seen += len(keys)
        for key in keys:
            store.delete(key)
    assert seen >= 4


@pytest.mark.parametrize("kind", ["moto"], indirect=True)
def test_a_missing_bucket_is_named(store):
    # Not on SeaweedFS, which makes a bucket with the first object that an administrator puts into it.
    lost = open_store("s3://no-such-bucket/prefix")
    for call in (
        lambda: lost.put("a", b"1"),
        lambda: lost.get("a"),
        lambda: lost.find("a"),
        lambda: lost.list_keys(""),
        lambda: lost.delete("a"),
    ):
        with pytest.raises(StoreError, match=r"s3://no-such-bucket/prefix/a?: the bucket does not exist \(create it"):
            call()


@pytest.mark.servers
def test_wrong_credentials_are_named(weed, monkeypatch):
    reach(weed, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(f"s3://{BUCKET}")
    for call in (lambda: store.put("a", b"1"), lambda: store.get("ready"), lambda: store.list_keys("")):
        with pytest.raises(StoreError, match=r"(credentials are wrong|permission denied).*AWS_ACCESS_KEY_ID"):
            call()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(StoreError, match=r"(credentials are wrong|permission denied).*AWS_ACCESS_KEY_ID"):
        open_store(f"s3://{BUCKET}").get("ready")
