"""The gateway's parts one by one: what a request becomes for an engine, demand, limits, states, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from coral_core.clock import ManualClock
from coral_core.config.gateway import ListenSpec
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError, ServingError, StoreError
from coral_core.serving.asgi import ClientGoneError, lifespan, read_body, while_connected
from coral_core.serving.demand_meter import DemandMeter
from coral_core.serving.keys import KeyRecord, KeyRing, hash_key
from coral_core.serving.limits import KeyTerms, TokenBucket
from coral_core.serving.metrics import GatewayMetrics
from coral_core.serving.refusals import RefusedError, too_many
from coral_core.serving.request import CHAT, TEXT, parse_request
from coral_core.serving.sparing_log import MOST, PERIOD_S, Sparing
from coral_core.serving.sse import BrokenStreamError, EventRelay, read_whole
from coral_core.serving.table import InstanceSpec, ModelTerms, RoutingTable
from coral_core.serving.terms import GatewayTerms
from coral_core.serving.waiting import Waiting

START = datetime(2026, 11, 29, 12, tzinfo=UTC)
TERMS = ModelTerms(
    name="m",
    slo=Slo(ttft_s=2.0, tpot_s=0.1),
    mean_input_tokens=200.0,
    mean_output_tokens=50.0,
    prompt_s=0.5,
    planned_tpot_frac=0.8,
)


def table_of(**phases: Phase) -> RoutingTable:
    table = RoutingTable([TERMS], eject_s=5.0, eject_after=2)
    for name, phase in phases.items():
        spec = InstanceSpec(name=name, model="m", phase=phase, url="http://h:1", weight=100.0)
        table.probed(table.register(spec), answers=True, now_s=0.0)
    return table


def test_a_prefill_engine_gets_the_prompt_and_one_token_to_make():
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "é"}],
        "stream": True,
        "temperature": 0,
        "max_completion_tokens": 9,
        "stop": ["x"],
        "min_tokens": 3,
        "stream_options": {"include_usage": True},
    }
    request = parse_request(CHAT, json.dumps(body).encode())
    assert (request.wants_usage, request.transferable) == (True, True)
    prefill = json.loads(request.prefill_body())
    assert prefill.pop("kv_transfer_params") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    }
    expected = {"model": "m", "messages": body["messages"], "stream": False, "temperature": 0}
    assert prefill == {**expected, "max_tokens": 1, "max_completion_tokens": 1}
    place = {"remote_engine_id": "p"}
    assert json.loads(request.whole_body(place)) == {**body, "kv_transfer_params": place}
    assert request.document == body


@pytest.mark.parametrize(
    ("prompt", "transferable"),
    [("a", True), ([1, 2], True), (["a"], True), ([[1, 2]], True), (["a", "b"], False), ([[1], [2]], False)],
)
def test_one_prompt_can_be_handed_over_several_cannot(prompt, transferable):
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert parse_request(TEXT, body).transferable is transferable
    assert not parse_request(TEXT, json.dumps({"model": "m", "prompt": prompt, "best_of": 2}).encode()).transferable


def test_rates_and_bounds_follow_the_units_of_the_phases():
    assert TERMS.requests_per_s(Phase.PREFILL, 100.0) == 0.5
    assert TERMS.requests_per_s(Phase.DECODE, 100.0) == 2.0
    assert TERMS.requests_per_s(Phase.AGGREGATED, 100.0) == 100.0
    assert TERMS.max_wait_s == 1.5
    assert TERMS.max_handover_s == pytest.approx(0.1 * 0.2 * 49)


def test_a_degraded_instance_is_routed_by_what_is_left_of_its_weight():
    table = table_of(a=Phase.AGGREGATED, b=Phase.AGGREGATED)
    pool = table.pools["m"]
    whole = pool.rate(pool.in_phase(Phase.AGGREGATED))
    table.report("a", ready=True, weight_frac=0.5)
    picked = [table.first("m").spec.name for _ in range(30)]
    assert (picked.count("a"), picked.count("b")) == (10, 20)
    assert pool.rate(pool.in_phase(Phase.AGGREGATED)) == 0.75 * whole
    before = table.find("a").weight
    table.set_weight("a", 2 * before)  # a reallocation's, of the whole
    assert (table.find("a").weight, table.find("a").routed_weight) == (2 * before, before)
    table.report("a", ready=True)
    assert table.find("a").routed_weight == 2 * before
    for wrong in (0.0, -1.0, 1.5, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"a\.weight_frac"):
            table.report("a", ready=True, weight_frac=wrong)


def test_decode_that_falls_behind_closes_the_door_too():
    table = table_of(p=Phase.PREFILL, d=Phase.DECODE)
    pool = table.pools["m"]
    waiting = Waiting(pool, unknown_s=7.0)
    tickets = []
    for _ in range(2):
        tickets.append(waiting.admit(0.0))
        tickets[-1].hand_over()
        tickets[-1].hand_over()
    assert (pool.unheard, pool.handing) == (0, 2)
    tickets.append(waiting.admit(0.0))  # one more is at work, one waits 0.5 s, 0.98 s are allowed
    tickets[-1].hand_over()
    with pytest.raises(RefusedError, match="wait for decode") as refused:
        waiting.admit(0.0)
    assert refused.value.retry_after_s == pytest.approx(2 / 2.0 - 0.98)
    for ticket in tickets:
        ticket.heard()
    assert (pool.unheard, pool.handing) == (0, 0)
    table.report("p", ready=False)  # then decode instances compute prompts themselves
    assert waiting.admit(0.0)
    table.report("d", ready=False)
    with pytest.raises(RefusedError) as refused:
        waiting.admit(0.0)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 7.0)


def test_whole_answers_count_as_waiting_until_their_bound_is_over():
    waiting = Waiting(table_of(a=Phase.AGGREGATED).pools["m"], unknown_s=1.0)
    for _ in range(152):  # one at work, 1.5 s of 100 requests/s behind it
        waiting.admit(0.0, heard_by_s=2.0)
    with pytest.raises(RefusedError):
        waiting.admit(1.9, heard_by_s=3.9)
    assert waiting.admit(2.0, heard_by_s=4.0)


def test_what_failed_with_a_lost_node_does_not_set_the_rest_aside():
    table = table_of(a=Phase.AGGREGATED, b=Phase.AGGREGATED)
    a = table.find("a")
    for _ in range(2):
        table.failed(a, gone=False, now_s=0.0)
    assert not a.ready
    table.report("a", ready=True, weight_frac=0.5)
    table.probed(a, answers=True, now_s=0.1)
    assert a.takes_requests
    table.failed(a, gone=False, now_s=0.2)
    assert a.takes_requests, "counted anew"
    table.failed(a, gone=False, now_s=0.3)
    table.report("a", ready=True, weight_frac=0.5)
    table.probed(a, answers=True, now_s=0.4)
    assert not a.ready, "no news, no excuse"


def test_an_instance_that_fails_again_and_again_is_set_aside_unless_it_is_the_last():
    table = table_of(a=Phase.AGGREGATED, b=Phase.AGGREGATED)
    a, b = table.members
    for _ in range(2):
        table.failed(a, gone=False, now_s=10.0)
    assert not a.ready
    table.probed(a, answers=True, now_s=14.9)
    assert not a.ready
    for _ in range(5):
        table.failed(b, gone=False, now_s=11.0)
    assert b.ready
    table.failed(b, gone=True, now_s=12.0)
    assert table.first("m") is None
    table.probed(a, answers=True, now_s=15.0)
    assert table.first("m") is a
    table.remove("a")
    table.failed(a, gone=True, now_s=16.0)  # a request that was still at work there
    table.probed(a, answers=True, now_s=17.0)
    assert table.first("m") is None


def test_a_busy_engine_may_miss_a_probe_and_one_that_was_never_there_may_not():
    table = table_of(a=Phase.AGGREGATED)
    a = table.find("a")
    for answers, ready in ((None, True), (True, True), (None, True), (None, False), (None, False), (True, True)):
        table.probed(a, answers=answers, now_s=0.0)
        assert a.ready is ready
    new = table.register(InstanceSpec(name="n", model="m", phase=Phase.AGGREGATED, url="http://h:1"))
    table.probed(new, answers=None, now_s=0.0)
    assert not new.ready


def test_another_instance_of_the_same_name_takes_its_place():
    table = table_of(a=Phase.AGGREGATED)
    old = table.find("a")
    spec = InstanceSpec(name="a", model="m", phase=Phase.AGGREGATED, url="http://h:2", weight=1.0)
    assert table.register(spec) is not old
    assert not table.find("a").ready
    with pytest.raises(ServingError, match="register it first"):
        table.report("none", ready=True)
    with pytest.raises(InputError, match="did you mean"):
        table.register(InstanceSpec(name="x", model="mm", phase=Phase.DECODE, url="http://h:2"))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(InputError, match="is no weight"):
        table_of(a=Phase.AGGREGATED).set_weight("a", weight)


def test_demand_is_cut_into_samples_that_follow_each_other():
    clock = ManualClock(start=START)
    meter = DemandMeter(models=["m", "n"], clock=clock)
    for _ in range(6):
        meter.asked("m")
    meter.finished("m", 100, 10)
    meter.finished("m", 200, 30)
    clock.advance(30.0)
    first = {sample.model: sample for sample in meter.cut()}
    assert (first["m"].requests_per_s, first["m"].mean_input_tokens, first["m"].mean_output_tokens) == (
        0.2,
        150.0,
        20.0,
    )
    assert (first["n"].requests_per_s, first["n"].mean_input_tokens) == (0.0, None)
    assert meter.cut() == []  # no time has passed
    clock.advance(10.0)
    [second, _] = meter.cut()
    assert (second.time_s - second.duration_s, second.requests_per_s) == (first["m"].time_s, 0.0)


def test_what_could_not_be_told_is_told_later_and_nothing_twice_after_that(caplog):
    clock = ManualClock(start=START)
    meter = DemandMeter(models=["m"], clock=clock)
    told = []

    def refuse(_samples):
        raise StoreError("the store is away")

    clock.advance(60.0)
    with caplog.at_level(logging.WARNING):
        meter.tell(meter.take_untold(), refuse)
    assert "the store is away" in caplog.text
    clock.advance(60.0)
    meter.tell(meter.take_untold(), told.extend)
    assert [sample.time_s - START.timestamp() for sample in told] == [60.0, 120.0]
    clock.advance(60.0)
    assert len(meter.take_untold()) == 1
    clock.advance(100_000.0)  # the machine slept
    assert len(meter.take_untold()) == 1
    for _ in range(3):
        clock.advance(50_000.0)
        samples = meter.take_untold()
    assert [sample.time_s for sample in samples] == sorted(sample.time_s for sample in samples)
    assert samples[-1].time_s - samples[0].time_s <= 86_400


@pytest.mark.parametrize("set_by_s", [3600.0, 6.0, -6.0, -59.9, -3600.0])
def test_a_clock_that_is_set_makes_no_demand_of_it(set_by_s):
    """An hour's jump would be an hour without requests, and one back by almost a minute a flood of them."""
    clock = ManualClock(start=START)
    meter = DemandMeter(models=["m"], clock=clock)
    for jump_s, told in ((set_by_s, []), (0.01, [1.0]), (0.0, [1.0])):
        for _ in range(60):
            meter.asked("m")
        clock.advance(60.0)
        clock.start += timedelta(seconds=jump_s)
        assert [sample.requests_per_s for sample in meter.cut()] == pytest.approx(told, rel=1e-3)


