"""The ZeroMQ adapter: a coordinator's and an agent's end, CURVE on both, queues and messages bounded."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from coral_core.errors import InputError, ServingError
from coral_core.serving.control.curve import AllowedKeys, KeyPair, read_private
from coral_core.serving.control.messages import MOST_BYTES

_QUEUE: Final = 64
"""Messages per peer; a full queue drops the newest, and whatever was dropped is said again."""
_DOMAIN: Final = b"coral"


def new_pair() -> tuple[str, str]:
    """A new CURVE pair (public, secret) in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


def public_of(secret: str) -> str:
    """The public key that belongs to a secret one."""
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")


def read_matching(path: Path) -> KeyPair:
    """The pair in a private file, whose halves belong together: others shake hands for ever. Raises InputError."""
    pair = read_private(path)
    if public_of(pair.secret) != pair.public:
        fix = "take the file as `coral keys new` made it"
        raise InputError("its public key does not belong to its secret one", where=str(path), fix=fix)
    return pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message as it came: by which connection, with whose public key."""

    connection: bytes
    key: str
    frames: list[bytes]


@dataclass(slots=True)
class _Doorkeeper:
    """ZAP: lets in whom the list names, and counts whom it does not."""

    allowed: AllowedKeys
    refused: Counter[str] = field(default_factory=Counter)

    def callback(self, _domain: str, key: bytes) -> bool:
        public = key.decode("ascii", "replace")
        known = self.allowed.name_of(public) is not None
        if not known and (public in self.refused or len(self.refused) < 1000):
            self.refused[public] += 1
        return known


class CoordinatorEnd:
    """Where agents connect. ServingError where the address cannot be had."""

    def __init__(self, host: str, port: int, pair: KeyPair, allowed: AllowedKeys) -> None:
        """Bind `host`:`port`; port 0 is any free one, told by `endpoint`. Must be made in a running event loop."""
        self.dropped = 0
        self._context = zmq.asyncio.Context()
        self._door = _Doorkeeper(allowed)
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=_DOMAIN.decode(), credentials_provider=self._door)
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket)
        self._socket.ipv6 = ":" in host
        self._socket.zap_domain = _DOMAIN
        self._socket.curve_server = True
        self._socket.curve_publickey = pair.public.encode("ascii")
        self._socket.curve_secretkey = pair.secret.encode("ascii")
        self._socket.router_mandatory = True
        where = f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"
        try:
            self._socket.bind(where)
        except zmq.ZMQError as error:
            self.close()
            raise ServingError(
                f"cannot listen: {error.strerror}", where=where, fix="is another there already?"
            ) from None
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def refused_keys(self) -> int:
        """Connections refused because of their key, so far."""
        return self._door.refused.total()

    async def receive(self, within_s: float) -> Received | None:
        """The next message, or None after `within_s`."""
        if not await self._socket.poll(max(0, round(within_s * 1000))):
            return None
        parts = await self._socket.recv_multipart(copy=False)
        try:
            key = parts[-1].get("User-Id")
        except zmq.ZMQError:
            key = ""
        return Received(connection=parts[0].bytes, key=str(key), frames=[part.bytes for part in parts[1:]])

    def send(self, connection: bytes, frames: list[bytes]) -> None:
        """Send, or count as dropped where the peer is gone or does not read."""
        try:
            zmq.Socket.shadow(self._socket).send_multipart([connection, *frames], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped += 1

    def close(self) -> None:
        """Let go of the address."""
        self._authenticator.stop()
        self._context.destroy(linger=100)


class AgentEnd:
    """An agent's connection, made anew by ZeroMQ as often as it breaks."""

    def __init__(self, endpoint: str, pair: KeyPair) -> None:
        """Connect; nobody need be there yet."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _bound(self._socket)
        self._socket.immediate = True  # what is said while nobody is there is not kept: it would be old news
        self._socket.reconnect_ivl = 200
        self._socket.reconnect_ivl_max = 2000
        self._socket.ipv6 = "[" in endpoint
        self._socket.curve_serverkey = pair.server.encode("ascii")
        self._socket.curve_publickey = pair.public.encode("ascii")
        self._socket.curve_secretkey = pair.secret.encode("ascii")
        self._socket.connect(endpoint)

    async def receive(self, within_s: float) -> list[bytes] | None:
        """The next message's frames, or None after `within_s`."""
        if not await self._socket.poll(max(0, round(within_s * 1000))):
            return None
        return [bytes(part) for part in await self._socket.recv_multipart()]

    def send(self, frames: list[bytes]) -> bool:
        """Send; False where nobody is there to take it."""
        with contextlib.suppress(zmq.ZMQError):
            zmq.Socket.shadow(self._socket).send_multipart(frames, flags=zmq.NOBLOCK)
            return True
        return False

    def close(self) -> None:
        """Disconnect; what was said last still goes out."""
        self._context.destroy(linger=200)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bound(socket: zmq.asyncio.Socket) -> None:
    """Bounded queues and messages, and a peer that is gone noticed."""
    socket.linger = 100
    socket.sndhwm = socket.rcvhwm = _QUEUE
    socket.maxmsgsize = MOST_BYTES
    socket.heartbeat_ivl = 2000
    socket.heartbeat_timeout = 10000
    socket.handshake_ivl = 5000
