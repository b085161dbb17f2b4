"""A consumer's worker fetches here: chunks of KV cache from the producers' workers that own them, in a thread of its own.

Bounded: less than `window_bytes` are asked for at any time, and a quarter of that from one address, so that one dead
producer does not hold up the others. A transfer fails as a whole: when its lease is over, a checksum is wrong, its producer
is gone, or was asked and said nothing, to this transfer or another, for `stall_s` in which this end was there to hear it. A
producer answers in the order in which it was asked, so one that says something is slow, not silent, and an answer that others
overtook is lost. What then becomes of the request is the engine's failure policy.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from coral_core.clock import ListeningClock
from coral_core.engine.plugin.kv_frames import (
    MAX_HEADER_BYTES,
    Data,
    Done,
    FrameError,
    Get,
    Refused,
    answer,
    checksum,
    encode,
)
from coral_core.engine.plugin.kv_keys import FleetKeys
from coral_core.engine.plugin.kv_plan import MAX_CHUNK_BYTES, Chunk, Shape, Source, Terms, chunks, slots

logger = logging.getLogger("vllm.coral.kv")
_POLL_S: Final = 0.1
_ASK_AGAIN_S: Final = 0.02
_IDLE_S: Final = 60.0
_LOST: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Write = Callable[[Chunk, npt.NDArray[np.int64], memoryview], None]
"""Puts the elements of a chunk into these slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """The tokens `[first, last)` of a request, to be fetched into its blocks. Without sources it fails, with `error`."""

    request_id: str
    lease: str
    sources: tuple[Source, ...]
    first: int
    last: int
    block_ids: Sequence[int]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """How a fetch ended: `error` is empty where all of it arrived."""

    request_id: str
    error: str


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    pull: Pull
    todo: deque[tuple[str, Chunk]]
    started_s: float
    unknown_since_s: float | None = None
    again: deque[tuple[float, str, Chunk]] = field(default_factory=deque)
    asked: set[int] = field(default_factory=set)
    fetched_bytes: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    socket: Any
    monitor: Any
    heard_s: float
    used_s: float
    asked_bytes: int = 0