def test_no_demand_is_told_where_no_time_has_passed():
    assert DemandMeter(models=["m"], clock=ManualClock(start=START)).take_untold() == []


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"index": 0, "finish_reason": "abort"}]}',
    ],
)
def test_an_answer_that_is_not_whole_is_broken(body):
    with pytest.raises(BrokenStreamError):
        read_whole(body)


def test_an_answer_that_lacks_one_of_its_choices_is_broken():
    body = b'{"choices": [{"finish_reason": "stop"}, {"index": 1, "finish_reason": null}]}'
    assert read_whole(body, choices=1)
    with pytest.raises(BrokenStreamError):
        read_whole(body, choices=2)


def test_streams_with_comments_carriage_returns_and_far_too_long_events():
    relay = EventRelay(passes_usage=False)
    event = b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}'
    assert relay.feed(b": still here\r\n\r\nevent: x\r\n\r\n" + event + b"\r\n\r") == b": still here\n\n"
    assert relay.feed(b"\n") == event + b"\n\n"
    relay.end()
    with pytest.raises(BrokenStreamError, match="more than"):
        relay.feed(b"data: " + b"x" * (5 << 20))


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        (b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}', "reports that it failed"),
        (b'data: {"choices":[{"index":0,"text":" r","finish_reason":"abort"}]}', "before it was finished"),
        (b'data: {"choices":', "no piece of a completion"),
        (b"data: [DONE]", "before it was finished"),
    ],
)
def test_each_way_in_which_an_engine_breaks_off_is_told_apart(event, complaint):
    relay = EventRelay(passes_usage=False)
    assert relay.feed(b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}],"error":null}\n\n')
    with pytest.raises(BrokenStreamError, match=complaint):
        relay.feed(event + b"\n\n")


