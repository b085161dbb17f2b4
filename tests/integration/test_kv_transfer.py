"""KV blocks over real sockets between workers of any split, and everything that may go wrong on the way."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zmq

from coral_core.engine.plugin import kv_server
from coral_core.engine.plugin.kv_frames import Data, Done, Get, Refused, Renew, answer, encode
from coral_core.engine.plugin.kv_plan import Chunk, Place, head_range, sources
from tests.fakes.kv_ends import (
    ALL,
    SHAPE,
    TERMS,
    TOKENS,
    Worker,
    ended,
    fetching,
    held_after,
    keys_of,
    pull_of,
    serving,
    whole,
)
from tests.fakes.waiting import PATIENT_S, until

pytestmark = pytest.mark.servers

PATIENT_MS = int(1000 * PATIENT_S)
ONE = Chunk(layer=0, heads=(0, 2), first=0, last=4)


def workers_of(splits: tuple[int, ...], ranks: int, block_size: int, *, computed: bool) -> list[Worker]:
    ends = itertools.accumulate(splits, initial=0)
    return [
        Worker(
            Place(address="", layers=layers, heads=head_range(rank, ranks, SHAPE.heads)), block_size, computed=computed
        )
        for layers in pairwise(ends)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (((6,), 1, 8), ((6,), 1, 8)),
        (((4, 2), 1, 8), ((6,), 1, 32)),
        (((6,), 1, 32), ((1, 2, 3), 1, 8)),
        (((4, 2), 2, 3), ((1, 3, 2), 1, 8)),
        (((2, 2, 2), 1, 16), ((5, 1), 2, 5)),
    ],
)
def test_every_worker_gets_its_layers_and_heads_whatever_the_splits(there, here, tmp_path):
    keys = keys_of(tmp_path)
    with ExitStack() as stack:
        producers = [
            (worker, *stack.enter_context(serving(keys, worker))) for worker in workers_of(*there, computed=True)
        ]
        places = tuple(server.place for _, server, _ in producers)
        consumers = workers_of(*here, computed=False)
        fetches, unneeded = sources(places, tuple(worker.place for worker in consumers))
        assert not unneeded
        pullers = [stack.enter_context(fetching(keys, worker, f"{number}")) for number, worker in enumerate(consumers)]
        for worker, puller, own in zip(consumers, pullers, fetches, strict=True):
            puller.start(pull_of(worker, own, first=7))
        for puller in pullers:
            assert [one.error for one in ended(puller)] == [""]
        assert all(worker.holds(first=7) for worker in consumers)
        for _, _, leases in producers:  # all who fetched said so: no lease had to run out
            assert until(leases.take_ended, "the lease's end") == {"request"}


def test_a_stranger_gets_nothing_and_the_fleet_goes_on(tmp_path):
    keys, others = keys_of(tmp_path), keys_of(tmp_path, "other.key")
    half = type(keys)(
        server_public=keys.server_public,
        server_secret=others.server_secret,
        client_public=others.client_public,
        client_secret=others.client_secret,
    )
    with serving(keys, Worker(ALL, 8, computed=True)) as (server, _):
        for stranger in (others, half):
            worker = Worker(ALL, 8, computed=False)
            with fetching(stranger, worker) as puller:
                puller.start(pull_of(worker, whole(server.place.address)))
                (result,) = ended(puller)
                assert result.error
                assert not worker.cache.any()
        context = zmq.Context()
        try:
            plain = context.socket(zmq.DEALER)
            plain.linger = 0
            plain.connect(server.place.address)
            plain.send(encode(Get(ticket=1, lease="lease", chunk=ONE)))
            assert plain.poll(500) == 0
        finally:
            context.destroy(linger=0)
        worker = Worker(ALL, 8, computed=False)
        with fetching(keys, worker) as puller:
            puller.start(pull_of(worker, whole(server.place.address)))
            assert ended(puller)[0].error == ""
        assert worker.holds()
        assert not server.counts["malformed"]


def test_a_consumer_refuses_a_producer_without_the_key(tmp_path):
    worker = Worker(ALL, 8, computed=False)
    there = serving(keys_of(tmp_path, "other.key"), Worker(ALL, 8, computed=True))
    with there as (server, _), fetching(keys_of(tmp_path), worker) as puller:
        puller.start(pull_of(worker, whole(server.place.address)))
        assert ended(puller)[0].error
    assert not worker.cache.any()


def test_no_key_is_ever_shown(tmp_path):
    keys = keys_of(tmp_path)
    assert "kv.key" not in repr(keys)
    assert keys.server_secret.decode() not in repr(keys)
    assert keys.client_secret.decode() not in repr(keys)


def test_malformed_messages_are_counted_and_harm_nobody(tmp_path):
    keys = keys_of(tmp_path)
    with serving(keys, Worker(ALL, 8, computed=True)) as (server, _):
        context = zmq.Context()
        try:
            peer = context.socket(zmq.DEALER)
            keys.fetch(peer)
            peer.connect(server.place.address)
            junk = [b"", b"\xc1", b"x" * 900, encode(Refused(ticket=1, reason="ended"))]
            for frame in junk:
                peer.send(frame)
            peer.send_multipart([b"a", b"b", b"c"])
            peer.send(encode(Done(lease="never granted", taker="a", takers=1)))
            peer.send(encode(Renew(lease="never granted")))
            outside = [
                {"layer": 99},
                {"layer": -1},
                {"first": -1},
                {"last": TOKENS + 1},
                {"first": 4, "last": 4},
                {"last": 1 << 62},
            ]
            for ticket, change in enumerate(outside):
                peer.send(encode(Get(ticket=ticket, lease="lease", chunk=msgspec.structs.replace(ONE, **change))))
            for ticket in range(len(outside)):
                assert peer.poll(PATIENT_MS)
                assert answer(peer.recv()) == Refused(ticket=ticket, reason="outside")
            peer.send(encode(Get(ticket=7, lease="no such lease", chunk=ONE)))
            assert peer.poll(PATIENT_MS)
            assert answer(peer.recv()) == Refused(ticket=7, reason="unknown")
            peer.send(b"y" * 5000)  # longer than any message of the protocol: cut off by the transport
            time.sleep(0.1)
        finally:
            context.destroy(linger=0)
        assert server.counts["malformed"] == len(junk) + 1
        worker = Worker(ALL, 8, computed=False)
        with fetching(keys, worker) as puller:
            puller.start(pull_of(worker, whole(server.place.address)))
            assert ended(puller)[0].error == ""
        assert worker.holds()


def test_a_corrupted_chunk_fails_its_transfer(tmp_path, monkeypatch):
    keys, worker = keys_of(tmp_path), Worker(ALL, 8, computed=False)
    monkeypatch.setattr(kv_server, "checksum", lambda ticket, payload: 12345)
    with serving(keys, Worker(ALL, 8, computed=True)) as (server, leases), fetching(keys, worker) as puller:
        puller.start(pull_of(worker, whole(server.place.address)))
        assert "corrupted" in ended(puller)[0].error
        until(leases.take_ended, "the producer is told")


def test_a_lease_that_is_granted_late_is_waited_for_and_one_that_ended_is_not(tmp_path):
    keys = keys_of(tmp_path)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    with serving(keys, there, granted=False) as (server, leases), fetching(keys, here) as puller:
        puller.start(pull_of(here, whole(server.place.address)))
        time.sleep(0.3)
        leases.grant("lease", "request", there.blocks, TOKENS)
        assert ended(puller)[0].error == ""
        assert here.holds()
        until(leases.take_ended, "the lease's end")
        puller.start(pull_of(here, whole(server.place.address)))
        assert ended(puller)[0].error.endswith("refuses: ended")


def test_a_lease_that_nobody_grants_is_waited_for_as_long_as_a_silent_producer(tmp_path):
    keys, terms = keys_of(tmp_path), msgspec.structs.replace(TERMS, stall_s=1.0)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    with serving(keys, there) as (server, _), fetching(keys, here, terms=terms) as puller:
        begun_s = time.monotonic()
        puller.start(pull_of(here, whole(server.place.address), lease="never granted"))
        assert ended(puller)[0].error == f"nothing came for 1 s: {server.place.address} knows no such lease"
        assert time.monotonic() - begun_s >= terms.stall_s
        assert not here.cache.any()


def test_a_lease_that_nobody_uses_ends_by_itself_and_one_in_use_does_not(tmp_path):
    keys, terms = keys_of(tmp_path), msgspec.structs.replace(TERMS, lease_s=5.0)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    time_s, too_early = [0.0], set()

    def later(duration_s: float) -> None:
        time_s[0] += duration_s  # at most a second: of a longer gap one second counts
        too_early.update(leases.take_ended())

    with serving(keys, there, terms, clock=lambda: time_s[0]) as (server, leases):
        for _ in range(4):
            later(1.0)
        assert not too_early
        time_s[0] += 1.0
        assert leases.take_ended() == {"request"}
        leases.grant("lease", "request", there.blocks, TOKENS)
        there.before_read = lambda: later(0.5)  # the whole takes longer than a lease
        begun_s = time_s[0]
        with fetching(keys, here) as puller:
            puller.start(pull_of(here, whole(server.place.address)))
            assert ended(puller)[0].error == ""
            assert time_s[0] - begun_s > terms.lease_s
            assert not too_early
            assert until(leases.take_ended, "the lease's end") == {"request"}  # it ended because all was fetched
        with fetching(keys, here) as puller:
            leases.grant("other", "another", there.blocks, TOKENS)
            for number in range(5):
                for _ in range(3):
                    later(1.0)
                puller.tell(server.place.address, Renew(lease="other"))
                puller.tell(
                    server.place.address, Refused(ticket=0, reason="ended")
                )  # counted: what came before is done
                until(lambda number=number: server.counts["malformed"] > number, "it is renewed")
            assert not too_early
            puller.tell(server.place.address, Done(lease="other", taker="", takers=0))
            assert until(leases.take_ended, "the lease's end") == {"another"}


def test_memory_is_bounded_at_both_ends(tmp_path):
    keys = keys_of(tmp_path)
    terms = msgspec.structs.replace(TERMS, window_bytes=4096)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    here.delay_s = 0.002  # slower than the producer
    with serving(keys, there, terms) as (server, leases), fetching(keys, here, terms=terms) as puller:
        for number in range(6):
            leases.grant(f"lease {number}", f"request {number}", there.blocks, TOKENS)
            order = pull_of(here, whole(server.place.address), request_id=f"request {number}", lease=f"lease {number}")
            puller.start(order)
        assert {one.error for one in ended(puller, 6)} == {""}
        assert 0 < puller.peak_bytes <= terms.window_bytes // 4  # one address may have a quarter
        assert 0 < server.peak_bytes <= terms.window_bytes + terms.chunk_bytes
    assert here.holds()


def test_a_peer_that_asks_for_everything_at_once_finds_the_bound(tmp_path):
    keys = keys_of(tmp_path)
    terms = msgspec.structs.replace(TERMS, window_bytes=4096)
    with serving(keys, Worker(ALL, 8, computed=True), terms) as (server, _):
        context = zmq.Context()
        try:
            peer = context.socket(zmq.DEALER)
            keys.fetch(peer)
            peer.connect(server.place.address)
            for ticket in range(400):
                peer.send(encode(Get(ticket=ticket, lease="lease", chunk=msgspec.structs.replace(ONE, last=32))))
            tickets = set()
            while len(tickets) < 400:
                assert peer.poll(PATIENT_MS)
                header, payload = peer.recv_multipart()
                message = answer(header)
                assert isinstance(message, Data)
                assert len(payload) == 1024
                tickets.add(message.ticket)
        finally:
            context.destroy(linger=0)
        assert server.peak_bytes <= terms.window_bytes + terms.chunk_bytes


def test_a_cancelled_fetch_writes_no_more_and_gives_the_lease_back(tmp_path):
    keys = keys_of(tmp_path)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    with serving(keys, there) as (server, leases), fetching(keys, here) as puller, held_after(there, 3) as go_on:
        puller.start(pull_of(here, whole(server.place.address)))
        until(here.cache.any, "its first chunks")
        puller.cancel("request")
        puller.cancel("request")
        assert [one.error for one in ended(puller)] == ["cancelled"]
        so_far = here.cache.copy()
        go_on.set()  # what it asked for before comes all the same
        until(leases.take_ended, "the lease's end")
        time.sleep(0.1)
        assert (here.cache == so_far).all()
        assert not list(puller.take_ended())


def test_a_fetch_that_cannot_be_planned_or_written_fails_and_others_go_on(tmp_path):
    keys = keys_of(tmp_path)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    with serving(keys, there) as (server, leases), fetching(keys, here) as puller:
        puller.start(pull_of(here, (), request_id="unplanned", error="another prompt"))
        leases.grant("2", "2", there.blocks, TOKENS)
        puller.start(pull_of(here, whole(server.place.address), request_id="2", lease="2", block_ids=here.blocks[:3]))
        puller.start(pull_of(here, whole(server.place.address)))
        errors = {one.request_id: one.error for one in ended(puller, 3)}
    assert errors["unplanned"] == "another prompt"
    assert "could not be written" in errors["2"]
    assert errors["request"] == ""
    assert here.holds()


def test_an_address_that_nobody_can_connect_to_fails_its_fetch_alone(tmp_path):
    keys = keys_of(tmp_path)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    with serving(keys, there) as (server, _), fetching(keys, here) as puller:
        puller.tell("tcp://_:1", Renew(lease="1"))
        puller.start(pull_of(here, whole("tcp://_:1"), request_id="nowhere"))
        puller.start(pull_of(here, whole(server.place.address)))
        errors = {one.request_id: one.error for one in ended(puller, 2)}
    assert "tcp://_:1" in errors["nowhere"]
    assert errors["request"] == ""
    assert here.holds()


def test_a_silent_producer_does_not_hold_up_the_others(tmp_path):
    keys, terms = keys_of(tmp_path), msgspec.structs.replace(TERMS, stall_s=15.0)
    here = Worker(ALL, 8, computed=False)
    silent, other = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=True)
    pace = [1]
    with (
        serving(keys, silent) as (stuck, _),
        serving(keys, other) as (server, _),
        fetching(keys, here, terms=terms, clock=lambda: pace[0] * time.monotonic()) as puller,
        held_after(silent, 0),
    ):
        for number in range(4):
            puller.start(pull_of(here, whole(stuck.place.address), request_id=f"stuck {number}"))
        puller.start(pull_of(here, whole(server.place.address)))
        first = ended(puller)[0]
        assert (first.request_id, first.error) == ("request", "")
        pace[0] = 20  # the others need not be waited for as long as a real one
        rest = ended(puller, 4)
        assert {one.error for one in rest} == {f"nothing came from {stuck.place.address} for {terms.stall_s:g} s"}


def test_a_producer_that_answers_others_is_slow_and_not_silent(tmp_path):
    keys, terms = keys_of(tmp_path), msgspec.structs.replace(TERMS, stall_s=6.0, window_bytes=1 << 18)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    time_s, gaps_s, asked_s = [0.0], [], {}

    def read_slowly() -> None:
        time.sleep(0.03)  # so that this end has read all that came before
        time_s[0] += 0.9

    there.before_read = read_slowly
    with (
        serving(keys, there, terms) as (server, leases),
        fetching(keys, here, terms=terms, clock=lambda: time_s[0]) as puller,
    ):
        get, take = puller._get, puller._take

        def noted_get(job, address, chunk) -> None:
            asked_s[chunk, job.pull.request_id] = time_s[0]
            get(job, address, chunk)

        def noted_take(message, payload) -> None:
            job, _, chunk = puller._asked[message.ticket]
            gaps_s.append(time_s[0] - asked_s[chunk, job.pull.request_id])
            take(message, payload)

        puller._get, puller._take = noted_get, noted_take
        for number in range(6):
            leases.grant(f"{number}", f"{number}", there.blocks, TOKENS)
            puller.start(pull_of(here, whole(server.place.address), request_id=f"{number}", lease=f"{number}"))
        assert {one.error for one in ended(puller, 6)} == {""}
    assert max(gaps_s) > 2 * terms.stall_s  # else this shows nothing
    assert here.holds()


def test_an_answer_that_later_ones_overtook_is_lost(tmp_path):
    keys = keys_of(tmp_path)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    with serving(keys, there) as (server, leases), fetching(keys, here) as puller:
        send, left_out = server._send, []

        def forgetful(*message) -> None:
            send(*message) if left_out else left_out.append(message)

        server._send = forgetful
        puller.start(pull_of(here, whole(server.place.address)))
        assert ended(puller)[0].error == f"an answer of {server.place.address} was lost"
        until(leases.take_ended, "the lease's end")
        leases.grant("lease", "request", there.blocks, TOKENS)
        puller.start(pull_of(here, whole(server.place.address)))
        assert ended(puller)[0].error == ""
    assert here.holds()


def _serve_for_ever(folder: Path, pipe) -> None:
    worker = Worker(ALL, 8, computed=True)
    with held_after(worker, 3), serving(keys_of(folder), worker) as (server, _):
        pipe.send(server.place.address)
        time.sleep(600)


@contextmanager
def producer_process(folder: Path) -> Iterator[tuple[int, str]]:
    """A producer in a process of its own, which gives three chunks and no more: pid and address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=_serve_for_ever, args=(folder, theirs), daemon=True)
    producer.start()
    try:
        assert ours.poll(PATIENT_S)
        assert producer.pid is not None
        yield producer.pid, ours.recv()
    finally:
        producer.kill()
        producer.join()


def test_a_producer_that_dies_midway_fails_its_transfers_at_once(tmp_path):
    keys, here = keys_of(tmp_path), Worker(ALL, 8, computed=False)
    with producer_process(tmp_path) as (pid, address), fetching(keys, here) as puller:
        puller.start(pull_of(here, whole(address)))
        until(here.cache.any, "its first chunks")
        os.kill(pid, signal.SIGKILL)
        assert "is lost" in ended(puller)[0].error  # not: nothing came for so long
        puller.start(pull_of(here, whole(address), request_id="later"))  # nobody listens there any more
        assert "is lost" in ended(puller)[0].error
