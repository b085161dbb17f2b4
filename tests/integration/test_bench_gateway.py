"""The gateway bench: load that hears errors, engines that speak as real ones do, aims computed from what was measured."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from coral_core.engine.loopback import stream_of
from coral_core.engine.stream_load import load, request_bytes
from coral_core.errors import InputError
from tasks.bench_gateway import GatewayBench, GatewayBenchSpec, Soak, Spell, bench_gateway
from tasks.bench_targets import running_targets

GOOD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(stream_of("tiny", 3)) + b"0\r\n\r\n"
CUT = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + stream_of("tiny", 3)[0] + b"0\r\n\r\n"


@asynccontextmanager
async def server(*answers: bytes) -> AsyncIterator[str]:
    """Answers requests in turn, the last answer for ever; an empty one closes the connection."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.partition(b":")[2]))
                answer = left.pop(0) if len(left) > 1 else left[0]
                if not answer:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def heard(*answers: bytes, connections: int = 2, seconds: float = 1.0, rate: float | None = None):
    async def go():
        async with server(*answers) as url:
            request = request_bytes(url, "tiny", tokens=3)
            return await load(url, request, connections=connections, seconds=seconds, rate=rate)

    return asyncio.run(go())


def test_a_closed_loop_hears_every_answer():
    found = heard(GOOD)
    assert found.errors == 0
    assert found.finished > 2
    assert len(found.whole_s) == len(found.first_event_s) == found.finished
    assert all(0 < first <= whole for first, whole in zip(found.first_event_s, found.whole_s, strict=True))


def test_a_rate_is_kept_and_ends_when_all_is_heard():
    found = heard(GOOD, rate=50.0, seconds=0.4)
    assert (found.finished, found.errors, found.unfinished) == (20, 0, 0)
    assert found.elapsed_s >= 0.37


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ((b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n",), "500"),
        ((CUT,), "without [DONE]"),
        ((GOOD, b""), "connection"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(answers: tuple[bytes, ...], why: str):
    found = heard(*answers, connections=1)
    assert found.errors >= 1
    assert why in found.first_error


def test_an_answer_is_a_stream_of_openai_chunks():
    events = [piece.split(b"\r\n")[1] for piece in stream_of("tiny", 4)]
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [json.loads(event[6:]) for event in events[:-1]]
    assert [bool(one["choices"]) for one in chunks] == [True] * 4 + [False]
    assert chunks[3]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == {"prompt_tokens": 16, "completion_tokens": 4, "total_tokens": 20}


def spell(target: str, first_p99_s: float, cpu_s: float) -> Spell:
    return Spell(
        target=target,
        connections=64,
        requests=10,
        errors=0,
        first_error="",
        requests_per_s=100.0,
        cpu_s_per_request=cpu_s,
        first_event_p50_s=0.001,
        first_event_p99_s=first_p99_s,
        whole_p50_s=0.1,
        whole_p99_s=0.2,
    )


def bench(ours_p99_s: tuple[float, ...], direct_p99_s: tuple[float, ...], cpu_s: float, *, end: int) -> GatewayBench:
    rows = [spell("direct", one, 0.1) for one in direct_p99_s] + [spell("coral", one, 0.1) for one in ours_p99_s]
    peak = (spell("coral", 0.1, cpu_s), spell("litellm", 0.1, 0.003), spell("vllm-router", 0.1, 0.001))
    soak = Soak(connections=512, seconds=60, requests=9, errors=0, first_error="", settled_bytes=100, end_bytes=end)
    rivals = {"litellm": Path("a"), "vllm-router": Path("b")}
    return GatewayBench(
        spec=GatewayBenchSpec(rivals=rivals), half_requests_per_s=50, peak=peak, half=tuple(rows), soak=soak
    )


def test_aims_are_met_or_missed_by_what_was_measured():
    aims = bench((0.006, 0.007, 0.009), (0.002, 0.003, 0.004), 0.0019, end=104).targets()
    assert {name: aim["met"] for name, aim in aims.items()} == dict.fromkeys(aims, True)
    assert aims["added_p99_s"]["measured"] == pytest.approx(0.004)
    assert aims["added_p99_s"]["at_most"] == 0.005
    assert aims["requests_per_cpu_s_over_litellm"]["measured"] == pytest.approx(3 / 1.9)
    aims = bench((0.03, 0.031, 0.04), (0.002, 0.005, 0.009), 0.0031, end=106).targets()
    assert {name for name, aim in aims.items() if aim["met"]} == {"soak_errors"}
    assert aims["added_p99_s"]["at_most"] == pytest.approx(0.014)


def test_the_aims_need_their_number_of_connections():
    with pytest.raises(InputError, match="64 connections"):
        bench_gateway(GatewayBenchSpec(rivals={}, connections=(1,)))


@pytest.mark.servers
def test_the_official_client_reads_the_engines_that_compute_nothing():
    with running_targets({}, chunks=5, gap_s=0.001) as targets:
        client = OpenAI(base_url=f"{targets[0].url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        pieces = [one.choices[0].delta.content for one in stream if one.choices]
        assert "".join(pieces).split() == [f"token{number}" for number in range(5)]
        pids = [one.process.pid for one in targets]
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.servers
def test_the_bench_measures_every_target_in_every_round():
    words = ["bench", "gateway", "--alone", "--json", "--rounds", "2", "--seconds", "1", "--soak-s", "2"]
    program = [str(Path(sys.executable).with_name("coral")), *words, "--connections", "1", "64"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    seen = [(one["target"], one["connections"]) for one in found["peak"]]
    assert sorted(seen) == sorted([(name, count) for name in ("direct", "coral") for count in (1, 64)] * 2)
    assert [one["target"] for one in found["half"]] == ["direct", "coral", "coral", "direct"]
    assert all(one["errors"] == 0 and one["requests"] > 0 for one in found["peak"] + found["half"])
    assert set(found["targets"]) == {"added_p99_s", "soak_errors", "soak_memory_growth_frac"}
    assert found["soak"]["errors"] == 0


def test_rivals_that_are_not_there_are_named(tmp_path: Path):
    program = [str(Path(sys.executable).with_name("coral")), "bench", "gateway", "--rivals", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == InputError.exit_code
    assert "no vllm-router and no litellm" in done.stderr
    assert "make bench-rivals" in done.stderr
