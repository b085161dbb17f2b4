"""What tests ask of a gateway with the official client: the tokens of an answer, and long streams that faults meet."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

import openai

from tests.fakes.local_fleet import TOKENS


def tokens(client: openai.OpenAI, model: str, prompt: str) -> list[int]:
    """The greedy answer, as the plain engine gives it too."""
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"return_token_ids": True}
    )
    return answer.choices[0].model_extra["token_ids"]


class LongAnswer(threading.Thread):
    """One long greedy answer: the `tokens` that came; `ended` holds the finish reasons that came, and the error that ended it."""

    def __init__(
        self, client: openai.OpenAI, model: str, *, most_tokens: int = 1500, prompt: str = "on and on"
    ) -> None:
        super().__init__(daemon=True)
        self.client, self.begun = client, threading.Event()
        self.asked: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": most_tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }
        self.tokens: list[int] = []
        self.ended: list[Any] = []
        self.ended_s: float | None = None

    @property
    def whole(self) -> bool:
        """Whether all of it came."""
        return self.ended[-1:] == ["length"]

    def run(self) -> None:
        try:
            self.ask()
        except openai.OpenAIError as error:
            self.ended.append(error)
        self.ended_s = time.monotonic()

    def ask(self) -> None:
        """Not streamed: nothing comes before all of it is there."""
        self.begun.set()
        self.take(self.client.completions.create(**self.asked).choices[0])

    def take(self, choice: Any) -> None:
        self.tokens += (choice.model_extra or {}).get("token_ids") or ()
        self.ended.append(choice.finish_reason)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join(timeout=60)


class LongStream(LongAnswer):
    """The same as a stream."""

    def ask(self) -> None:
        for piece in self.client.completions.create(**self.asked, stream=True):
            self.begun.set()
            self.take(piece.choices[0])
