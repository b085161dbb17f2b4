"""A producer's worker answers here: it gives chunks of its KV cache to workers of the fleet, in a thread of its own.

Bounded: a chunk is read only while less than `window_bytes` of payload wait to be sent, and no request may be larger than
`chunk_bytes`. What is no message of the protocol is counted and dropped.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from coral_core.engine.plugin.kv_frames import (
    MAX_HEADER_BYTES,
    Data,
    Done,
    FrameError,
    Get,
    Refused,
    checksum,
    encode,
    question,
)
from coral_core.engine.plugin.kv_keys import ZAP_ADDRESS, FleetKeys
from coral_core.engine.plugin.kv_lease import LeaseTable, NoLeaseError
from coral_core.engine.plugin.kv_plan import Chunk, Place, PlanError, Shape, Terms, check_held, slots

logger = logging.getLogger("vllm.coral.kv")
_POLL_MS: Final = 100
_FULL_POLL_MS: Final = 2
_HEARTBEAT_MS: Final = 5000

Read = Callable[[Chunk, npt.NDArray[np.int64]], memoryview]
"""A copy of the elements of a chunk, which lie in these slots."""


class BlockServer:
    """Serves what `leases` allow of a worker's layers and heads; `place` is theirs, and says where they are served."""

    def __init__(
        self,
        *,
        keys: FleetKeys,
        host: str,
        port: int | None,
        terms: Terms,
        place: Place,
        shape: Shape,
        block_size: int,
        leases: LeaseTable,
        read: Read,
    ) -> None:
        self._keys, self._terms, self._leases, self._read = keys, terms, leases, read
        self._shape, self._block_size = shape, block_size
        self._sending: deque[tuple[int, Any]] = deque()
        self._sending_bytes = 0
        self.peak_bytes = 0
        self.counts: Counter[str] = Counter()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.router_mandatory = True
        self._router.maxmsgsize = MAX_HEADER_BYTES
        self._router.linger = 0
        # A peer that stopped reading is cut off, and what waits for it freed.
        self._router.heartbeat_ivl, self._router.heartbeat_timeout = _HEARTBEAT_MS, 6 * _HEARTBEAT_MS
        keys.serve(self._router)
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        if ":" in host:
            self._router.ipv6 = True
        if port is None:
            port = self._router.bind_to_random_port(where)
        else:
            self._router.bind(f"{where}:{port}")
        self.place: Final = msgspec.structs.replace(place, address=f"{where}:{port}")
        self._thread = threading.Thread(target=self._run, name="coral-kv-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                try:
                    self._round(poller)
                except Exception:  # one peer's affair must not become all others'
                    logger.exception("KV transfer: a message was lost")
        finally:
            self._context.destroy(linger=0)

    def _round(self, poller: zmq.Poller) -> None:
        self._leases.tick()
        self._reap()
        full = self._sending_bytes >= self._terms.window_bytes
        poller.modify(self._router, 0 if full else zmq.POLLIN)
        ready = dict(poller.poll(_FULL_POLL_MS if full else _POLL_MS))
        if self._zap in ready:
            self._zap.send_multipart(self._keys.admitted(self._zap.recv_multipart()))
        if self._router in ready:
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(peer, b"".join(frames))

    def _handle(self, peer: bytes, header: bytes) -> None:
        try:
            message = question(header)
        except FrameError as error:
            self.counts["malformed"] += 1
            logger.warning("KV transfer: dropped a malformed message: %s", error)
            return
        match message:
            case Get():
                self._give(peer, message)
            case Done():
                self._leases.done(message.lease, message.taker, message.takers)
            case _:
                self._leases.renew(message.lease)

    def _give(self, peer: bytes, get: Get) -> None:
        chunk = get.chunk
        try:
            with self._leases.reading(get.lease) as lease:
                check_held(chunk, self.place, self._shape, lease.tokens)
                payload = self._read(chunk, slots(lease.block_ids, self._block_size, chunk.first, chunk.last))
        except NoLeaseError as error:
            self._send(peer, Refused(ticket=get.ticket, reason=error.reason), None)
        except Exception as error:  # whatever it is, the others are still served
            logger.warning("KV transfer: refused a chunk: %s", error, exc_info=not isinstance(error, PlanError))
            self._send(peer, Refused(ticket=get.ticket, reason="outside"), None)
        else:
            self._send(peer, Data(ticket=get.ticket, checksum=checksum(get.ticket, payload)), payload)

    def _send(self, peer: bytes, header: Data | Refused, payload: memoryview | None) -> None:
        try:
            if payload is None:
                self._router.send_multipart([peer, encode(header)], zmq.NOBLOCK)
                return
            tracker = self._router.send_multipart([peer, encode(header), payload], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError:  # it left; or it asked for more than it may, and will find its transfer stalled
            self.counts["unreachable"] += 1
            return
        self._sending.append((len(payload), tracker))
        self._sending_bytes += len(payload)
        self.peak_bytes = max(self.peak_bytes, self._sending_bytes)

    def _reap(self) -> None:
        still = [(size, tracker) for size, tracker in self._sending if not tracker.done]
        if len(still) != len(self._sending):
            self._sending = deque(still)
            self._sending_bytes = sum(size for size, _ in still)
