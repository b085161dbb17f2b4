"""Asks an engine over HTTP: whether it answers, what it serves, its metrics, and for one real token.

Every question has a time limit and one answer for all that can go wrong: None.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from coral_core.engine.scrape import EngineSample, engine_sample

LOOK_S = 2.0
"""Seconds that a question gets which an engine answers without a step."""
MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """The engine at `url` (`http://HOST:PORT`)."""

    url: str

    def listens(self) -> bool:
        """Whether it says that it is healthy; of a pipeline over nodes that proves little."""
        return self._ask("GET", "/health", LOOK_S) is not None

    def served_model(self) -> str | None:
        """The first name that it serves."""
        try:
            return str(json.loads(self._ask("GET", "/v1/models", LOOK_S) or b"")["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            return None

    def sample(self) -> EngineSample | None:
        """Its metrics."""
        text = self._ask("GET", "/metrics", LOOK_S)
        return None if text is None else engine_sample(text.decode(errors="replace"))

    def one_token(self, model: str, timeout_s: float) -> bool:
        """Whether it completes a prompt by one token within `timeout_s`."""
        request = {"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        try:
            answer = json.loads(self._ask("POST", "/v1/completions", timeout_s, json.dumps(request)) or b"")
            return bool(answer["usage"]["completion_tokens"] == 1)
        except (ValueError, LookupError, TypeError):
            return False

    def _ask(self, method: str, path: str, timeout_s: float, body: str | None = None) -> bytes | None:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            with connection.getresponse() as response:
                return response.read(MOST_BYTES) if response.status == http.client.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