def test_limits_that_are_none_are_refused():
    for wrong in ({"requests_per_s": 0.0}, {"burst_requests": 0.5}, {"concurrent_requests": 0}):
        with pytest.raises(InputError):
            KeyTerms(**wrong)
    with pytest.raises(InputError, match="request_s"):
        GatewayTerms(request_s=0.0)
    with pytest.raises(InputError, match="max_retries"):
        GatewayTerms(max_retries=-1)
    assert GatewayTerms(max_retries=0).max_retries == 0
    bucket = TokenBucket(rate_per_s=float("inf"), burst=1)
    assert all(bucket.take(0.0) for _ in range(100))
    bucket = TokenBucket(rate_per_s=1.0, burst=1)
    assert [bucket.take(now_s) for now_s in (5.0, 1.0, 5.5, 6.0)] == [True, False, False, True]


def test_keys_files_that_hold_no_hashes_are_refused():
    key = "abcdefghijklmnopqrstuvwxyz-0123456789"
    record = KeyRecord(name="x", key_hash=hash_key(key), terms=KeyTerms())
    with pytest.raises(InputError, match="no hash"):
        KeyRing([KeyRecord(name="x", key_hash=key, terms=KeyTerms())])
    with pytest.raises(InputError, match="same key as x"):
        KeyRing([record, KeyRecord(name="y", key_hash=record.key_hash, terms=KeyTerms())])
    assert KeyRing([]).is_open
    assert not KeyRing([record]).is_open


