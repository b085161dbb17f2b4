"""A fake engine as a program: `control_engine.py PORT`. Answers as `fake_engine` does, and /health and /metrics besides.

POST /status writes its body where the stage executor would write what is left of it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from aiohttp import web

from coral_core.engine.stage_status import STATUS_VARIABLE
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

    async def status(request: web.Request) -> web.Response:
        path = Path(os.environ[STATUS_VARIABLE])
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(await request.read())
        new.replace(path)
        return web.Response()

    app = web.Application()
    app.router.add_post("/status", status)
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
