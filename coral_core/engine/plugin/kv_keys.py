"""Who may fetch KV blocks: whoever holds the fleet's key file, over CurveZMQ (authenticated and encrypted both ways).

Both key pairs follow from the file's secret, so that one file makes an engine a member. A peer without it cannot finish the
handshake: it does not know the producers' public key, and no other consumer's key is let in. Nothing of it is ever logged.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

KEY_VARIABLE: Final = "CORAL_KV_KEY_FILE"
MIN_SECRET_BYTES: Final = 32
ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"coral-kv"


class KeyFileError(Exception):
    """The key file cannot be used; the message names the file, never what is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    """The two key pairs of a fleet, in Z85."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Let `socket` take consumers of this fleet only; who comes is decided by `admitted`."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.server_public, self.server_secret
        socket.zap_domain = _DOMAIN

    def fetch(self, socket: zmq.Socket[bytes]) -> None:
        """Let `socket` talk to producers of this fleet only."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey, socket.curve_secretkey = self.client_public, self.client_secret

    def admitted(self, request: list[bytes]) -> list[bytes]:
        """The reply to a question of ZeroMQ's authentication protocol (RFC 27): may this client connect?"""
        version, number = (request[0], request[1]) if len(request) > 1 else (b"1.0", b"")
        known = len(request) == 7 and request[2] == _DOMAIN and request[5] == b"CURVE"
        ok = known and request[6] == z85.decode(self.client_public)
        return [version, number, b"200" if ok else b"400", b"" if ok else b"not of this fleet", b"", b""]


def fleet_keys(key_file: str | None) -> FleetKeys:
    """The keys of the file, else of the one that CORAL_KV_KEY_FILE names. KeyFileError."""
    name = key_file or os.environ.get(KEY_VARIABLE)
    if not name:
        raise KeyFileError(f"no key file: set {KEY_VARIABLE}, or key_file in kv_connector_extra_config")
    try:
        secret = Path(name).read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"key file {name}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise KeyFileError(
            f"key file {name} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed (try: openssl rand -hex 32)"
        )
    server, client = _pair(secret, b"coral-kv-server"), _pair(secret, b"coral-kv-client")
    return FleetKeys(server_public=server[0], server_secret=server[1], client_public=client[0], client_secret=client[1])


def _pair(secret: bytes, purpose: bytes) -> tuple[bytes, bytes]:
    own = z85.encode(hashlib.blake2b(secret, digest_size=32, person=purpose).digest())
    return zmq.curve_public(own), own
