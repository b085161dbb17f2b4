"""Which worker's KV cache goes to which worker, and in what pieces.

Data: the workers of both engines with the layers and KV heads that each holds (half-open ranges), the blocks of a request
on its own engine, and the tokens to fetch. Block sizes and splits of the two engines are independent of each other: what
they share is the position of a token in the prompt, the number of a layer and the number of a head in the model.
Pure: imports neither the engine nor torch.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

MAX_CHUNK_BYTES: Final = 16 << 20
VERSION: Final = 1
"""Of the protocol; engines of different versions do not exchange KV caches."""

_ADDRESS: Final = re.compile(r"tcp://(?:\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})")

Range: TypeAlias = tuple[int, int]


class PlanError(Exception):
    """A transfer that cannot be; the message says why."""


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `kv_connector_extra_config` may say. PlanError where a value makes no sense.

    `first_port`: the worker of rank r listens there + r; None takes free ports. `lease_s`: how long a producer keeps blocks
    that nobody asks for. `stall_s`: a consumer gives a transfer up after so long without a byte of it.
    `window_bytes` bounds what is in flight at each worker, `chunk_bytes` one message.
    """

    key_file: str | None = None
    host: str | None = None
    first_port: int | None = None
    lease_s: float = 30.0
    stall_s: float = 15.0
    chunk_bytes: int = 4 << 20
    window_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not (0 < self.lease_s < float("inf") and 0 < self.stall_s < float("inf")):
            raise PlanError(f"lease_s {self.lease_s} and stall_s {self.stall_s} must be above 0 and finite")
        if not 1024 <= self.chunk_bytes <= min(self.window_bytes, MAX_CHUNK_BYTES):
            raise PlanError(
                f"chunk_bytes {self.chunk_bytes} must be from 1024 to {MAX_CHUNK_BYTES} and at most window_bytes {self.window_bytes}"
            )
        if self.first_port is not None and not 1 <= self.first_port <= 65535:
            raise PlanError(f"first_port {self.first_port} is no port")