def test_errors_have_openais_shape_and_whole_seconds_to_wait():
    error = too_many("too many", 0.2, code="c")
    assert msgspec.json.decode(error.body) == {
        "error": {"message": "too many", "type": "rate_limit_error", "param": None, "code": "c"}
    }
    assert error.headers == [(b"retry-after", b"1")]
    assert too_many("x", 1.01, code="c").headers == [(b"retry-after", b"2")]


def test_metrics_end_with_the_instance():
    table = table_of(a=Phase.AGGREGATED)
    metrics = GatewayMetrics(table)
    metrics.failed("a", "reset")
    metrics.finished("m", "a", 10, 5, 2.0)
    metrics.finished("m", "a", 10, 1, 0.0)
    text = metrics.text().decode()
    assert 'coral_gateway_instance_failures_total{cause="reset",instance="a"} 1.0' in text
    assert 'coral_gateway_time_per_output_token_seconds_sum{instance="a",model="m"} 0.5' in text
    assert 'coral_gateway_time_per_output_token_seconds_count{instance="a",model="m"} 1.0' in text
    table.remove("a")
    metrics.forget("a")
    metrics.first_token("m", "a", 0.1)  # what ran there on ends
    metrics.finished("m", "a", 10, 5, 2.0)
    metrics.failed("a", "reset")
    assert 'instance="a"' not in metrics.text().decode()


@pytest.mark.parametrize(
    ("host", "private"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("h", False)],
)
def test_only_this_machine_reaches_loopback(host, private):
    assert ListenSpec(host=host, port=1).is_loopback is private


class Wire:
    """An ASGI connection: what comes in, in this order, and what went out."""

    def __init__(self, *messages: dict) -> None:
        self.messages = list(messages)
        self.sent: list[dict] = []

    async def receive(self) -> dict:
        if not self.messages:
            await asyncio.sleep(600)
        return self.messages.pop(0)

    async def send(self, message: dict) -> None:
        self.sent.append(message)


def test_a_client_that_leaves_while_it_sends_is_gone():
    wire = Wire({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"})
    with pytest.raises(ClientGoneError):
        asyncio.run(read_body({"headers": []}, wire.receive, most_bytes=10, limit_s=120.0))


def test_what_cancels_from_elsewhere_is_no_client_that_left():
    async def go():
        async with while_connected(Wire().receive, served=lambda: False):
            await asyncio.sleep(600)

    async def cancelled():
        task = asyncio.ensure_future(go())
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_the_servers_own_messages_are_answered():
    wire = Wire({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    asyncio.run(lifespan(wire.receive, wire.send))
    assert [message["type"] for message in wire.sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_a_log_that_is_full_says_later_how_much_it_left_out():
    clock, told = ManualClock(start=START), []
    sparing = Sparing(clock.monotonic_s)

    def say(what: str, line: int = 1) -> None:
        record = logging.LogRecord("a", logging.WARNING, "file", line, "%s", (what,), None)
        if sparing.filter(record):
            told.append(record.getMessage())

    for number in range(MOST + 5):
        say(f"no {number}")
    say("other", line=2)
    clock.advance(PERIOD_S)
    say("again")
    say("and again")
    assert told == [
        *(f"no {number}" for number in range(MOST)), "other", "again (5 more like it were not told)", "and again",
    ]  # fmt: skip