class BlockPuller:
    """Fetches for one worker, which `taker` names among those of its engine. `write` is called in the puller's thread."""

    def __init__(
        self,
        *,
        keys: FleetKeys,
        taker: str,
        terms: Terms,
        block_size: int,
        shape: Shape,
        write: Write,
        clock: Callable[[], float],
    ) -> None:
        self._keys, self._taker, self._terms, self._write = keys, taker, terms, write
        self._block_size, self._shape, self._clock = block_size, shape, ListeningClock(clock)
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._results: SimpleQueue[Pulled] = SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        self._asked: dict[int, tuple[_Job, str, Chunk]] = {}
        self._asked_bytes = 0
        self.peak_bytes = 0
        self.counts: Counter[str] = Counter()
        self._peers: dict[str, _Peer] = {}
        self._tickets = itertools.count()
        self._stopping = False
        self._context = zmq.Context()
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind("inproc://bell")
        self._ring = self._context.socket(zmq.PAIR)
        self._ring.connect("inproc://bell")
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="coral-kv-puller", daemon=True)
        self._thread.start()

    def start(self, pull: Pull) -> None:
        """Fetch; the end is reported by `take_ended`, once."""
        self._order(lambda: self._begin(pull))

    def cancel(self, request_id: str) -> None:
        """Write nothing more for this request; reported as ended with an error, unless it has ended already."""
        self._order(lambda: self._end(request_id, "cancelled"))

    def tell(self, address: str, message: Any) -> None:  # noqa: ANN401 - Done or Renew
        """Send a message that has no answer."""
        self._order(lambda: self._say(address, message))

    def take_ended(self) -> Iterable[Pulled]:
        """The fetches that ended since the last call."""
        while True:
            try:
                yield self._results.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Stop fetching; what runs is forgotten."""
        self._order(self._halt)
        self._thread.join(timeout=5.0)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        with suppress(zmq.ZMQError):  # the bell rings already, or the thread has ended
            self._ring.send(b"", zmq.NOBLOCK)

    def _halt(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._round()
                except Exception as error:  # no request may wait for a thread that is gone
                    logger.exception("KV transfer: what runs is given up")
                    self._fail(self._jobs, f"internal error: {error}")
        finally:
            self._context.destroy(linger=200)

    def _round(self) -> None:
        self._obey()
        self._ask()
        for_s = _ASK_AGAIN_S if any(job.again for job in self._jobs.values()) else _POLL_S
        self._hear_all({socket for socket, _ in self._poller.poll(int(1000 * for_s))})
        self._give_up()

    def _obey(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            order()

    def _begin(self, pull: Pull) -> None:
        todo = deque(
            (source.address, chunk)
            for source in pull.sources
            for chunk in chunks(source, pull.first, pull.last, self._shape, self._terms.chunk_bytes)
        )
        self._jobs[pull.request_id] = _Job(pull=pull, todo=todo, started_s=self._clock())
        if pull.error or not todo:
            self._end(pull.request_id, pull.error)

    def _end(self, request_id: str, error: str = "") -> None:
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        for ticket in job.asked:
            self._forget(ticket)
        for source in job.pull.sources:
            self._say(source.address, Done(lease=job.pull.lease, taker=self._taker, takers=source.takers))
        if error:
            logger.warning("KV transfer of request %s failed: %s", request_id, error)
        took_s = self._clock() - job.started_s
        logger.debug("KV transfer of request %s: %d bytes in %.4f s", request_id, job.fetched_bytes, took_s)
        self.counts.update({"failed" if error else "fetched": 1, "bytes": job.fetched_bytes})
        self._results.put(Pulled(request_id=request_id, error=error))

    def _ask(self) -> None:
        """Ask for chunks, one of each transfer in turn, the oldest first, until the window is full."""
        now_s = self._clock()
        turn = deque(self._jobs.values())
        while turn:
            job = turn.popleft()
            while job.again and job.again[0][0] <= now_s:
                job.todo.appendleft(job.again.popleft()[1:])
            if job.todo and self._has_room(job.todo[0]):
                address, chunk = job.todo.popleft()
                try:
                    self._get(job, address, chunk)
                except zmq.ZMQError as error:  # an address that is none here, or too many of them
                    self._end(job.pull.request_id, f"{address} cannot be asked: {error}")
                    continue
                turn.append(job)

    def _has_room(self, wanted: tuple[str, Chunk]) -> bool:
        size_bytes = wanted[1].size_bytes(self._shape)
        peer = self._peers.get(wanted[0])
        held_bytes = peer.asked_bytes if peer else 0
        whole, share = self._terms.window_bytes, self._terms.window_bytes // 4
        # A single chunk always has room, else one that is larger than the window never would.
        return (not self._asked_bytes or self._asked_bytes + size_bytes <= whole) and (
            not held_bytes or held_bytes + size_bytes <= share
        )

    def _get(self, job: _Job, address: str, chunk: Chunk) -> None:
        peer, ticket = self._peer(address), next(self._tickets)
        self._say(address, Get(ticket=ticket, lease=job.pull.lease, chunk=chunk))
        self._asked[ticket] = (job, address, chunk)
        job.asked.add(ticket)
        size_bytes = chunk.size_bytes(self._shape)
        if not peer.asked_bytes:
            peer.heard_s = self._clock()  # before, it had nothing to say
        peer.asked_bytes += size_bytes
        self._asked_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._asked_bytes)

    def _say(self, address: str, message: Any) -> None:  # noqa: ANN401 - a question of the protocol
        try:
            peer = self._peer(address)
            peer.used_s = self._clock()
            peer.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:  # as if it were lost on the way
            logger.debug("KV transfer: %s takes no messages", address)

    def _peer(self, address: str) -> _Peer:
        if address not in self._peers:
            self._peers[address] = self._connect(address)
        return self._peers[address]

    def _connect(self, address: str) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 200
        socket.maxmsgsize = MAX_CHUNK_BYTES + MAX_HEADER_BYTES
        socket.ipv6 = "[" in address
        # That a producer is slow to admit is no less its silence.
        socket.connect_timeout = socket.handshake_ivl = int(1000 * self._terms.stall_s)
        self._keys.fetch(socket)
        monitor = socket.get_monitor_socket(_LOST)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            _close(socket, monitor)
            raise
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return _Peer(socket=socket, monitor=monitor, heard_s=self._clock(), used_s=self._clock())

    def _hear_all(self, ready: set[Any]) -> None:
        if self._bell in ready:
            while self._bell.poll(0):
                self._bell.recv()
        for address, peer in list(self._peers.items()):
            if peer.socket in ready:
                self._hear(address, peer)
            if peer.monitor in ready:
                while peer.monitor.poll(0):
                    recv_monitor_message(peer.monitor)
                hit = {asked.pull.request_id for asked, at, _ in self._asked.values() if at == address}
                self._fail(hit, f"the connection to {address} is lost")
                self._drop(address, peer)

    def _hear(self, address: str, peer: _Peer) -> None:
        frames = peer.socket.recv_multipart(copy=False)
        try:
            message = answer(frames[0].buffer)
        except FrameError as error:
            logger.warning("KV transfer: dropped a malformed message from %s: %s", address, error)
            return
        peer.heard_s = self._clock()
        if message.ticket not in self._asked:
            return
        asked = ((ticket, job, at) for ticket, (job, at, _) in self._asked.items())
        overtaken = [job.pull.request_id for ticket, job, at in asked if at == address and ticket < message.ticket]
        self._fail(overtaken, f"an answer of {address} was lost")
        if message.ticket in self._asked:
            self._take(message, frames[1].buffer if len(frames) == 2 else memoryview(b""))

    def _take(self, message: Data | Refused, payload: memoryview) -> None:
        job, address, chunk = self._asked[message.ticket]
        request_id = job.pull.request_id
        self._forget(message.ticket)
        job.asked.discard(message.ticket)
        if isinstance(message, Refused):
            self._refused(job, address, chunk, message.reason)
            return
        if len(payload) != chunk.size_bytes(self._shape) or checksum(message.ticket, payload) != message.checksum:
            self._end(request_id, f"what came from {address} is corrupted ({chunk})")
            return
        try:
            self._write(chunk, slots(job.pull.block_ids, self._block_size, chunk.first, chunk.last), payload)
        except Exception as error:  # whatever it is, the request must not stay waiting
            logger.exception("KV transfer: could not write %s", chunk)
            self._end(request_id, f"could not be written: {error}")
            return
        job.unknown_since_s = None
        job.fetched_bytes += len(payload)
        if not (job.todo or job.again or job.asked):
            self._end(request_id)

    def _refused(self, job: _Job, address: str, chunk: Chunk, reason: str) -> None:
        now_s, request_id = self._clock(), job.pull.request_id
        since_s = job.unknown_since_s = now_s if job.unknown_since_s is None else job.unknown_since_s
        if reason != "unknown":
            self._end(request_id, f"{address} refuses: {reason}")
        elif now_s - since_s >= self._terms.stall_s:
            self._end(request_id, f"nothing came for {self._terms.stall_s:g} s: {address} knows no such lease")
        else:  # the producer's worker has not heard of the lease yet
            job.again.append((now_s + _ASK_AGAIN_S, address, chunk))

    def _forget(self, ticket: int) -> None:
        _, address, chunk = self._asked.pop(ticket)
        size_bytes = chunk.size_bytes(self._shape)
        self._asked_bytes -= size_bytes
        if address in self._peers:
            self._peers[address].asked_bytes -= size_bytes

    def _fail(self, request_ids: Iterable[str], error: str) -> None:
        for request_id in list(request_ids):
            self._end(request_id, error)

    def _give_up(self) -> None:
        now_s = self._clock()
        for address, peer in list(self._peers.items()):
            if not peer.asked_bytes:
                if now_s - peer.used_s > _IDLE_S:
                    self._drop(address, peer)
            elif now_s - peer.heard_s >= self._terms.stall_s:
                if peer.socket.get(zmq.EVENTS) & zmq.POLLIN:
                    peer.heard_s = now_s  # what has come and is not read is no silence: this thread is slow
                    continue
                asked = {job.pull.request_id for job, at, _ in self._asked.values() if at == address}
                held_up = {name for name, job in self._jobs.items() if job.todo and job.todo[0][0] == address}
                self._fail(asked | held_up, f"nothing came from {address} for {self._terms.stall_s:g} s")

    def _drop(self, address: str, peer: _Peer) -> None:
        self._poller.unregister(peer.socket)
        self._poller.unregister(peer.monitor)
        _close(peer.socket, peer.monitor)
        del self._peers[address]


def _close(socket: Any, monitor: Any) -> None:  # noqa: ANN401 - sockets, as in `_Peer`
    socket.disable_monitor()
    monitor.close()
    socket.close()
