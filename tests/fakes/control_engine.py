"""A fake engine as a program: `control_engine.py PORT`. Answers as `fake_engine` does, and /health and /metrics besides."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.gateway_case import MODEL


async def main(port: int) -> None:
    engine = FakeEngine(name="program", model=MODEL)
    steps = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal steps
        steps += 1
        return await engine.complete(request)

    async def well(_request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(_request: web.Request) -> web.Response:
        running = f'vllm:num_requests_running{{engine="0"}} {engine.running}\n'
        return web.Response(text=f'{running}vllm:iteration_tokens_total_count{{engine="0"}} {steps}\n')

    app = web.Application()
    app.router.add_get("/health", well)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
