"""From an admitted request to an answer that has begun: choose, prefill, decode, and once more elsewhere while unheard.

An answer is handed over when its first event (of a stream) or all of it has come. Until then nothing has been sent to
the client, so a failure may be made good by another instance; after that it may not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from coral_core.clock import Clock
from coral_core.domain.workload import Phase
from coral_core.routing import may_retry
from coral_core.serving.metrics import GatewayMetrics
from coral_core.serving.patience import Patience
from coral_core.serving.refusals import RefusedError, not_ready
from coral_core.serving.request import CompletionRequest
from coral_core.serving.sse import DONE, BrokenStreamError, EventRelay, read_whole
from coral_core.serving.table import Member, RoutingTable
from coral_core.serving.terms import GatewayTerms
from coral_core.serving.upstream import UpstreamError, posted, read_all, read_some
from coral_core.serving.waiting import Ticket

_LAST_BYTES_S: Final = 0.05


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer that has begun. `first` is what to send first; `rest` (of a stream) what follows, whole events each."""

    member: Member
    first: bytes
    relay: EventRelay | None = None
    response: aiohttp.ClientResponse | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing more of it will come."""
        return self.relay is None or self.relay.done

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows the first event. Raises UpstreamError where the stream ends before the answer does."""
        relay, response = self.relay, self.response
        if relay is None or response is None:
            return
        while not relay.done:
            passed = await _next_events(response, relay)
            if passed:
                yield passed
        self.input_tokens, self.output_tokens = relay.input_tokens, relay.output_tokens
        # Read to its very end, or the connection would be closed and not used again.
        with suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(_LAST_BYTES_S):
                await read_some(response)


