"""Writers and readers in several processes: races for a version, and writers that are killed while others read."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from artifacts.library import list_versions, newest_version, open_library
from artifacts.store import open_store
from tests.fakes.artifact_writer import ROWS, SHARDS
from tests.fakes.s3_servers import BUCKET, seaweedfs


@pytest.fixture(params=["file", pytest.param("seaweedfs", marks=pytest.mark.servers)])
def store(request, tmp_path, monkeypatch):
    if request.param == "file":
        yield open_store(tmp_path.as_uri())
        return
    with seaweedfs() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield open_store(f"s3://{BUCKET}/processes")


def writer(store, *arguments) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fakes.artifact_writer", "snapshots", store.url, "lib", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def require_whole(snapshot) -> None:
    """All rows, and all of the generation that the manifest states."""
    table = snapshot.read(columns=["throughput_tokens_per_s"])
    assert table.num_rows == SHARDS * ROWS == snapshot.manifest.rows
    assert set(table["throughput_tokens_per_s"].to_pylist()) == {snapshot.manifest.statistics["generation"]}


def test_racing_writers_share_the_versions(store):
    each, begin = 6, time.time() + 2.0
    writers = [writer(store, start, each, begin) for start in (100, 200)]
    taken = []
    for process in writers:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        taken.append([int(line) for line in out.split()])
    assert sorted(taken[0] + taken[1]) == list_versions(store, "lib") == list(range(1, 2 * each + 1))
    for start, versions in zip((100, 200), taken, strict=True):
        assert versions == sorted(versions)
        for generation, version in enumerate(versions, start):
            snapshot = open_library(store, "lib", version)
            assert snapshot.manifest.statistics["generation"] == generation
            require_whole(snapshot)


def test_a_reader_never_sees_a_part_although_writers_are_killed(store):
    reads = killed = 0
    while killed < 5:
        before = newest_version(store, "lib")
        # A new start of the same build: shards of the last attempt are reused, versions go on.
        with writer(store, 1000 * (killed // 2), 10_000) as process:
            try:
                until = None
                while until is None or time.monotonic() < until:
                    if newest_version(store, "lib") > before:
                        until = until or time.monotonic() + random.uniform(0.0, 0.3)
                        require_whole(open_library(store, "lib"))
                        reads += 1
                    assert process.poll() is None
            finally:
                process.kill()
            killed += 1
    assert reads >= 5
    for version in list_versions(store, "lib"):
        require_whole(open_library(store, "lib", version))
