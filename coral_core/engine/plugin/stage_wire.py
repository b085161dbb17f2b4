"""Messages between the engine and the nodes of its stages, and activations from node to node: ZeroMQ over TCP.

The one place that knows the transport. The engine binds a ROUTER, nodes come with a DEALER; each node binds a PULL for
activations, nodes of the stage before push to it. What one peer sends to another arrives in the order sent. Where GPUs are
linked by more than TCP, `Inbox` and `Outbox` are what another transport (NCCL send and receive) would replace.
Both ends hold the fleet's key (CurveZMQ); without one, loopback only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
import torch
import zmq

from coral_core.clock import ListeningClock
from coral_core.engine.plugin.kv_keys import ZAP_ADDRESS, FleetKeys, fleet_keys
from coral_core.engine.plugin.stage_layout import LayoutError, is_loopback

logger = logging.getLogger("vllm.coral.stage")
BEAT_S: Final = 0.5
ENGINE_SILENCE_S: Final = 20.0
ENGINE_GONE: Final = 3
"""How a node exits whose engine has not answered for so long, while the node was there to hear it."""
START_SILENCE_S: Final = 120.0
"""Of a node that imports and loads: libraries being loaded hold up its other threads."""
_BEATS: Final = b"~"
"""Before a node's name: who only says that the node lives."""
_TICK_MS: Final = 100
_KEEP_ALIVE_S: Final = 30
"""After so long without a message the kernel speaks: firewalls between clouds forget connections that say nothing for minutes."""
_DTYPES: Final = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}

Message: TypeAlias = tuple[Any, ...]
"""A word for what it is, then whatever belongs to it; pickled, hence from members of the fleet only."""


def keys_for(host: str, key_file: str | None) -> FleetKeys | None:
    """The fleet's keys; None on loopback without a key file. LayoutError, KeyFileError."""
    if key_file:
        return fleet_keys(key_file)
    if not is_loopback(host):
        raise LayoutError(f"{host} is no loopback address: nodes over a network need key_file")
    return None


