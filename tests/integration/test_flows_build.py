"""Builds that are interrupted, builds on a cluster, and builds by integer programs, all on real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import chain

import pytest

from artifacts.library import newest_version, open_library
from artifacts.store import open_store
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.errors import NoSolutionError
from tasks.executor import InlineExecutor
from tasks.fanout import RayExecutor
from tasks.library import Build, build_library, build_spec_from_scenario
from tests.fakes import ray_build
from tests.fakes.ray_build import small_spec
from tests.fakes.ray_processes import AGENTS, descendants, survivors
from tests.fakes.waiting import PATIENT_S, until

pytestmark = pytest.mark.servers


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


class Reader:
    """Opens the newest snapshot over and over; notes every version it saw, and any that was not whole."""

    def __init__(self, store):
        self.store = store
        self.seen = {}
        self.faults = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop)

    def _loop(self):
        while not self._stop.is_set():
            try:
                if newest_version(self.store, "lib"):
                    snapshot = open_library(self.store, "lib")
                    rows = snapshot.read().num_rows
                    self.seen[snapshot.manifest.version] = rows
                    if rows != snapshot.manifest.rows or snapshot.manifest.partial:
                        self.faults.append(f"version {snapshot.manifest.version}: {rows} rows")
            except Exception as error:  # noqa: BLE001 - whatever a reader meets is a fault
                self.faults.append(repr(error))
            time.sleep(0.02)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def best_by_combination(snapshot):
    """Throughput of each (model, phase, nodes), the nodes sorted and with repeats."""
    return {
        (row["model"], row["phase"], tuple(sorted(chain(*row["stage_nodes"])))): row["throughput_tokens_per_s"]
        for row in snapshot.read().to_pylist()
    }


def start_build(store, pause_s):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.ray_build", store.url, str(pause_s)],
        env=os.environ | {"TMPDIR": os.environ["RAY_TMPDIR"]},  # what a killed build leaves goes with the tests' folder
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_build_killed_in_the_middle_is_finished_by_a_rerun_and_never_half_seen(store):
    done_before_the_kill = 3
    with Reader(store) as reader:
        build_library(small_spec(), store, InlineExecutor())
        killed = start_build(store, pause_s=1.5)
        children = []
        for line in killed.stdout:
            if int(line.split()[0]) == done_before_the_kill:
                children = {child: child.name() for child in descendants(killed.pid)}
                killed.kill()
                break
        killed.communicate(timeout=PATIENT_S)
        assert newest_version(store, "lib") == 1

        rerun = start_build(store, pause_s=0)
        out, err = rerun.communicate(timeout=240)
        assert rerun.returncode == 0, err
        until(lambda: 2 in reader.seen, "the reader sees the new version")
    assert {"raylet", "gcs_server"} <= set(children.values())
    assert survivors(children, but=AGENTS) == []
    first, *_, last = out.splitlines()
    reused = int(first.split()[1])
    assert reused >= done_before_the_kill
    assert last == "committed 2"
    assert reader.faults == []
    assert reader.seen == {
        1: open_library(store, "lib", 1).manifest.rows,
        2: open_library(store, "lib", 2).manifest.rows,
    }


def test_tiny_by_integer_programs_on_ray_equals_lattice(store):
    resolved = resolve_scenario(load_scenario("tiny"))
    build_library(build_spec_from_scenario(resolved, method="lattice", keep_all=True), store, InlineExecutor())
    lattice = best_by_combination(open_library(store, "tiny"))
    manifest = build_library(build_spec_from_scenario(resolved, method="ilp"), store, RayExecutor(workers=2))
    snapshot = open_library(store, "tiny")
    ilp = best_by_combination(snapshot)

    assert {record.shard.method for record in manifest.shards} == {"ilp"}
    assert manifest.shards_expected > 6
    assert all(snapshot.read(columns=["proven"])["proven"].to_pylist())
    common = ilp.keys() & lattice.keys()
    assert {key: ilp[key] for key in common} == pytest.approx({key: lattice[key] for key in common}, rel=1e-6)
    # Of placements that are equally good, a method may choose one that leaves a node idle, which is not stored: then
    # another combination, without that node, is as good.
    for one, other in ((ilp, lattice), (lattice, ilp)):
        for model, phase, nodes in one.keys() - other.keys():
            fewer = [
                other.get((model, phase, tuple(sorted((Counter(nodes) - Counter([n])).elements()))), 0) for n in nodes
            ]
            assert max(fewer) == pytest.approx(one[model, phase, nodes], rel=1e-6), (model, phase, nodes)
    assert len(common) > 0.9 * len(lattice)


def test_a_shard_that_kills_its_workers_is_recorded_and_the_others_are_there(store, monkeypatch):
    monkeypatch.setattr("tasks.library.solve_shard", ray_build.solve_or_die)
    build = Build(small_spec(lattice_parts=2), store)
    build.run(RayExecutor(workers=2))
    assert [record.status.value for record in build.records].count("failed") == 1
    (failed,) = (record for record in build.records if record.error)
    assert "the worker process died" in failed.error
    with pytest.raises(NoSolutionError, match="1 of 8 shards failed"):
        build.commit(allow_partial=False, clock=ray_build.CLOCK)
    assert build.commit(allow_partial=True, clock=ray_build.CLOCK).shards_present == 7


def test_the_same_build_on_a_cluster_that_loses_a_node(store):
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    detection = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    cluster = Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False, "_system_config": detection}
    )
    try:
        cluster.add_node(**node)
        victim = cluster.add_node(**node)
        lost = threading.Event()

        def lose_a_node(progress):
            if progress.done >= 4 and not lost.is_set():
                lost.set()
                cluster.remove_node(victim, allow_graceful=False)

        spec = small_spec(method="ilp", combinations_per_ilp_shard=3)
        manifest = build_library(spec, store, RayExecutor(address=cluster.address), on_progress=lose_a_node)
    finally:
        cluster.shutdown()
    assert lost.is_set()
    assert manifest.shards_failed == 0
    assert open_library(store, "lib").read().num_rows == manifest.rows
    alone = build_library(spec, open_store(f"{store.url}-alone"), InlineExecutor())
    assert (alone.rows, alone.shards_expected) == (manifest.rows, manifest.shards_expected)


def test_a_build_ended_by_sigterm_leaves_no_process(store):
    build = start_build(store, pause_s=5)
    assert build.stdout.readline()
    children = until(lambda: descendants(build.pid), "Ray's processes")
    build.send_signal(signal.SIGTERM)
    build.communicate(timeout=PATIENT_S)
    assert survivors(children) == []
