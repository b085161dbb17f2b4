"""The whole machine stands still: all of its processes at once, for longer than any limit. Then one of them alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.fakes.control_processes import LOST_S, Processes
from tests.fakes.kv_ends import ALL, TERMS, Worker, ended, fetching, keys_of, pull_of, serving, whole
from tests.fakes.waiting import PATIENT_S, until

pytestmark = pytest.mark.servers
KV_TERMS = msgspec.structs.replace(TERMS, stall_s=3.0, lease_s=30.0)
PAUSE_S = 5.0


def stand_still(pids: list[int], pause_s: float) -> None:
    """Stop all of these and those below them, and let them go on; who ends meanwhile (agents have such children) is left out."""
    stopped: set[psutil.Process] = set()
    while new := everybody(pids) - stopped:  # one that is not stopped yet may start another
        for one in new:
            with suppress(psutil.NoSuchProcess):
                one.suspend()
        stopped |= new
    time.sleep(pause_s)
    for one in stopped:
        with suppress(psutil.NoSuchProcess):
            one.resume()


def everybody(pids: list[int]) -> set[psutil.Process]:
    roots = [psutil.Process(pid) for pid in pids]
    return {*roots, *(below for root in roots for below in root.children(recursive=True))}


@contextmanager
def child(target, *arguments) -> Iterator[tuple[int, multiprocessing.connection.Connection]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    try:
        yield process.pid, ours
    finally:
        process.kill()
        process.join()


def serve(folder: Path, delay_s: float, pipe) -> None:
    worker = Worker(ALL, 8, computed=True)
    worker.delay_s = delay_s
    with serving(keys_of(folder), worker, KV_TERMS) as (server, leases):
        pipe.send(server.place.address)
        while not pipe.poll(0.01):
            if leases.take_ended():
                pipe.send("ended")


def fetch(folder: Path, address: str, pipe) -> None:
    worker = Worker(ALL, 8, computed=False)
    with fetching(keys_of(folder), worker, terms=KV_TERMS) as puller:
        puller.start(pull_of(worker, whole(address)))
        until(worker.cache.any, "its first chunks")
        pipe.send("begun")
        [result] = ended(puller)
        pipe.send((result.error, worker.holds()))
        pipe.poll(PATIENT_S)


def heard(pipe):
    assert pipe.poll(PATIENT_S)
    return pipe.recv()


def test_a_transfer_outlives_a_pause_of_both_ends(tmp_path):
    with child(serve, tmp_path, 0.1) as (producer, served):
        with child(fetch, tmp_path, heard(served)) as (consumer, fetched):
            assert heard(fetched) == "begun"
            stand_still([producer, consumer], PAUSE_S)
            assert heard(fetched) == ("", True)
        assert heard(served) == "ended"  # the consumer said that it needs no more


def test_a_transfer_does_not_outlive_the_silence_of_its_producer(tmp_path):
    with child(serve, tmp_path, 1.0) as (producer, served):  # slow: it is not through when it is stopped
        address = heard(served)
        with child(fetch, tmp_path, address) as (_, fetched):
            assert heard(fetched) == "begun"
            os.kill(producer, signal.SIGSTOP)
            assert heard(fetched) == (f"nothing came from {address} for 3 s", False)
            os.kill(producer, signal.SIGCONT)
        assert heard(served) == "ended"


def test_a_fetch_goes_on_though_its_clock_jumps_by_a_minute(tmp_path):
    skipped_s = [0.0]
    keys, there, here = keys_of(tmp_path), Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    there.delay_s = 0.02
    with (
        serving(keys, there, KV_TERMS) as (server, _),
        fetching(keys, here, terms=KV_TERMS, clock=lambda: time.monotonic() + skipped_s[0]) as puller,
    ):
        puller.start(pull_of(here, whole(server.place.address)))
        until(here.cache.any, "its first chunks")
        skipped_s[0] += 60.0
        assert ended(puller)[0].error == ""
        assert here.holds()


def test_agents_coordinator_and_gateway_stand_still_together_and_nothing_fails(tmp_path, capsys):
    with Processes(tmp_path) as processes:
        processes.start_gateway()
        processes.start_coordinator()
        names = [processes.start_agent("one"), *(processes.start_agent("two", node, 2) for node in range(2))]
        for name in ("one", "two"):
            until(lambda name=name: processes.row(name).get("ready"), f"{name} is ready")
        processes.admin("PUT", "/instances/one/weight", {"weight": 1.0})
        stand_still([one.pid for one in processes.running.values()], 12.0)  # agents, too, give up after 10 s
        time.sleep(LOST_S)
        assert [processes.stage(name) for name in ("one", "two")] == ["ready", "ready"]
        assert processes.ask() == 200
        for name in names:
            assert "lost" not in processes.events(name)

        os.kill(processes.running["two-1"].pid, signal.SIGSTOP)
        until(lambda: processes.row("two").get("failed"), "the silent agent is noticed")
        assert processes.stage("one") == "ready"
        os.kill(processes.running["two-1"].pid, signal.SIGCONT)
