"""API keys: only their hashes are kept. A key is 32 random bytes, so that one round of SHA-256 is all its hash needs."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from coral_core.errors import InputError
from coral_core.serving.limits import KeyLimiter, KeyTerms
from coral_core.serving.refusals import RefusedError

PREFIX: Final = "sk-coral-"
LEAST_CHARACTERS: Final = 32
"""Shorter keys can be guessed from their hash."""
HASH_PATTERN: Final = r"^sha256:[0-9a-f]{64}$"


def new_key() -> str:
    """A key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What the keys file holds of a key. InputError for one that is too short or no printable ASCII without blanks."""
    if not re.fullmatch(r"[!-~]+", key):
        raise InputError("the key has characters other than printable ASCII, or blanks", where="key")
    if len(key) < LEAST_CHARACTERS or len(set(key)) < 10:
        raise InputError(
            f"the key is easy to guess: at least {LEAST_CHARACTERS} characters, 10 of them different",
            where="key",
            fix="let `coral gateway hash-key --new` make one",
        )
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One key: its name (for people), the hash, and its limits."""

    name: str
    key_hash: str
    terms: KeyTerms


class KeyRing:
    """Finds the limiter of a request's key. Raises InputError for hashes that are none or that come twice."""

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        self._found: dict[bytes, list[tuple[bytes, KeyLimiter]]] = defaultdict(list)
        seen: dict[str, str] = {}
        for record in records:
            if not re.fullmatch(HASH_PATTERN, record.key_hash):
                raise InputError("is no hash of a key", where=record.name, fix="make one: coral gateway hash-key")
            if record.key_hash in seen:
                raise InputError(f"has the same key as {seen[record.key_hash]}", where=record.name)
            seen[record.key_hash] = record.name
            digest = bytes.fromhex(record.key_hash.partition(":")[2])
            self._found[digest[:2]].append((digest, KeyLimiter(record.terms)))
        self._anybody = None if seen else KeyLimiter(KeyTerms())

    @property
    def is_open(self) -> bool:
        """Whether anybody may ask."""
        return self._anybody is not None

    def limiter(self, authorization: bytes | None) -> KeyLimiter:
        """The limiter of the key in the header Authorization; RefusedError (401).

        The whole digest is compared in constant time; two of its bytes choose with which, and tell nothing of the key.
        """
        if self._anybody is not None:
            return self._anybody
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() == b"bearer" and token:
            digest = hashlib.sha256(token.strip()).digest()
            for known, limiter in self._found.get(digest[:2], ()):
                if hmac.compare_digest(known, digest):
                    return limiter
        raise unauthorized("the API key is missing" if not token else "the API key is not known")


def unauthorized(what: str) -> RefusedError:
    """401, as OpenAI answers it."""
    return RefusedError(
        what,
        status=401,
        error_type="authentication_error",
        code="invalid_api_key",
        fix="send the header Authorization: Bearer KEY",
    )
