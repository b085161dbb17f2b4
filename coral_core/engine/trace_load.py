"""Sends a trace of completion requests, each when it is due, and notes when its first and its last token came.

`python -m coral_core.engine.trace_load --url URL --model M --vocab V [--seed S] < TRACE` reads one JSON list of
[arrival_s, input_tokens, output_tokens] and prints one of [first_token_s, finish_s, error], seconds since the trace began.
Prompts are random token ids, so that no two share a prefix; answers go on to their full length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

PATIENCE_S: Final = 300.0
"""The longest that one answer may take."""
HEAD_S: Final = 0.5
"""Between this program's start and the trace's: everybody is ready when the first request is due."""

Asked = tuple[float, int, int]
Heard = tuple[float | None, float | None, str]


def request_bytes(url: str, model: str, prompt: Sequence[int], output_tokens: int) -> bytes:
    """A streamed completion of exactly so many tokens."""
    document = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(document).encode()
    place = urlsplit(url).netloc
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def replay(url: str, model: str, trace: Sequence[Asked], *, vocab: int, seed: int) -> list[Heard]:
    """Every request of the trace, in its order; instants are seconds since the trace began, None where they never came."""
    draw = random.Random(seed)  # noqa: S311 - prompts, not secrets
    bodies = [
        request_bytes(url, model, [draw.randrange(vocab) for _ in range(tokens)], out) for _, tokens, out in trace
    ]
    began_s = time.perf_counter() + HEAD_S

    async def one(arrival_s: float, body: bytes) -> Heard:
        await asyncio.sleep(began_s + arrival_s - time.perf_counter())
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await _ask(url, body, began_s)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            return None, None, f"{type(error).__name__}: {error}"

    return list(await asyncio.gather(*(one(asked[0], body) for asked, body in zip(trace, bodies, strict=True))))


async def _ask(url: str, body: bytes, began_s: float) -> Heard:
    """Send a request and read its stream to the end. Raises ValueError for an answer that is none."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    first_s = last_s = None
    try:
        writer.write(body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status.decode(errors='replace').strip()} {(await reader.read(2000))[-300:]!r}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                last_s = time.perf_counter() - began_s
                first_s = last_s if first_s is None else first_s
            elif line.startswith(b"data: [DONE]"):
                if first_s is None:
                    raise ValueError("the stream had no token")
                return first_s, last_s, ""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    raise ValueError("the stream ended without [DONE]")


def main() -> None:
    """Read the trace, send it, print what was heard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trace = [(float(at_s), int(tokens), int(out)) for at_s, tokens, out in json.load(sys.stdin)]
    heard = asyncio.run(replay(options.url, options.model, trace, vocab=options.vocab, seed=options.seed))
    sys.stdout.write(json.dumps(heard) + "\n")


if __name__ == "__main__":
    main()
