"""Laws of the gateway's pure parts: the limiter never gives too much, the table never routes where it must not."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coral_core.domain.workload import Phase, Slo
from coral_core.serving.keys import KeyRecord, KeyRing, hash_key, new_key
from coral_core.serving.limits import KeyLimiter, KeyTerms, TokenBucket
from coral_core.serving.refusals import RefusedError
from coral_core.serving.sse import BrokenStreamError, EventRelay
from coral_core.serving.table import InstanceSpec, ModelTerms, RoutingTable
from coral_core.serving.waiting import Waiting

GAPS = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=1, max_size=60)
TERMS = ModelTerms(name="m", slo=Slo(ttft_s=1.0, tpot_s=0.1), mean_input_tokens=100.0, mean_output_tokens=50.0)


@given(GAPS, st.floats(0.01, 100), st.floats(1, 20))
def test_no_stretch_of_time_gets_more_than_burst_and_rate_allow(gaps, rate, burst):
    bucket = TokenBucket(rate_per_s=rate, burst=burst)
    now_s, taken = 0.0, []
    for gap in gaps:
        now_s += gap
        while bucket.take(now_s):
            taken.append(now_s)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - taken[first]) + 1e-6


@given(GAPS, st.floats(0.01, 100), st.floats(1, 20))
def test_who_comes_back_when_told_gets_one_and_not_before(gaps, rate, burst):
    bucket = TokenBucket(rate_per_s=rate, burst=burst)
    now_s = 0.0
    for gap in gaps:
        now_s += gap
        while bucket.take(now_s):
            pass
        wait_s = bucket.wait_s(now_s)
        assert 0 < wait_s <= 1 / rate * (1 + 1e-9)
        assert not bucket.take(now_s + wait_s * 0.99)
        now_s += wait_s
        assert bucket.take(now_s)


@given(st.lists(st.booleans(), max_size=50), st.integers(1, 5))
def test_never_more_at_once_than_a_key_may(steps, most):
    limiter = KeyLimiter(KeyTerms(concurrent_requests=most))
    running = 0
    for enters in steps:
        if enters:
            if running < most:
                limiter.enter(0.0)
                running += 1
            else:
                with pytest.raises(RefusedError, match="as many as it may"):
                    limiter.enter(0.0)
        elif running:
            limiter.leave()
            running -= 1
        assert limiter.running == running <= most


@given(st.integers(1, 30), st.data())
def test_every_key_finds_its_own_limiter_and_no_other_key_any(count, data):
    keys = [new_key() for _ in range(count)]
    ring = KeyRing(
        KeyRecord(name=str(n), key_hash=hash_key(key), terms=KeyTerms(requests_per_s=n + 1.0))
        for n, key in enumerate(keys)
    )
    chosen = data.draw(st.integers(0, count - 1))
    assert ring.limiter(f"Bearer {keys[chosen]}".encode()).terms.requests_per_s == chosen + 1.0
    for wrong in (new_key(), keys[chosen][:-1], keys[chosen] + "x", hash_key(keys[chosen])):
        with pytest.raises(RefusedError):
            ring.limiter(f"Bearer {wrong}".encode())


def piece(text: str, reason: str | None, index: int) -> bytes:
    choice = {"index": index, "finish_reason": reason, "text": text}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@st.composite
def streams(draw):
    """The events of a whole answer with one to three choices, finished in any order."""
    choices = draw(st.integers(1, 3))
    events = [
        piece(draw(st.text(max_size=5)), None, draw(st.integers(0, choices - 1)))
        for _ in range(draw(st.integers(0, 6)))
    ]
    events += [piece("", draw(st.sampled_from(["stop", "length", "tool_calls"])), n) for n in range(choices)]
    return choices, events


@given(streams(), st.data())
def test_however_the_bytes_come_the_same_events_go(stream, data):
    choices, events = stream
    whole = b"".join([*events, b"data: [DONE]\n\n"])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    relay, passed = EventRelay(passes_usage=False, choices=choices), []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        given_on = relay.feed(whole[start:end])
        assert given_on.endswith(b"\n\n") or not given_on
        passed.append(given_on)
    assert (b"".join(passed), relay.done) == (whole, True)


@given(streams(), st.data())
def test_an_answer_that_stops_anywhere_before_its_end_is_never_taken_for_whole(stream, data):
    choices, events = stream
    relay = EventRelay(passes_usage=False, choices=choices)
    kept = data.draw(st.integers(0, len(events) - 1))
    cut = b"".join(events[:kept])
    relay.feed(cut)
    with pytest.raises(BrokenStreamError):
        relay.end()
    with pytest.raises(BrokenStreamError):
        relay.feed(b"data: [DONE]\n\n")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_over_a_whole_cycle_each_instance_gets_its_share(weights):
    table = RoutingTable([TERMS])
    for n, weight in enumerate(weights):
        spec = InstanceSpec(name=f"i{n}", model="m", phase=Phase.AGGREGATED, url="http://h:1", weight=float(weight))
        table.probed(table.register(spec), answers=True, now_s=0.0)
    got = Counter(table.first("m").spec.name for _ in range(sum(weights)))
    assert [got[f"i{n}"] for n in range(len(weights))] == weights


@given(
    st.floats(0.1, 10), st.floats(0.05, 5), st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=40)
)
def test_nobody_is_let_into_a_queue_longer_than_the_slo_allows(rate, ttft_s, steps):
    terms = ModelTerms(name="m", slo=Slo(ttft_s=ttft_s, tpot_s=1.0), mean_input_tokens=1.0, mean_output_tokens=1.0)
    table = RoutingTable([terms])
    spec = InstanceSpec(name="i", model="m", phase=Phase.AGGREGATED, url="http://h:1", weight=rate)
    table.probed(table.register(spec), answers=True, now_s=0.0)
    waiting, inside, now_s = Waiting(table.pools["m"], unknown_s=1.0), [], 0.0
    for comes, gap in steps:
        now_s += gap
        before = len(inside)
        if comes:
            if Fraction(max(before - 1, 0)) <= Fraction(ttft_s) * Fraction(rate):
                inside.append(waiting.admit(now_s))
            elif max(before - 1, 0) > ttft_s * rate * (1 + 1e-9):
                with pytest.raises(RefusedError) as refused:
                    waiting.admit(now_s)
                # Once as many have been heard as are done in that time, one more fits.
                assert max(before - 1, 0) - refused.value.retry_after_s * rate == pytest.approx(ttft_s * rate)
        elif inside:
            ticket = inside.pop()
            ticket.heard()
            ticket.heard()
        assert table.pools["m"].unheard == len(inside)


class Fleet(RuleBasedStateMachine):
    """Instances come, go, fail and drain in any order; what the table picks is always able to serve."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RoutingTable([TERMS], eject_s=5.0, eject_after=2)
        self.now_s = 0.0

    names = st.sampled_from([f"i{n}" for n in range(6)])

    @rule(
        name=names,
        phase=st.sampled_from(list(Phase)),
        region=st.sampled_from(["east", "west"]),
        weight=st.sampled_from([0.0, 1.0, 50.0]),
    )
    def register(self, name, phase, region, weight):
        spec = InstanceSpec(name=name, model="m", phase=phase, url="http://h:1", region=region, weight=weight)
        member = self.table.register(spec)
        assert self.table.register(spec) is member

    @rule(name=names)
    def remove(self, name):
        self.table.remove(name)
        assert self.table.find(name) is None
        assert self.table.drain(name)

    @rule(name=names, weight=st.sampled_from([0.0, 2.0, 7.5]))
    def weigh(self, name, weight):
        if self.table.find(name) or weight == 0:
            self.table.set_weight(name, weight)

    @rule(name=names)
    def drain(self, name):
        self.table.drain(name)

    @rule(name=names, answers=st.booleans())
    def probe(self, name, answers):
        self.now_s += 1.0
        if member := self.table.find(name):
            self.table.probed(member, answers=answers, now_s=self.now_s)

    @rule(name=names, gone=st.booleans())
    def fail(self, name, gone):
        if member := self.table.find(name):
            self.table.failed(member, gone=gone, now_s=self.now_s)

    @rule(name=names, ready=st.booleans())
    def report(self, name, ready):
        if self.table.find(name):
            self.table.report(name, ready=ready)

    @invariant()
    def what_is_picked_can_serve(self):
        pool = self.table.pools["m"]
        able = [one for one in self.table.members if one.takes_requests]
        decoding = {one.spec.region for one in able if one.spec.phase is Phase.DECODE}
        beginning = {
            one.spec.name
            for one in able
            if one.spec.phase is Phase.AGGREGATED or (one.spec.phase is Phase.PREFILL and one.spec.region in decoding)
        }
        found = self.table.first("m")
        assert (found.spec.name in beginning) if beginning else found is None
        for region in ("east", "west"):
            decoder = self.table.decoder("m", region)
            assert (decoder is not None) == (region in decoding)
            assert decoder is None or (decoder.takes_requests and decoder.spec.region == region)
        whole = self.table.whole("m")
        assert (whole is not None) == any(one.spec.phase is not Phase.PREFILL for one in able)
        assert whole is None or (whole.takes_requests and whole.spec.phase is not Phase.PREFILL)
        for one in able:
            assert not {one.spec.name} & {
                found.spec.name
                for found in (self.table.first("m", {one.spec.name}), self.table.whole("m", {one.spec.name}))
                if found
            }
        assert set(pool.members) == {one.spec.name for one in self.table.members}
        assert math.isfinite(pool.rate(able))


TestFleet = Fleet.TestCase
