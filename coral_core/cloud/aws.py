"""AWS through boto3: one call is one request, and every failure has a code. The only file that imports boto3.

Credentials and endpoints come from boto3's own settings (environment, profile, instance role, AWS_ENDPOINT_URL_EC2).
botocore retries nothing here: no capacity comes as HTTP 500 and it would repeat that, and the executor has its own policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004  # botocore's own name
    EndpointConnectionError,
    HTTPClientError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

from coral_core.cloud.aws_codes import AwsError

_CODES: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...]] = (
    ((NoCredentialsError, PartialCredentialsError, ProfileNotFound), "NoCredentials"),
    ((UnauthorizedSSOTokenError, SSOTokenLoadError, TokenRetrievalError), "ExpiredToken"),
    ((InvalidRegionError, NoRegionError), "InvalidRegion"),
    (EndpointConnectionError, "NoConnection"),
    ((ReadTimeoutError, ConnectionError, HTTPClientError, ResponseParserError), "NoAnswer"),
)


class Boto3Api:
    """Implements `aws_codes.AwsApi` with boto3 clients, one for each service and region. Not for use by many threads."""

    def __init__(
        self, *, profile: str | None = None, connect_timeout_s: float = 5.0, read_timeout_s: float = 15.0
    ) -> None:
        self._profile = profile
        self._config = Config(
            connect_timeout=connect_timeout_s,
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        self._clients: dict[tuple[str, str], Any] = {}
        self.request_timeout_s = connect_timeout_s + read_timeout_s

    def call(self, service: str, region: str, operation: str, **parameters: Any) -> Mapping[str, Any]:  # noqa: ANN401  # the API's own shapes
        """One request. Raises AwsError with the service's code; see `aws_codes` for what the codes mean."""
        try:
            answer: Mapping[str, Any] = getattr(self._client(service, region), operation)(**parameters)
        except ClientError as error:
            detail = error.response.get("Error", {})
            raise AwsError(detail.get("Code", "Unknown"), detail.get("Message", str(error)), operation) from error
        except (BotoCoreError, ResponseParserError) as error:
            code = next((code for kinds, code in _CODES if isinstance(error, kinds)), type(error).__name__)
            raise AwsError(code, str(error), operation) from error
        return answer

    def _client(self, service: str, region: str) -> Any:  # noqa: ANN401  # boto3 makes its classes at run time
        key = (service, region)
        if key not in self._clients:
            # boto3 knows services by name only at run time; its stubs want a literal.
            session = boto3.Session(profile_name=self._profile)
            self._clients[key] = session.client(service, region_name=region, config=self._config)  # type: ignore[call-overload]
        return self._clients[key]
