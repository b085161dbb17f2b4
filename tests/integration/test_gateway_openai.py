"""The official client, and what it makes of the gateway's answers, streams and errors."""

from __future__ import annotations

import asyncio

import openai
import pytest

pytest.importorskip("aiohttp", reason="needs the extra `serve`")

from coral_core.domain.workload import Phase
from coral_core.serving.limits import KeyTerms
from tests.fakes.fake_engine import Way
from tests.fakes.gateway_case import KEY, MODEL, gateway_case, terms_of
from tests.fakes.waiting import coming

HELLO = [{"role": "user", "content": "hello"}]


def client(case, **changes):
    return openai.AsyncOpenAI(**{"base_url": f"{case.url}/v1", "api_key": KEY, "max_retries": 0, **changes})


async def streamed(made) -> tuple[str, object]:
    said, usage = "", None
    async for chunk in await made:
        usage = chunk.usage or usage
        said += "".join(choice.delta.content or "" for choice in chunk.choices)
    return said, usage


def test_the_client_gets_answers_streams_and_usage():
    async def go():
        async with gateway_case({"p": Phase.PREFILL, "d": Phase.DECODE}, key=KeyTerms()) as case, client(case) as api:
            assert [model.id async for model in api.models.list()] == [MODEL]
            assert (await api.models.retrieve(MODEL)).owned_by == "coral"
            found = await api.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
            assert (found.choices[0].message.content, found.usage.completion_tokens) == ("t0 t1 t2 ", 3)
            found = await api.completions.create(model=MODEL, prompt="hello", max_tokens=2)
            assert (found.choices[0].text, found.choices[0].finish_reason) == ("t0 t1 ", "length")
            made = api.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, stream=True)
            assert await streamed(made) == ("t0 t1 t2 ", None)
            made = api.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
            said, usage = await streamed(made)
            assert (said, usage.total_tokens) == ("t0 t1 t2 ", 10)

    asyncio.run(go())


def test_the_client_gets_the_errors_it_knows():
    async def go():
        terms = KeyTerms(requests_per_s=0.001, burst_requests=8)
        models = (terms_of(), terms_of("later"))
        async with gateway_case(key=terms, models=models) as case, client(case) as api:

            def ask(**changes):
                return api.chat.completions.create(**{"model": MODEL, "messages": HELLO, **changes})

            with pytest.raises(openai.NotFoundError) as missing:
                await ask(model="other")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError) as wrong:
                await ask(messages=[])
            assert wrong.value.param == "messages"
            with pytest.raises(openai.InternalServerError) as later:
                await ask(model="later")
            assert (later.value.status_code, later.value.code) == (503, "model_not_ready")
            case.engines["a"].tell(Way.CUT, after=2, pause_s=0.02)
            with pytest.raises(openai.APIError, match="broke the connection"):
                await streamed(ask(stream=True))
            case.engines["a"].tell(Way.STATUS)
            with pytest.raises(openai.InternalServerError) as failed:
                await ask()
            assert failed.value.status_code == 502
            stream = await ask(stream=True, max_tokens=1000)
            await stream.close()  # the client has enough
            await coming(lambda: case.gateway.running == 0)
            for _ in range(2):
                await ask()
            with pytest.raises(openai.RateLimitError) as limited:
                await ask()
            assert int(limited.value.response.headers["retry-after"]) > 500
            async with client(case, api_key="wrong") as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()

    asyncio.run(go())


@pytest.mark.servers
def test_the_client_comes_back_when_it_is_told_to():
    async def go():
        terms = KeyTerms(requests_per_s=0.2, burst_requests=1)
        async with gateway_case(key=terms) as case, client(case, max_retries=1) as api:
            for _ in range(2):
                await api.chat.completions.create(model=MODEL, messages=HELLO)
            assert 'status="429"} 1.0' in case.gateway.metrics.text().decode()

    asyncio.run(go())
