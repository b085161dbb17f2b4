"""The simulator beside real serving, without the real serving: deviations by hand, the simulated side, and the load."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from coral_core.domain.launch import Runtime
from coral_core.domain.workload import Phase
from coral_core.engine.trace_load import replay, request_bytes
from coral_core.errors import InputError, MeasurementError
from coral_core.perf.profile import Profile, ProfileKey, ProfilePoint
from coral_core.sim.inputs import SimRequests
from coral_core.sim.profiled import profiled_timing
from tasks.fidelity import Bench, FidelitySpec, bench_fidelity
from tasks.fidelity_compare import Fidelity, Latencies, Serving, deviation_frac


def latencies(*pairs: tuple[float, float]) -> Latencies:
    ttft_s, tpot_s = np.array(pairs).T
    return Latencies(ttft_s=ttft_s, tpot_s=tpot_s)


def test_deviations_and_the_noise_floor_by_hand():
    runs = (latencies((1.0, 0.1), (3.0, 0.1)), latencies((1.2, 0.1), (2.8, 0.1)))
    found = Fidelity(
        serving=Serving.AGGREGATED,
        requests=2,
        outside_s=0.0,
        measured=runs,
        simulated=latencies((1.1, 0.2), (3.1, 0.1)),
    )
    ttft, tpot = found.compared
    assert ttft.noise_floor_frac == pytest.approx(0.2 / 2.0)
    assert ttft.deviation_frac == pytest.approx((0.1 + 0.2) / 2 / 2.0)
    assert ttft.mean_deviation_frac == pytest.approx(2.1 / 2.0 - 1)
    assert (ttft.allowed_frac, ttft.met) == (pytest.approx(0.15), True)
    assert (tpot.deviation_frac, tpot.allowed_frac, tpot.met) == (pytest.approx(0.5), 0.1, False)
    assert [row["label"] for row in found.rows()] == ["measured", "measured", "simulated"]
    assert json.loads(json.dumps(found.to_json()))["compared"][1]["met"] is False
    assert deviation_frac(np.array([1.0]), np.array([2.0])) == 0.5


PREFILL_S, DECODE_S, FIXED_S = 2e-3, 1e-3, 5e-3


def profile() -> Profile:
    """Layers take 1 ms per decode step and 2 ms per prompt, whatever their sizes; a step 5 ms besides."""
    points = tuple(
        ProfilePoint(phase=phase, tp=1, requests=float(r), tokens=float(n), layer_s=layer_s, fixed_s=FIXED_S)
        for phase, layer_s in ((Phase.PREFILL, PREFILL_S), (Phase.DECODE, DECODE_S))
        for r in (1, 4)
        for n in (32, 128)
    )
    key = ProfileKey(model="tiny-chat", variant="fp32", config="local-large", engine="vllm", version="1")
    return Profile(key=key, points=points, source="a test", as_of=date(2026, 11, 29), kv_tokens={1: 16384.0})


def bench(**changes) -> Bench:
    return Bench(
        spec=FidelitySpec(**changes), folder=Path("nowhere"), interpreter=Path("python"), on_step=print, first_port=8000
    )


@pytest.mark.parametrize("serving", Serving)
def test_a_lone_request_takes_what_its_steps_take(serving):
    lone = SimRequests(
        model=np.zeros(1, dtype=np.int64),
        arrival_s=np.array([0.5]),
        input_tokens=np.array([32]),
        output_tokens=np.array([5]),
    )
    given = profile()
    found = bench().simulated(serving, lone, given, profiled_timing(given, 1))
    prompt_s, step_s = FIXED_S + 8 * PREFILL_S, FIXED_S + 8 * DECODE_S
    assert found.tpot_s[0] == pytest.approx(step_s, rel=0.01)
    apart = serving is Serving.DISAGGREGATED  # the first token that is heard is the decode engine's
    assert found.ttft_s[0] == pytest.approx(prompt_s + (step_s if apart else 0.0), rel=0.01)


def test_the_trace_is_the_same_for_the_same_seed():
    spec = FidelitySpec(requests=50, requests_per_s=2.0)
    one, other = spec.trace(), spec.trace()
    assert np.array_equal(one.arrival_s, other.arrival_s)
    assert (np.diff(one.arrival_s) > 0).all()
    assert one.input_tokens.min() >= 32
    assert one.output_tokens.max() <= 48
    assert 10 < one.arrival_s[-1] < 50


def test_a_profile_of_another_engine_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.fidelity.make_tiny_models", lambda *_: {"tiny-chat": tmp_path})
    with pytest.raises(InputError, match="was measured with"):
        bench_fidelity(FidelitySpec(), folder=tmp_path, interpreter=tmp_path, profile=profile())
    known = replace(profile(), key=replace(profile().key, flags=bench().flags))
    for other, text in (
        (replace(known, key=replace(known.key, model="tiny-split")), "is of tiny-split in fp32 on local-large"),
        (replace(known, key=replace(known.key, config="local-small")), "is of tiny-chat in fp32 on local-small"),
        (replace(known, kv_tokens={}), "room for at TP 1"),
    ):
        with pytest.raises(InputError, match=text):
            bench_fidelity(FidelitySpec(), folder=tmp_path, interpreter=tmp_path, profile=other)


def test_every_way_of_serving_has_its_launches(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.fidelity.make_tiny_models", lambda *_: {"tiny-chat": tmp_path})
    plans = {serving: bench().plans(serving) for serving in Serving}
    assert [len(plan.nodes) for plan in plans[Serving.PIPELINE]] == [2]
    assert [plan.phase for plan in plans[Serving.DISAGGREGATED]] == [Phase.PREFILL, Phase.DECODE]
    for found in plans.values():
        ports = [port for plan in found for node in plan.nodes for port in node.ports]
        assert len(set(ports)) == len(ports)
        for plan in found:
            assert all("--no-enable-prefix-caching" in node.argv for node in plan.nodes)


def test_a_way_of_serving_that_fails_leaves_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.fidelity.make_tiny_models", lambda *_: {"tiny-chat": tmp_path})

    def serve(self, serving, profile, timing):
        if serving is Serving.AGGREGATED:
            raise MeasurementError("the gateway did not start")
        return Fidelity(serving=serving, requests=0, outside_s=0.0, measured=(), simulated=None)

    monkeypatch.setattr(Bench, "serve", serve)
    _, found = replace(bench(), folder=tmp_path).run(profile())
    assert [one.serving for one in found] == list(Serving)
    assert found[0].to_json() == {"serving": "aggregated", "unmeasured": "the gateway did not start"}
    assert all(isinstance(one, Fidelity) for one in found[1:])


def test_kv_goes_by_the_connector_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.fidelity.make_tiny_models", lambda *_: {"tiny-chat": tmp_path})
    for runtimes, connector in (
        ((Runtime.VLLM,), "NixlConnector"),
        ((Runtime.VLLM, Runtime.CORAL), "CoralKVConnector"),
    ):
        for plan in bench(runtimes=runtimes).plans(Serving.DISAGGREGATED):
            assert any(connector in word for node in plan.nodes for word in node.argv)


def asked_of(trace, answer) -> tuple[list, list[dict]]:
    """What is heard of a trace whose requests a small server answers, and what was asked."""
    asked: list[dict] = []
    handlers: list[asyncio.Task] = []

    async def serve(reader, writer):
        handlers.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        asked.append(json.loads(await reader.readexactly(length)))
        await answer(writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            heard = await replay(url, "m", trace, vocab=100, seed=0)
            await asyncio.gather(*handlers)
            return heard

    return asyncio.run(run()), asked


GAP_S = 0.4


def test_a_trace_is_sent_on_time_and_each_token_noted():
    written: list[list[float]] = []

    async def two_tokens(writer):
        times_s: list[float] = []
        written.append(times_s)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for chunk in (b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\n', b"data: [DONE]\n\n"):
            times_s.append(time.monotonic())
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
            await asyncio.sleep(GAP_S)
        writer.write(b"0\r\n\r\n")

    heard, asked = asked_of([(0.0, 3, 2), (0.3, 5, 4)], two_tokens)
    assert sorted((len(one["prompt"]), one["max_tokens"]) for one in asked) == [(3, 2), (5, 4)]
    for (first_s, last_s, why), due_s, times_s in zip(heard, (0.0, 0.3), written, strict=True):
        assert why == ""
        assert due_s < first_s < last_s
        assert last_s - first_s == pytest.approx(times_s[1] - times_s[0], abs=GAP_S / 2)
    assert written[1][0] < written[0][2]  # the second does not wait for the first one's end


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"HTTP/1.1 503 busy\r\n\r\nnot now", "503 busy.*not now"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", "without .DONE."),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", "no token"),
    ],
)
def test_an_answer_that_is_none_is_told(said, words):
    async def answer(writer):
        writer.write(said)

    ((first_s, last_s, why),), _ = asked_of([(0.0, 3, 2)], answer)
    assert (first_s, last_s) == (None, None)
    assert re.search(words, why)


def test_a_server_that_is_not_there_is_told():
    ((first_s, _, why),) = asyncio.run(replay("http://127.0.0.1:9", "m", [(0.0, 1, 1)], vocab=5, seed=0))
    assert first_s is None
    assert "Error" in why


def test_a_request_asks_for_exactly_its_tokens():
    body = json.loads(request_bytes("http://h:1", "m", [1, 2], 7).partition(b"\r\n\r\n")[2])
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([1, 2], 7, True)
