"""A completion request: checked as far as the gateway depends on it, and rewritten for each engine that serves it.

What the engines alone understand is left to them; they answer 400 themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from coral_core.serving.refusals import bad_request

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
PRODUCE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Tells a prefill engine to keep the KV cache for a decode engine to fetch."""
_NOT_FOR_PREFILL: Final = ("stream_options", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs")
_FOR_ENGINES_ONLY: Final = ("kv_transfer_params", "ec_transfer_params")
"""They name hosts and memory of other engines: never taken from a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request for one model. `choices`: how many answers it gets, over all its prompts; `computed`: how many are made for it."""

    path: str
    model: str
    stream: bool
    wants_usage: bool
    choices: int
    computed: int
    document: dict[str, Any]

    @property
    def transferable(self) -> bool:
        """One prompt, one answer, whose KV cache can go from prefill to decode: a first fetch of several would free it."""
        return self.computed == 1

    def whole_body(self, kv_transfer_params: dict[str, Any] | None = None) -> bytes:
        """For the engine that gives the answer; of a stream it reports the usage at the end, for the measurements."""
        document = self.document
        if self.stream:
            document = {**document, "stream_options": {**(document.get("stream_options") or {}), "include_usage": True}}
        if kv_transfer_params is not None:
            document = {**document, "kv_transfer_params": kv_transfer_params}
        return _encoded(document)

    def prefill_body(self) -> bytes:
        """For a prefill engine: the prompt and one token that nobody hears."""
        document = {name: value for name, value in self.document.items() if name not in _NOT_FOR_PREFILL}
        limit = "max_completion_tokens" if "max_completion_tokens" in document else "max_tokens"
        return _encoded({**document, "stream": False, "max_tokens": 1, limit: 1, "kv_transfer_params": PRODUCE})


def parse_request(path: str, body: bytes) -> CompletionRequest:
    """The request in `body`; RefusedError (400) names the parameter that is wrong."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is no JSON: {error}"[:300], code="invalid_json") from None
    if not isinstance(document, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    extra = document.get("vllm_xargs")  # vLLM looks for them there too
    for name in _FOR_ENGINES_ONLY:
        if name in document or (isinstance(extra, dict) and name in extra):
            raise bad_request(f"{name} cannot be given by clients", param=name, code="unsupported_parameter")
    model = _required(document, "model", str)
    stream = _optional(document, "stream", bool)
    options = _optional(document, "stream_options", dict)
    if options is not None and not stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    for name in ("max_tokens", "max_completion_tokens", "n", "best_of"):
        count = _optional(document, name, int)
        if count is not None and count < 1:
            raise bad_request(f"{name} must be at least 1, not {count}", param=name)
    prompts = _prompts(path, document)
    answers = document.get("n") or 1
    return CompletionRequest(
        path=path,
        model=model,
        stream=bool(stream),
        wants_usage=bool(options and options.get("include_usage")),
        choices=prompts * answers,
        computed=prompts * max(answers, document.get("best_of") or 1),
        document=document,
    )


def _encoded(document: dict[str, Any]) -> bytes:
    """As JSON; RefusedError for what could just be read, but nests too deep to be written further down the stack."""
    try:
        return msgspec.json.encode(document)
    except RecursionError:
        raise bad_request("the body nests too deep", code="invalid_json") from None


def _prompts(path: str, document: dict[str, Any]) -> int:
    """How many prompts there are."""
    if path == CHAT:
        messages = _required(document, "messages", list)
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise bad_request(f"messages[{number}] must be an object with a role", param=f"messages[{number}]")
        return 1
    prompt = _required(document, "prompt", (str, list))
    if isinstance(prompt, str) or all(type(token) is int for token in prompt):
        return 1
    if all(isinstance(one, str) for one in prompt) or all(_is_tokens(one) for one in prompt):
        return len(prompt)
    raise bad_request("prompt must be a text, a list of texts, a list of tokens, or a list of these", param="prompt")


def _is_tokens(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _required(document: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:  # noqa: ANN401 - JSON
    value = _optional(document, name, kind)
    if not value:
        raise bad_request(f"{name} is required and must not be empty", param=name, code="missing_required_parameter")
    return value


def _optional(document: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:  # noqa: ANN401 - JSON
    """The value, None where it is absent or null. True is no number here, though Python says so."""
    value = document.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        names = {str: "a text", bool: "true or false", dict: "an object", int: "a whole number", list: "a list"}
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise bad_request(f"{name} must be {' or '.join(names[one] for one in kinds)}", param=name, code="invalid_type")
    return value