@dataclass(slots=True, kw_only=True)
class _Tries:
    """What has been tried for one request."""

    failed: set[str] = field(default_factory=set)
    retries: int = 0
    alone: bool = False
    same_again: bool = False
    last: UpstreamError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatcher:
    """Sends requests to instances. Time limits and retries are those of `terms`."""

    table: RoutingTable
    session: aiohttp.ClientSession
    metrics: GatewayMetrics
    clock: Clock
    terms: GatewayTerms
    patience: Patience

    @asynccontextmanager
    async def answer(self, request: CompletionRequest, ticket: Ticket, request_id: str) -> AsyncIterator[Answer]:
        """The answer, begun; leaving early aborts it at the engine. Raises RefusedError and RejectedError."""
        tries = _Tries(alone=not request.transferable)
        async with AsyncExitStack() as stack:
            while True:
                try:
                    found = await self._attempt(request, ticket, request_id, tries, stack)
                    break
                except UpstreamError as error:
                    await stack.aclose()
                    if not may_retry(0, tries.retries, self.terms.max_retries):
                        raise _gave_up(error) from None
                    tries.retries, tries.last = tries.retries + 1, error
                    self.metrics.retried(request.model)
            yield found

    async def _attempt(
        self, request: CompletionRequest, ticket: Ticket, request_id: str, tries: _Tries, stack: AsyncExitStack
    ) -> Answer:
        member = None if tries.alone else self.table.first(request.model, tries.failed)
        params: dict[str, Any] | None = None
        if member is not None and member.spec.phase is Phase.PREFILL:
            params = await self._prefill(member, request, request_id, tries)
            ticket.hand_over()
            member = self.table.decoder(request.model, member.spec.region, tries.failed)
        if member is None:
            params = None
            member = self._alone(request.model, tries)
        with self._blamed(member, tries, transferred=params is not None):
            return await self._begun(member, request, request_id, params, stack)

    def _alone(self, model: str, tries: _Tries) -> Member:
        """An instance that computes the prompt itself; the one that failed once more, where only the transfer did."""
        found = self.table.whole(model, tries.failed)
        if found is None and tries.same_again:
            found = self.table.whole(model)
        if found is None and tries.last is not None:
            raise _gave_up(tries.last)
        if found is None:
            raise not_ready(f"no other instance of {model} is ready", self.terms.retry_after_s)
        return found

    async def _prefill(self, member: Member, request: CompletionRequest, request_id: str, tries: _Tries) -> Any:  # noqa: ANN401 - JSON
        """Where the decode engine finds the prompt's KV cache; None where the engines share it by other means."""
        with self._blamed(member, tries), _at_work(member):
            async with (
                self._limited(self.terms.first_byte_s),
                posted(self.session, member.spec.url + request.path, request.prefill_body(), request_id) as response,
            ):
                place = _whole(await read_all(response, self.terms.max_answer_bytes)).kv_transfer_params
            member.failures = 0
            return place

    async def _begun(
        self,
        member: Member,
        request: CompletionRequest,
        request_id: str,
        params: dict[str, Any] | None,
        stack: AsyncExitStack,
    ) -> Answer:
        stack.enter_context(_at_work(member))
        url, body = member.spec.url + request.path, request.whole_body(params)
        # An answer that comes whole takes as long as all its tokens: only the request's own limit holds for it.
        async with self._limited(self.terms.first_byte_s if request.stream else self.terms.request_s):
            response = await stack.enter_async_context(posted(self.session, url, body, request_id))
            if not request.stream:
                content = await read_all(response, self.terms.max_answer_bytes)
                usage = _whole(content, request.choices).usage
                tokens = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
                return Answer(member=member, first=content, input_tokens=tokens[0], output_tokens=tokens[1])
            relay = EventRelay(passes_usage=request.wants_usage, choices=request.choices)
            first = b""
            while not first:
                first = await _next_events(response, relay)
            return Answer(member=member, first=first, relay=relay, response=response)

    @asynccontextmanager
    async def _limited(self, limit_s: float) -> AsyncIterator[None]:
        try:
            async with self.patience.limit(limit_s):
                yield
        except TimeoutError:
            raise UpstreamError(f"the engine gave nothing for {limit_s:g} s", cause="timeout") from None

    @contextmanager
    def _blamed(self, member: Member, tries: _Tries, *, transferred: bool = False) -> Iterator[None]:
        """Note at whom an attempt failed, and what that leaves to try."""
        try:
            yield
        except UpstreamError as error:
            # Where two engines answer the same, it is the request: one that a client repeats must not empty a pool.
            alike = tries.last is not None and error.status != 0 and error.status == tries.last.status
            self.failed(member, error, blameless=alike)
            tries.failed.add(member.spec.name)
            # After a failed transfer the next one computes the prompt: the cache at the prefill engine may be gone.
            tries.alone = tries.alone or member.spec.phase is Phase.DECODE
            tries.same_again = transferred and error.answered
            raise

    def failed(self, member: Member, error: UpstreamError, *, blameless: bool = False) -> None:
        """Count a failure at an instance (against it, unless `blameless`), and stop using it where that says it is gone."""
        if error.cause != "busy" and not blameless:  # a busy one says so itself, and is well
            self.table.failed(member, gone=error.gone, now_s=self.clock.monotonic_s())
        self.metrics.failed(member.spec.name, error.cause)


@contextmanager
def _at_work(member: Member) -> Iterator[None]:
    member.in_flight += 1
    try:
        yield
    finally:
        member.in_flight -= 1


async def _next_events(response: aiohttp.ClientResponse, relay: EventRelay) -> bytes:
    """The events in the next bytes, none yet or some. UpstreamError where they are none, or end too early."""
    try:
        if data := await read_some(response):
            return relay.feed(data)
        relay.end()
    except BrokenStreamError as error:
        raise UpstreamError(error.what, cause="broken") from None
    relay.done = True
    return DONE


def _whole(content: bytes, choices: int = 1) -> Any:  # noqa: ANN401 - a Chunk, whose module's name is its own
    try:
        return read_whole(content, choices=choices)
    except BrokenStreamError as error:
        raise UpstreamError(error.what, cause="broken") from None


def _gave_up(error: UpstreamError) -> RefusedError:
    status, code = (504, "engine_timeout") if error.is_timeout else (502, "engine_failed")
    if error.cause == "busy":
        return RefusedError(error.what, status=503, error_type="server_error", code="engine_busy", retry_after_s=1.0)
    return RefusedError(error.what, status=status, error_type="server_error", code=code)
