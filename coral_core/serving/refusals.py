"""What the gateway answers instead of tokens: an error in OpenAI's shape, with its status and when to come back."""

from __future__ import annotations

import math

import msgspec

from coral_core.errors import ServingError


class RefusedError(ServingError):
    """A request that gets an error: its HTTP status, and OpenAI's `type`, `code` and `param`.

    `retry_after_s` (>= 0) becomes the header Retry-After, in whole seconds and at least one.
    """

    kind = "refused"

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        error_type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        where: str = "",
        fix: str = "",
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.status = status
        self.error_type = error_type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        """The JSON document {"error": {message, type, param, code}}."""
        error = {"message": str(self), "type": self.error_type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After where there is one, and for 401 how to authenticate."""
        found = []
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found


def bad_request(what: str, *, param: str | None = None, code: str | None = None, fix: str = "") -> RefusedError:
    """400: the client has to change the request."""
    return RefusedError(what, param=param, code=code, fix=fix)


def unknown_model(name: str) -> RefusedError:
    """404, as OpenAI answers it."""
    return RefusedError(
        f"the model {name[:100]!r} does not exist",
        status=404,
        code="model_not_found",
        param="model",
        fix="see /v1/models",
    )


def not_ready(what: str, retry_after_s: float, *, code: str = "model_not_ready") -> RefusedError:
    """503: the request is fine, there is nobody to serve it now."""
    return RefusedError(what, status=503, error_type="server_error", code=code, retry_after_s=retry_after_s)


def too_many(what: str, retry_after_s: float, *, code: str) -> RefusedError:
    """429: later, or slower."""
    return RefusedError(what, status=429, error_type="rate_limit_error", code=code, retry_after_s=retry_after_s)
