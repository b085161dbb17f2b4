"""What went wrong with a store, from the errors of its library and of the system: what to call it and what to do."""

from __future__ import annotations

import re
from typing import Final

from coral_core.errors import StoreError, StoreUnreachableError

_CREDENTIALS_FIX: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where an instance profile gives them"
_RIGHTS_FIX: Final = f"{_CREDENTIALS_FIX}; allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on it"
_FOLDER_FIX: Final = "give this user the right to read and write the folder"
_NO_ANSWER: Final = re.compile("error sending request|body error|timed out|Connect")
_SERVER_FAULT: Final = re.compile(r"status code: 5\d\d")
_WRONG_KEY: Final = re.compile("InvalidAccessKeyId|SignatureDoesNotMatch")


def explained(error: Exception, *, action: str, where: str, store_url: str) -> StoreError:
    """The error to raise for one of obstore or of the system, met at `where` while `action` (writing, reading, ...)."""
    text, name, is_s3 = str(error), type(error).__name__, store_url.startswith("s3:")
    kind, what, fix = StoreError, f"failed while {action}: {first_line(error)}", ""
    if is_missing_bucket(error):
        what, fix = "the bucket does not exist", "create it, or correct the store's URL"
    elif name == "UnauthenticatedError" or _WRONG_KEY.search(text):
        what, fix = "the credentials are wrong", _CREDENTIALS_FIX
    elif name in {"PermissionDeniedError", "PermissionError"} or "Permission denied" in text:
        what, fix = f"permission denied while {action}", _RIGHTS_FIX if is_s3 else _FOLDER_FIX
    elif "/latest/" in text or "credential" in text.lower():  # the first is the path of the instance metadata service
        what, fix = f"no credentials were found: {first_line(error)}", _CREDENTIALS_FIX
    elif is_s3 and _SERVER_FAULT.search(text):
        kind, what = StoreUnreachableError, f"the store fails by itself while {action}: {first_line(error)}"
        fix = "try again later, with fewer writers at once"
    elif is_s3 and _NO_ANSWER.search(text):
        kind, what = StoreUnreachableError, f"the store cannot be reached while {action}: {first_line(error)}"
        fix = "check AWS_ENDPOINT_URL_S3, AWS_REGION and the network"
    return kind(what, where=where, fix=fix)


def is_missing_bucket(error: Exception) -> bool:
    """Whether the error is about the bucket and not about an object."""
    return "NoSuchBucket" in str(error)


def first_line(error: Exception) -> str:
    """The library's errors go on with pages of debugging output."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
