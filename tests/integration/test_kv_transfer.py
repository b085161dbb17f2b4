"""KV blocks over real sockets between workers of any split, and everything that may go wrong on the way."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zmq

from coral_core.engine.plugin import kv_server
from coral_core.engine.plugin.kv_frames import Data, Done, Get, Refused, Renew, answer, encode
from coral_core.engine.plugin.kv_plan import Chunk, Place, Terms, head_range, sources
from tests.fakes.kv_ends import ALL, SHAPE, TERMS, TOKENS, Worker, ended, fetching, keys_of, pull_of, serving, whole

pytestmark = pytest.mark.servers

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
        until_s = time.monotonic() + 2.0
        left = {server.place.address for _, server, _ in producers}
        while left and time.monotonic() < until_s:
            left -= {server.place.address for _, server, leases in producers if leases.take_ended() == {"request"}}
        assert not left  # all who fetched said so: no lease had to run out


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
                assert peer.poll(2000)
                assert answer(peer.recv()) == Refused(ticket=ticket, reason="outside")
            peer.send(encode(Get(ticket=7, lease="no such lease", chunk=ONE)))
            assert peer.poll(2000)
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
        until_s = time.monotonic() + 2.0
        while not leases.take_ended():
            assert time.monotonic() < until_s, "the producer was not told"


def test_a_lease_that_is_granted_late_is_waited_for_and_one_that_ended_is_not(tmp_path):
    keys = keys_of(tmp_path)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    with serving(keys, there, granted=False) as (server, leases), fetching(keys, here) as puller:
        puller.start(pull_of(here, whole(server.place.address)))
        time.sleep(0.3)
        leases.grant("lease", "request", there.blocks, TOKENS)
        assert ended(puller)[0].error == ""
        assert here.holds()
        while not leases.take_ended():
            pass
        begun_s = time.monotonic()
        puller.start(pull_of(here, whole(server.place.address)))
        assert "ended" in ended(puller)[0].error
        assert time.monotonic() - begun_s < TERMS.stall_s / 2
        begun_s = time.monotonic()
        puller.start(pull_of(here, whole(server.place.address), lease="never granted"))
        assert "nothing came" in ended(puller)[0].error
        assert TERMS.stall_s <= time.monotonic() - begun_s < 3 * TERMS.stall_s


def test_a_lease_that_nobody_uses_ends_by_itself_and_one_in_use_does_not(tmp_path):
    keys, terms = keys_of(tmp_path), msgspec.structs.replace(TERMS, lease_s=0.3)
    there, here = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=False)
    with serving(keys, there, terms) as (server, leases):
        assert leases.take_ended() == set()
        time.sleep(0.35)
        assert leases.take_ended() == {"request"}
        leases.grant("lease", "request", there.blocks, TOKENS)
        there.delay_s = 0.02  # the whole takes longer than a lease
        with fetching(keys, here) as puller:
            puller.start(pull_of(here, whole(server.place.address)))
            begun_s = time.monotonic()
            while not leases.take_ended():
                time.sleep(0.005)
            assert time.monotonic() - begun_s > terms.lease_s
            assert ended(puller)[0].error == ""  # it ended because all was fetched
        with fetching(keys, here) as puller:
            leases.grant("other", "another", there.blocks, TOKENS)
            for _ in range(5):
                time.sleep(0.15)
                puller.tell(server.place.address, Renew(lease="other"))
                assert "another" not in leases.take_ended()
            puller.tell(server.place.address, Done(lease="other", taker="", takers=0))
            time.sleep(0.1)
            assert leases.take_ended() == {"another"}


def test_memory_is_bounded_at_both_ends(tmp_path):
    keys = keys_of(tmp_path)
    terms = Terms(lease_s=30.0, stall_s=10.0, chunk_bytes=1024, window_bytes=4096)
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
    terms = Terms(chunk_bytes=1024, window_bytes=4096)
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
                assert peer.poll(3000)
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
    there.delay_s = 0.02
    with serving(keys, there) as (server, leases), fetching(keys, here) as puller:
        puller.start(pull_of(here, whole(server.place.address)))
        time.sleep(0.15)
        puller.cancel("request")
        puller.cancel("request")
        assert [one.error for one in ended(puller)] == ["cancelled"]
        so_far = here.cache.copy()
        assert so_far.any()
        until_s = time.monotonic() + 2.0
        while not leases.take_ended():
            assert time.monotonic() < until_s
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


def test_a_silent_producer_does_not_hold_up_the_others(tmp_path):
    keys = keys_of(tmp_path)
    here = Worker(ALL, 8, computed=False)
    silent, other = Worker(ALL, 8, computed=True), Worker(ALL, 8, computed=True)
    silent.delay_s = 3.0
    with serving(keys, silent) as (stuck, _), serving(keys, other) as (server, _), fetching(keys, here) as puller:
        for number in range(4):
            puller.start(pull_of(here, whole(stuck.place.address), request_id=f"stuck {number}"))
        time.sleep(0.2)
        begun_s = time.monotonic()
        puller.start(pull_of(here, whole(server.place.address)))
        first = ended(puller)[0]
        assert (first.request_id, first.error) == ("request", "")
        assert time.monotonic() - begun_s < TERMS.stall_s / 2
        rest = ended(puller, 4, within_s=3 * TERMS.stall_s)
        assert all("nothing came" in one.error for one in rest)


def _serve_for_ever(folder: Path, pipe) -> None:
    worker = Worker(ALL, 8, computed=True)
    worker.delay_s = 0.05
    with serving(keys_of(folder), worker) as (server, _):
        pipe.send(server.place.address)
        time.sleep(60)


def test_a_producer_that_dies_midway_fails_its_transfers_at_once(tmp_path):
    keys, here = keys_of(tmp_path), Worker(ALL, 8, computed=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=_serve_for_ever, args=(tmp_path, theirs), daemon=True)
    producer.start()
    try:
        assert ours.poll(20)
        address = ours.recv()
        terms = msgspec.structs.replace(TERMS, stall_s=30.0)
        with fetching(keys, here, terms=terms) as puller:
            puller.start(pull_of(here, whole(address)))
            time.sleep(0.5)
            assert producer.pid is not None
            os.kill(producer.pid, signal.SIGKILL)
            begun_s = time.monotonic()
            assert "is lost" in ended(puller)[0].error
            assert time.monotonic() - begun_s < 2.0
            puller.start(pull_of(here, whole(address), request_id="later"))  # nobody listens there any more
            assert "is lost" in ended(puller)[0].error
    finally:
        producer.kill()
        producer.join()