class Wire:
    """A ZeroMQ context that lets in members of the fleet only."""

    def __init__(self, keys: FleetKeys | None) -> None:
        self._keys = keys
        self.context = zmq.Context()
        if keys is not None:
            zap = self.context.socket(zmq.REP)
            zap.bind(ZAP_ADDRESS)
            threading.Thread(target=self._admit, args=(zap, keys), name="coral-stage-zap", daemon=True).start()

    def bound(self, kind: int, host: str, port: int, *, clear: bool = False) -> tuple[zmq.Socket[bytes], str]:
        """A socket that listens, and its address; `clear`: anybody may come."""
        socket = self._socket(kind, host)
        if self._keys is not None and not clear:
            self._keys.serve(socket)
        if port:
            socket.bind(f"tcp://{host}:{port}")
        else:
            port = socket.bind_to_random_port(f"tcp://{host}")
        return socket, f"tcp://{host}:{port}"

    def connected(
        self, kind: int, address: str, identity: bytes | None = None, *, clear: bool = False
    ) -> zmq.Socket[bytes]:
        """A socket that talks to whoever listens at the address, under a name of its own if given."""
        socket = self._socket(kind, address)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        if self._keys is not None and not clear:
            self._keys.fetch(socket)
        socket.connect(address)
        return socket

    def _socket(self, kind: int, where: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(kind)
        socket.ipv6 = "[" in where
        socket.linger = 0
        socket.set_hwm(0)  # bounded by the requests in flight
        socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, _KEEP_ALIVE_S, _KEEP_ALIVE_S
        return socket

    @staticmethod
    def _admit(zap: zmq.Socket[bytes], keys: FleetKeys) -> None:
        while True:
            try:
                zap.send_multipart(keys.admitted(zap.recv_multipart()))
            except zmq.ContextTerminated:
                return


class Hub:
    """The engine's end. Reads in a thread of its own, so that a silent node is noticed while the engine idles.

    `nodes`: who is expected; nobody else is heard. Of `silence_s` only the time counts in which this end was there to listen. `events` get (node, message) in the order each node sent them; a node lost gives (node, ("lost", reason)), once.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        keys: FleetKeys | None,
        nodes: Iterable[str],
        silence_s: float,
        on_lost: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listened_s = ListeningClock(clock)
        self.events: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self.silence_s, self._on_lost = silence_s, on_lost
        self._expected = frozenset(nodes)
        self._wire = Wire(keys)
        self._router, self.address = self._wire.bound(zmq.ROUTER, host, port)
        self._router.router_mandatory = True  # sending to a peer that is gone fails at once
        self._outgoing: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = self._pair()
        self._heard: dict[str, float] = {}
        self._beating: set[str] = set()
        self._lost: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coral-stage-hub", daemon=True)
        self._thread.start()

    def send(self, node: str, *message: object) -> None:
        """Messages arrive in the order sent."""
        self._outgoing.put((node, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)))
        self._wake_in.send(b"")

    def close(self) -> None:
        """Tell the nodes to end, and stop reading."""
        for node in list(self._heard):
            self.send(node, "stop")
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        sender, receiver = self._wire.context.socket(zmq.PAIR), self._wire.context.socket(zmq.PAIR)
        receiver.bind("inproc://hub")
        sender.connect("inproc://hub")
        return sender, receiver

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        probed = 0.0
        while not self._closing.is_set() or not self._outgoing.empty():
            ready = dict(poller.poll(_TICK_MS))
            if self._wake_out in ready:
                self._wake_out.recv()
            while not self._outgoing.empty():
                node, payload = self._outgoing.get()
                self._pass(node.encode(), payload)
            while self._router in ready:
                try:
                    identity, payload = self._router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(identity, payload)
            # After what has come was read: else who spoke during a pause would be judged unheard.
            if self._listened_s() - probed > BEAT_S:
                probed = self._listened_s()
                self._probe()
        time.sleep(0.1)  # lets what was sent last leave
        self._router.close()

    def _take(self, identity: bytes, payload: bytes) -> None:
        node = identity.removeprefix(_BEATS).decode(errors="replace")  # ZeroMQ makes up names of any bytes
        if node in self._lost or node not in self._expected:
            return
        self._heard[node] = self._listened_s()
        if identity.startswith(_BEATS):
            self._beating.add(node)
            return
        try:
            message = pickle.loads(payload)  # noqa: S301 - from a member of the fleet
        except Exception as error:  # noqa: BLE001 - bytes may fail to be a message in any way
            self._lose(node, f"what it sent is no message: {type(error).__name__}: {error}")
            return
        if message[0] == "failed":
            logger.error("stage node %s: %s", node, message[1])
            self._lose(node, message[1].strip().rsplit("\n", 1)[-1])
        else:
            self.events.put((node, message))

    def _pass(self, identity: bytes, payload: bytes) -> None:
        node = identity.removeprefix(_BEATS).decode()
        if node in self._lost:
            return
        try:
            self._router.send_multipart([identity, payload])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(node, "its connection ended")

    def _probe(self) -> None:
        late = self._listened_s() - self.silence_s
        for node, heard in list(self._heard.items()):
            if node in self._beating:
                self._pass(_BEATS + node.encode(), b"")
            if heard < late and node not in self._lost:
                self._lose(node, f"not heard of for {self.silence_s:.0f} s")

    def _lose(self, node: str, reason: str) -> None:
        self._lost.add(node)
        self._on_lost(node, reason)
        self.events.put((node, ("lost", reason)))


class Link:
    """A node's end of one thread: `receive` gives the engine's messages. Another thread tells the engine that the node lives."""

    def __init__(self, *, wire: Wire, address: str, name: str) -> None:
        self.socket = wire.connected(zmq.DEALER, address, name.encode())
        beats = wire.connected(zmq.DEALER, address, _BEATS + name.encode())
        threading.Thread(target=self._beat, args=(beats,), name="coral-stage-beat", daemon=True).start()

    def send(self, *message: object) -> None:
        """To the engine, where messages arrive in the order sent."""
        self.socket.send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Message | None:
        """The next message; None where none has come."""
        try:
            payload = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return pickle.loads(payload)  # type: ignore[no-any-return]  # noqa: S301 - from a member of the fleet

    @staticmethod
    def _beat(beats: zmq.Socket[bytes]) -> None:
        """Steps that take long do not hold this up: torch and sleeps leave Python to other threads. Ends the process after its engine."""
        listened_s = ListeningClock(time.monotonic)
        heard = None
        while True:
            beats.send(b"")
            time.sleep(BEAT_S)
            now = listened_s()
            while beats.poll(0):
                beats.recv()
                heard = now
            if heard is not None and now - heard > ENGINE_SILENCE_S:
                os._exit(ENGINE_GONE)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Heads activations: for each (step, request) its number of rows, in order; the tensors' names, type and row shapes."""

    parts: list[tuple[int, str, int]]
    tensors: list[tuple[str, str, list[int]]]
    sent_at: float


Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(slots=True)
class Hop:
    """What was measured of activations that came in: `seconds` from sending to having read them, clocks as they are."""

    messages: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Inbox:
    """Activations that came, by step and request. With a `secret`, what is not signed by it has not come."""

    socket: zmq.Socket[bytes]
    secret: bytes = field(default=b"", repr=False)
    rows: dict[tuple[int, str], Tensors] = field(default_factory=dict)
    _dropped: set[tuple[int, str]] = field(default_factory=set)
    hop: Hop = field(default_factory=Hop)

    def read(self) -> None:
        """Take in what has come."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if self.secret and not hmac.compare_digest(_signature(self.secret, frames[1:]), frames.pop(0).bytes):
                continue
            head = msgspec.msgpack.decode(frames[0].buffer, type=Rows)
            tensors = {
                name: torch.frombuffer(bytearray(frame.buffer), dtype=_DTYPES[dtype]).view(-1, *shape)
                for (name, dtype, shape), frame in zip(head.tensors, frames[1:], strict=True)
            }
            first = 0
            for step, request_id, count in head.parts:
                if (step, request_id) not in self._dropped:
                    self.rows[step, request_id] = {name: rows[first : first + count] for name, rows in tensors.items()}
                first += count
            self.hop.messages += 1
            self.hop.payload_bytes += sum(len(frame.buffer) for frame in frames[1:])
            self.hop.seconds += time.time() - head.sent_at

    def drop(self, keys: Iterable[tuple[int, str]]) -> None:
        """Rows under these keys will not be asked for, have they come or not."""
        for key in keys:
            self._dropped.add(key)
            self.rows.pop(key, None)


class Outbox:
    """Sends activations to the nodes of the next stage."""

    def __init__(self, wire: Wire, addresses: dict[str, str], secret: bytes = b"") -> None:
        self._secret = secret
        self._sockets = {
            name: wire.connected(zmq.PUSH, address, clear=bool(secret)) for name, address in addresses.items()
        }

    def send(self, node: str, parts: Sequence[tuple[int, str, int]], tensors: Tensors) -> None:
        """`tensors` hold the parts' rows one after another."""
        if node not in self._sockets:
            return  # lost: the engine has failed its requests
        host = {name: rows.contiguous().cpu() for name, rows in tensors.items()}
        head = Rows(
            parts=list(parts),
            tensors=[(name, str(rows.dtype), list(rows.shape[1:])) for name, rows in host.items()],
            sent_at=time.time(),
        )
        payload = [rows.view(torch.uint8).numpy().data for rows in host.values()]
        frames = [memoryview(msgspec.msgpack.encode(head)), *payload]
        signature = [_signature(self._secret, frames)] if self._secret else []
        self._sockets[node].send_multipart([*signature, *frames])

    def drop(self, node: str) -> None:
        """Send the node no more."""
        if socket := self._sockets.pop(node, None):
            socket.close(linger=0)


def _signature(secret: bytes, frames: Iterable[Any]) -> bytes:
    digest = hashlib.blake2b(key=secret, digest_size=32)
    for frame in frames:
        view = memoryview(frame)
        digest.update(view.nbytes.to_bytes(8, "big"))
        digest.update(view)
    return digest.digest()


def wait_for(sockets: Sequence[zmq.Socket[bytes]], timeout_s: float) -> None:
    """Return when a socket has something to read, or after the time."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    poller.poll(int(timeout_s * 1000))
