"""The port to AWS's API, and what its error codes mean: each is retried, reported or turned into a refusal by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from coral_core.cloud.provisioner import CloudBusyError, Refusal
from coral_core.errors import ProvisionError


class AwsError(Exception):
    """A failed call: the service's code (or ours for what never reached it), its message, the operation.

    Stays inside the AWS adapters, which turn it into a refusal or a ProvisionError.
    """

    def __init__(self, code: str, message: str, operation: str) -> None:
        super().__init__(code, message, operation)
        self.code, self.message, self.operation = code, " ".join(message.split())[:300], operation


class AwsApi(Protocol):
    """Calls to AWS by service, region and operation (boto3's names). Raises AwsError."""

    request_timeout_s: float

    def call(self, service: str, region: str, operation: str, **parameters: Any) -> Mapping[str, Any]:  # noqa: ANN401  # the API's own shapes
        """One request, never repeated."""
        ...


REFUSALS: Final[Mapping[str, Refusal]] = {
    "InsufficientInstanceCapacity": Refusal.CAPACITY,
    "InsufficientHostCapacity": Refusal.CAPACITY,
    "InsufficientReservedInstanceCapacity": Refusal.CAPACITY,
    "InsufficientCapacity": Refusal.CAPACITY,
    "InsufficientCapacityOnOutpost": Refusal.CAPACITY,
    "InsufficientVolumeCapacity": Refusal.CAPACITY,
    "InsufficientAddressCapacity": Refusal.CAPACITY,
    "UnfulfillableCapacity": Refusal.CAPACITY,
    "SpotMaxPriceTooLow": Refusal.CAPACITY,
    "InsufficientFreeAddressesInSubnet": Refusal.CAPACITY,
    "Unsupported": Refusal.NOT_OFFERED,
    "VcpuLimitExceeded": Refusal.QUOTA,
    "InstanceLimitExceeded": Refusal.QUOTA,
    "MaxSpotInstanceCountExceeded": Refusal.QUOTA,
    "RequestLimitExceeded": Refusal.THROTTLED,
    "Throttling": Refusal.THROTTLED,
    "ThrottlingException": Refusal.THROTTLED,
    "RequestThrottled": Refusal.THROTTLED,
    "TooManyRequestsException": Refusal.THROTTLED,
    "EC2ThrottledException": Refusal.THROTTLED,
    "ThrottledException": Refusal.THROTTLED,
    "RequestThrottledException": Refusal.THROTTLED,
    "BandwidthLimitExceeded": Refusal.THROTTLED,
    "SlowDown": Refusal.THROTTLED,
    "PriorRequestNotComplete": Refusal.THROTTLED,
    "NoConnection": Refusal.UNKNOWN,
    "NoAnswer": Refusal.UNKNOWN,
    "InternalError": Refusal.UNKNOWN,
    "InternalFailure": Refusal.UNKNOWN,
    "InternalServerError": Refusal.UNKNOWN,
    "InternalErrorException": Refusal.UNKNOWN,
    "ServerInternal": Refusal.UNKNOWN,
    "ServiceException": Refusal.UNKNOWN,
    "ServiceUnavailable": Refusal.UNKNOWN,
    "ServiceUnavailableException": Refusal.UNKNOWN,
    "Unavailable": Refusal.UNKNOWN,
    "RequestTimeout": Refusal.UNKNOWN,
    "RequestTimeoutException": Refusal.UNKNOWN,
    # A proxy's page without a code of the service: botocore gives the status.
    **dict.fromkeys(("500", "502", "503", "504"), Refusal.UNKNOWN),
    "IdempotentParameterMismatch": Refusal.CONFLICT,
}
"""Codes of RunInstances that are outcomes, not faults (EC2 API reference, "Error codes")."""

_CREDENTIALS = "check the access key, the profile or the role that the flow runs with"
_FIXES: Final[Mapping[str, str]] = {
    "NoCredentials": "configure AWS credentials: a profile, environment variables or an instance role",
    "AuthFailure": _CREDENTIALS,
    "InvalidClientTokenId": _CREDENTIALS,
    "UnrecognizedClientException": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidAccessKeyId": _CREDENTIALS,
    "ExpiredToken": "renew the credentials (log in again), then run again: the run goes on where it was",
    "ExpiredTokenException": "renew the credentials (log in again), then run again: the run goes on where it was",
    "RequestExpired": "renew the credentials, and check this machine's clock",
    "UnauthorizedOperation": "grant the flow's role this action",
    "AccessDenied": "grant the flow's role this action",
    "AccessDeniedException": "grant the flow's role this action",
    "OptInRequired": "subscribe the account to the service or enable the region",
    "PendingVerification": "the account is being verified by AWS: wait, or ask its support",
    "Blocked": "the account is blocked: ask AWS support",
    "InvalidRegion": "correct the region's name",
}


def as_failure(error: AwsError, *, where: str) -> ProvisionError:
    """The expected failure that a code means: CloudBusyError where repeating helps, else ProvisionError with the fix."""
    text = f"{error.operation}: {error.code}: {error.message}"
    refusal = REFUSALS.get(error.code)
    if refusal is not None and refusal.passing:
        return CloudBusyError(text, where=where)
    return ProvisionError(text, where=where, fix=_FIXES.get(error.code, ""))


def pages(
    api: AwsApi,
    service: str,
    region: str,
    operation: str,
    key: str,
    **parameters: Any,  # noqa: ANN401  # as above
) -> Iterator[Any]:
    """All items under `key` of an operation that pages with NextToken. Raises AwsError."""
    while True:
        answer = api.call(service, region, operation, **parameters)
        yield from answer.get(key, ())
        token = answer.get("NextToken")
        if not token:
            return
        parameters = {**parameters, "NextToken": token}
