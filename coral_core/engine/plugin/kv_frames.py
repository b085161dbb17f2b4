"""The messages between a worker that holds KV blocks and one that fetches them: MessagePack, one header frame each.

A reply to `Get` has the payload as its second frame: elements in the order [token, head, content], as the cache has them.
Pure: imports neither the engine nor zmq.
"""

from __future__ import annotations

import zlib
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from coral_core.engine.plugin.kv_plan import Chunk

MAX_HEADER_BYTES: Final = 1024


class FrameError(Exception):
    """Bytes that are no message of this protocol."""


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get", forbid_unknown_fields=True):
    """Asks for a chunk under a lease; the reply carries the same ticket. Renews the lease."""

    ticket: int
    lease: str
    chunk: Chunk


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done", forbid_unknown_fields=True):
    """One of `takers` workers needs no more under this lease; `takers` 0: nobody needs anything."""

    lease: str
    taker: str
    takers: int


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew", forbid_unknown_fields=True):
    """Somebody still means to fetch under this lease."""

    lease: str


class Data(msgspec.Struct, frozen=True, kw_only=True, tag="data", forbid_unknown_fields=True):
    """Heads a payload."""

    ticket: int
    checksum: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused", forbid_unknown_fields=True):
    """Instead of a payload. `unknown`: not yet, perhaps; `ended`: the lease is over; `outside`: not held here."""

    ticket: int
    reason: Literal["unknown", "ended", "outside"]


Question: TypeAlias = Get | Done | Renew
Answer: TypeAlias = Data | Refused
_Message = TypeVar("_Message")

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Get | Done | Renew)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Data | Refused)


def encode(message: Question | Answer) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def question(header: bytes | memoryview) -> Question:
    """What a fetching worker sent; FrameError if it is not one of the three."""
    return _decoded(_questions, header)


def answer(header: bytes | memoryview) -> Answer:
    """What a holding worker sent; FrameError if it is not one of the two."""
    return _decoded(_answers, header)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], header: bytes | memoryview) -> _Message:
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"a header of {len(header)} bytes")
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(str(error)[:200]) from None


def checksum(ticket: int, payload: bytes | memoryview) -> int:
    """CRC-32 of the payload, begun with its ticket, so that a payload under another's header does not pass either."""
    return zlib.crc32(payload, ticket & 0xFFFFFFFF)