def terms(extra_config: dict[str, Any]) -> Terms:
    """`kv_connector_extra_config`, checked; PlanError names what is wrong with it."""
    try:
        return msgspec.convert(extra_config, Terms)
    except msgspec.ValidationError as error:
        raise PlanError(f"kv_connector_extra_config: {error}") from None


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on both sides: `content` elements of `dtype` per token, layer and head."""

    layers: int
    heads: int
    content: int
    dtype: str
    element_bytes: int


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: where it answers ("" if it only fetches), and the layers and heads that it holds."""

    address: str
    layers: Range
    heads: Range


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer keeps for whoever has this: `tokens` of a prompt, under a lease, at the workers that computed them."""

    version: int
    lease: str
    lease_s: float
    tokens: int
    prompt: str
    shape: Shape
    places: tuple[Place, ...]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a worker's fetch: a rectangle of layers and heads at one address, from which `takers` workers fetch."""

    address: str
    layers: Range
    heads: Range
    takers: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens `[first, last)` of one layer and a range of heads."""

    layer: int
    heads: Range
    first: int
    last: int

    def size_bytes(self, shape: Shape) -> int:
        """What its elements take on the way."""
        return (self.last - self.first) * (self.heads[1] - self.heads[0]) * shape.content * shape.element_bytes


def offered(params: dict[str, Any] | None) -> Offer:
    """The offer in `kv_transfer_params`; PlanError where there is none that this version can use."""
    given = (params or {}).get("coral")
    if given is None:
        raise PlanError("kv_transfer_params has no part 'coral': the prefill engine runs another KV connector")
    try:
        offer = msgspec.convert(given, Offer)
    except msgspec.ValidationError as error:
        raise PlanError(f"kv_transfer_params.coral: {error}") from None
    if offer.version != VERSION:
        raise PlanError(f"the prefill engine speaks version {offer.version} of the KV protocol, this one {VERSION}")
    if not 0.1 <= offer.lease_s < float("inf"):
        raise PlanError(f"kv_transfer_params.coral: a lease of {offer.lease_s} s")
    for place in offer.places:
        found = _ADDRESS.fullmatch(place.address)
        if found is None or not 1 <= int(found[1]) <= 65535:
            raise PlanError(f"kv_transfer_params.coral: {place.address[:80]!r} is no address of a worker")
    return offer


def head_range(rank: int, ranks: int, heads: int) -> Range:
    """The KV heads of a tensor-parallel rank: a slice, or, where ranks outnumber heads, the one it shares with others."""
    if ranks <= heads:
        return rank * (heads // ranks), (rank + 1) * (heads // ranks)
    own = rank // (ranks // heads)
    return own, own + 1


def overlap(one: Range, other: Range) -> Range:
    """What both ranges hold; empty (first >= last) where they have nothing in common."""
    return max(one[0], other[0]), min(one[1], other[1])


@lru_cache(maxsize=256)
def sources(
    producers: tuple[Place, ...], consumers: tuple[Place, ...]
) -> tuple[tuple[tuple[Source, ...], ...], frozenset[str]]:
    """For each consumer where it fetches its layers and heads, each once; and the addresses from which nobody fetches.

    PlanError where nobody holds a layer or head that a consumer needs.
    """
    parts = [_cover(consumer, producers) for consumer in consumers]
    takers = Counter(address for own in parts for address, _, _ in own)
    fetches = tuple(
        tuple(
            Source(address=address, layers=layers, heads=heads, takers=takers[address])
            for address, layers, heads in own
        )
        for own in parts
    )
    return fetches, frozenset(place.address for place in producers) - takers.keys()


def _cover(mine: Place, producers: Sequence[Place]) -> list[tuple[str, Range, Range]]:
    parts = []
    missing = set(product(range(*mine.layers), range(*mine.heads)))
    for place in producers:
        layers, heads = overlap(mine.layers, place.layers), overlap(mine.heads, place.heads)
        cells = set(product(range(*layers), range(*heads)))
        if cells & missing:  # else nothing in common, or a replica of heads that another worker gives
            missing -= cells
            parts.append((place.address, layers, heads))
    if missing:
        layer, head = min(missing)
        raise PlanError(f"no worker of the prefill engine holds layer {layer}, KV head {head}")
    return parts


def chunks(source: Source, first: int, last: int, shape: Shape, chunk_bytes: int) -> Iterator[Chunk]:
    """The tokens `[first, last)` of a source, layer by layer, in pieces of at most `chunk_bytes` (at least one token)."""
    token_bytes = Chunk(layer=0, heads=source.heads, first=0, last=1).size_bytes(shape)
    step = max(1, chunk_bytes // token_bytes)
    for layer in range(*source.layers):
        for start in range(first, last, step):
            yield Chunk(layer=layer, heads=source.heads, first=start, last=min(start + step, last))


def check_held(chunk: Chunk, place: Place, shape: Shape, tokens: int) -> None:
    """PlanError unless a worker at `place` has this chunk of a prompt of so many tokens, and it is not too much at once."""
    within = (
        ((chunk.layer, chunk.layer + 1), place.layers),
        (chunk.heads, place.heads),
        ((chunk.first, chunk.last), (0, tokens)),
    )
    if not all(whole[0] <= part[0] < part[1] <= whole[1] for part, whole in within):
        raise PlanError(f"{chunk} is not within {tokens} tokens of layers {place.layers}, KV heads {place.heads}")
    if chunk.size_bytes(shape) > MAX_CHUNK_BYTES:
        raise PlanError(f"{chunk.size_bytes(shape)} bytes at once, at most {MAX_CHUNK_BYTES} are given")


def slots(block_ids: Sequence[int], block_size: int, first: int, last: int) -> npt.NDArray[np.int64]:
    """Where the tokens `[first, last)` of a request lie: block number x block size + place in the block; [last - first].

    PlanError where the request has no block for one of them.
    """
    if not 0 <= first <= last <= len(block_ids) * block_size:
        raise PlanError(f"tokens {first} to {last} are not within {len(block_ids)} blocks of {block_size} tokens")
    tokens = np.arange(first, last, dtype=np.int64)
    return np.asarray(block_ids, dtype=np.int64)[tokens // block_size] * block_size + tokens % block_size


def prompt_digest(token_ids: Sequence[int], *others: str) -> str:
    """Equal for equal prompts only; `others`: what else the KV cache depends on (adapter, images)."""
    digest = hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes())
    for other in others:
        digest.update(b"\0" + other.encode())
    return digest.hexdigest()[:32]
