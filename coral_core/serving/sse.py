"""A stream of server-sent events on its way through: whole events only, and whether it ended as it should. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from coral_core.errors import ServingError

MOST_EVENT_BYTES: Final = 4 << 20
DONE: Final = b"data: [DONE]\n\n"
_GIVEN_UP: Final = frozenset({"abort", "error"})
"""Reasons with which an engine ends what it has not finished."""


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """The part of an answer (or of a piece of it) that the gateway reads."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def given_up(self) -> bool:
        """Whether the engine ended a choice without finishing it."""
        return any(choice.finish_reason in _GIVEN_UP for choice in self.choices)


_decode_chunk = msgspec.json.Decoder(Chunk).decode


class BrokenStreamError(ServingError):
    """What the engine sent is no answer, or only part of one."""

    kind = "broken_stream"


def read_whole(body: bytes, *, choices: int = 1) -> Chunk:
    """An answer of so many choices that came whole; BrokenStreamError where it is not finished."""
    try:
        answer = _decode_chunk(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BrokenStreamError(f"the engine's answer is no completion: {error}") from None
    if answer.given_up or sum(choice.finish_reason is not None for choice in answer.choices) < choices:
        raise BrokenStreamError("the engine ended the answer before it was finished")
    return answer


class EventRelay:
    """Takes bytes as they come, gives whole events to pass on, and knows whether all `choices` were finished.

    The final event with the usage is passed on only where the client asked for it (`passes_usage`).
    """

    __slots__ = ("_choices", "_finished", "_held", "_passes_usage", "done", "input_tokens", "output_tokens")

    def __init__(self, *, passes_usage: bool, choices: int = 1) -> None:
        self._held = b""
        self._passes_usage = passes_usage
        self._choices = choices
        self._finished: set[int] = set()
        self.done = False
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None

    def feed(self, data: bytes) -> bytes:
        """The whole events in what has come so far. BrokenStreamError for what is no event, an error, an early end.

        What came whole before the fault is lost with it: the error takes its place.
        """
        data = self._held + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._held = data.split(b"\n\n")
        if len(self._held) > MOST_EVENT_BYTES:
            raise BrokenStreamError(f"the engine sent an event of more than {MOST_EVENT_BYTES} bytes")
        return b"".join([event + b"\n\n" for event in events if self._passes(event)])

    def _passes(self, event: bytes) -> bool:
        if not event.startswith(b"data:"):
            return event.startswith(b":")  # a comment keeps the connection alive
        content = event[5:].strip()
        if content == b"[DONE]":
            self.end()
            self.done = True
            return True
        try:
            chunk = _decode_chunk(content)
        except (msgspec.MsgspecError, RecursionError):
            raise BrokenStreamError("the engine sent an event that is no piece of a completion") from None
        if chunk.error is not None:
            raise BrokenStreamError("the engine reports that it failed")
        if chunk.given_up:
            raise BrokenStreamError("the engine ended the answer before it was finished")
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
        if chunk.usage is not None:
            self.input_tokens, self.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        return bool(chunk.choices) or self._passes_usage

    def end(self) -> None:
        """The connection has ended; BrokenStreamError where the answer had not."""
        if len(self._finished) < self._choices:
            raise BrokenStreamError("the engine ended the answer before it was finished")
