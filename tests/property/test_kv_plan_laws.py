"""The arithmetic of KV transfers: whatever the splits and block sizes, each element goes where it belongs, exactly once."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import accumulate, pairwise, product

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coral_core.engine.plugin.kv_frames import (
    Data,
    Done,
    FrameError,
    Get,
    Refused,
    Renew,
    answer,
    checksum,
    encode,
    question,
)
from coral_core.engine.plugin.kv_lease import LeaseTable, NoLeaseError
from coral_core.engine.plugin.kv_plan import (
    Chunk,
    Place,
    PlanError,
    Shape,
    Source,
    chunks,
    head_range,
    slots,
    sources,
)

LAYERS, HEADS = 6, 4
SHAPE = Shape(layers=LAYERS, heads=HEADS, content=3, dtype="float32", element_bytes=4)


@st.composite
def engines(draw: st.DrawFn, name: str) -> tuple[Place, ...]:
    """The workers of an engine: any split of the layers into stages, each with a tensor parallelism of its own."""
    cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=4)))
    places = []
    for layers in pairwise([0, *cuts, LAYERS]):
        ranks = draw(st.sampled_from([1, 2, 4, 8]))
        places += [Place(address="", layers=layers, heads=head_range(rank, ranks, HEADS)) for rank in range(ranks)]
    return tuple(msgspec.structs.replace(place, address=f"{name}{number}") for number, place in enumerate(places))


def cells(layers: tuple[int, int], heads: tuple[int, int]) -> list[tuple[int, int]]:
    return list(product(range(*layers), range(*heads)))


@given(engines("p"), engines("c"))
def test_each_consumer_fetches_each_of_its_layers_and_heads_once_from_an_owner(producers, consumers):
    owned = {place.address: set(cells(place.layers, place.heads)) for place in producers}
    fetches, unneeded = sources(producers, consumers)
    takers: Counter[str] = Counter()
    for consumer, own in zip(consumers, fetches, strict=True):
        fetched = Counter(cell for source in own for cell in cells(source.layers, source.heads))
        assert fetched == Counter(cells(consumer.layers, consumer.heads))
        assert all(set(cells(source.layers, source.heads)) <= owned[source.address] for source in own)
        takers.update({source.address for source in own})
    assert {source.address: source.takers for own in fetches for source in own} == dict(takers)
    assert unneeded == owned.keys() - takers.keys()


@given(engines("p"), st.data())
def test_what_nobody_holds_is_named(producers, data):
    gone = data.draw(st.sampled_from(producers))
    left = tuple(place for place in producers if place != gone)
    held = {cell for place in left for cell in cells(place.layers, place.heads)}
    whole = (Place(address="", layers=(0, LAYERS), heads=(0, HEADS)),)
    missing = sorted(set(cells((0, LAYERS), (0, HEADS))) - held)
    if not missing:  # another rank holds the same heads
        sources(left, whole)
        return
    with pytest.raises(PlanError, match=f"layer {missing[0][0]}, KV head {missing[0][1]}"):
        sources(left, whole)


@given(
    st.sampled_from(
        [(ranks, heads) for ranks in range(1, 17) for heads in range(1, 17) if not (heads % ranks and ranks % heads)]
    )
)
def test_ranks_share_the_heads_evenly(case):
    ranks, heads = case
    held = Counter(head for rank in range(ranks) for head in range(*head_range(rank, ranks, heads)))
    assert held.keys() == set(range(heads))
    assert set(held.values()) == {max(1, ranks // heads)}


@given(
    st.tuples(st.integers(0, 4), st.integers(1, 3)),
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(1, 400),
)
def test_chunks_are_small_and_hold_every_token_of_every_layer_once(layers, first, count, chunk_bytes):
    source = Source(address="a", layers=(layers[0], sum(layers)), heads=(1, 3), takers=1)
    pieces = list(chunks(source, first, first + count, SHAPE, chunk_bytes))
    held = Counter((piece.layer, token) for piece in pieces for token in range(piece.first, piece.last))
    assert held == Counter(product(range(*source.layers), range(first, first + count)))
    assert all(piece.size_bytes(SHAPE) <= chunk_bytes or piece.last - piece.first == 1 for piece in pieces)


@st.composite
def tables(draw: st.DrawFn, tokens: int) -> tuple[int, list[int]]:
    """A block size, and the blocks of a request of so many tokens in any order."""
    size = draw(st.sampled_from([1, 2, 3, 5, 8]))
    count = -(-tokens // size)
    return size, draw(st.permutations(range(count + 3)))[:count]


@given(st.data(), st.integers(1, 30))
def test_every_token_arrives_at_its_place_whatever_the_block_sizes(data, tokens):
    (size, blocks), (other_size, other_blocks) = data.draw(tables(tokens)), data.draw(tables(tokens))
    first = data.draw(st.integers(0, tokens - 1))
    source = Source(address="", layers=(0, 1), heads=(0, 1), takers=1)
    here = np.full(size * (len(blocks) + 3), -1)
    here[[blocks[token // size] * size + token % size for token in range(tokens)]] = np.arange(tokens)
    there = np.full(other_size * (len(other_blocks) + 3), -1)
    for piece in chunks(source, first, tokens, SHAPE, data.draw(st.integers(1, 200))):
        there[slots(other_blocks, other_size, piece.first, piece.last)] = here[
            slots(blocks, size, piece.first, piece.last)
        ]
    placed = {
        token: there[other_blocks[token // other_size] * other_size + token % other_size] for token in range(tokens)
    }
    assert placed == {token: token if token >= first else -1 for token in range(tokens)}
    assert (there >= 0).sum() == tokens - first


@given(st.integers(-3, 20), st.integers(-3, 20))
def test_tokens_without_a_block_are_refused(first, last):
    if 0 <= first <= last <= 12:
        assert len(slots([5, 1, 2], 4, first, last)) == last - first
    else:
        with pytest.raises(PlanError):
            slots([5, 1, 2], 4, first, last)


names = st.text(max_size=12)
numbers = st.integers(0, 2**63 - 1)
chunk = st.builds(Chunk, layer=numbers, heads=st.tuples(numbers, numbers), first=numbers, last=numbers)
questions = st.one_of(
    st.builds(Get, ticket=numbers, lease=names, chunk=chunk),
    st.builds(Done, lease=names, taker=names, takers=numbers),
    st.builds(Renew, lease=names),
)
replies = st.one_of(
    st.builds(Data, ticket=numbers, checksum=numbers),
    st.builds(Refused, ticket=numbers, reason=st.sampled_from(["unknown", "ended", "outside"])),
)


@given(questions, replies)
def test_messages_come_back_as_they_went(asked, replied):
    assert question(encode(asked)) == asked
    assert answer(encode(replied)) == replied
    for decode, message in ((answer, asked), (question, replied)):
        with pytest.raises(FrameError):
            decode(encode(message))


@given(st.one_of(st.binary(max_size=2000), questions.map(lambda message: encode(message)[:-1])))
def test_no_bytes_break_the_decoder(junk):
    for decode in (question, answer):
        with suppress(FrameError):
            decode(junk)


@given(st.binary(min_size=1, max_size=300), numbers, st.data())
def test_a_changed_payload_or_ticket_has_another_checksum(payload, ticket, data):
    right = checksum(ticket, payload)
    place = data.draw(st.integers(0, len(payload) - 1))
    changed = bytearray(payload)
    changed[place] ^= data.draw(st.integers(1, 255))
    assert checksum(ticket, bytes(changed)) != right
    assert checksum(ticket ^ 1, payload) != right


class Leases(RuleBasedStateMachine):
    """Against a model: what may end, ends with the next look, once; what may not, does not."""

    def __init__(self) -> None:
        super().__init__()
        self.clock_s = self.now_s = 0.0  # what the machine's clock says; the part of it in which the producer listened
        self.table = LeaseTable(10.0, lambda: self.clock_s)
        self.ends_at_s: dict[str, float] = {}
        self.done: dict[str, set[str]] = {}
        self.reading: dict[str, list] = {}
        self.early: set[str] = set()
        self.ended: set[str] = set()
        self.count = 0

    @rule()
    def grant(self):
        name = str(self.count)
        self.count += 1
        self.table.grant(name, f"request {name}", [1], 5)
        self.ends_at_s[name], self.done[name], self.reading[name] = self.now_s + 10.0, self.early, []
        self.early = set()

    @rule(taker=st.sampled_from("ab"))
    def finish_before_it_is_granted(self, taker):
        self.table.done(str(self.count), taker, 2)
        self.early.add(taker)

    @rule(quarters=st.integers(0, 60))
    def wait(self, quarters):
        for _ in range(quarters):
            self.clock_s += 0.25
            self.now_s += 0.25
            self.table.tick()

    @rule(seconds=st.integers(1, 100))
    def stand_still(self, seconds):
        self.clock_s += seconds
        self.now_s += 1.0
        self.table.tick()

    def over(self, name: str) -> bool:
        return len(self.done[name]) >= 2

    @precondition(lambda self: self.ends_at_s)
    @rule(data=st.data())
    def read(self, data):
        name = data.draw(st.sampled_from(sorted(self.ends_at_s)))
        context = self.table.reading(name)
        if self.over(name):
            with pytest.raises(NoLeaseError, match="ended"):
                context.__enter__()
        else:
            assert context.__enter__().request_id == f"request {name}"
            self.reading[name].append(context)

    @precondition(lambda self: any(self.reading.values()))
    @rule(data=st.data())
    def have_read(self, data):
        name = data.draw(st.sampled_from(sorted(name for name, held in self.reading.items() if held)))
        self.reading[name].pop().__exit__(None, None, None)
        self.ends_at_s[name] = self.now_s + 10.0

    @precondition(lambda self: self.ends_at_s)
    @rule(data=st.data())
    def renew(self, data):
        name = data.draw(st.sampled_from(sorted(self.ends_at_s)))
        self.table.renew(name)
        if not self.over(name):
            self.ends_at_s[name] = self.now_s + 10.0

    @precondition(lambda self: self.ends_at_s)
    @rule(data=st.data(), taker=st.sampled_from("ab"))
    def finish(self, data, taker):
        name = data.draw(st.sampled_from(sorted(self.ends_at_s)))
        self.table.done(name, taker, 2)
        self.done[name].add(taker)

    @rule()
    def look(self):
        due = {
            name
            for name, ends_at_s in self.ends_at_s.items()
            if not self.reading[name] and (self.over(name) or ends_at_s <= self.now_s)
        }
        assert self.table.take_ended() == {f"request {name}" for name in due}
        for name in due:
            del self.ends_at_s[name]
        self.ended |= due

    @invariant()
    def what_ended_stays_so(self):
        assert len(self.table) == len(self.ends_at_s)
        for name in self.ended:
            with pytest.raises(NoLeaseError, match="ended"), self.table.reading(name):
                pass
        with pytest.raises(NoLeaseError, match="unknown"), self.table.reading("never granted"):
            pass


TestLeases = Leases.TestCase


def test_splits_of_a_stated_case():
    """Two producer stages of 4 and 2 layers, three consumer stages of 1, 2 and 3: written out by hand."""
    ends = list(accumulate([0, 1, 2, 3]))
    producers = (
        Place(address="p0", layers=(0, 4), heads=(0, 4)),
        Place(address="p1", layers=(4, 6), heads=(0, 4)),
        Place(address="spare", layers=(4, 6), heads=(0, 4)),
    )
    consumers = tuple(Place(address="", layers=layers, heads=(0, 4)) for layers in pairwise(ends))
    fetches, unneeded = sources(producers, consumers)
    assert [[(source.address, source.layers, source.takers) for source in own] for own in fetches] == [
        [("p0", (0, 1), 3)],
        [("p0", (1, 3), 3)],
        [("p0", (3, 4), 3), ("p1", (4, 6), 1)],
    ]
    assert unneeded == {"spare"}
