"""Leases: at most one holder at a time may change a fleet, by put-if-absent and clocks alone.

`leases/<name>/<epoch>.json` is written once and never changed. Whoever writes the next epoch holds the lease until the
moment written in it; renewing is the next epoch by the same holder, giving back is a next epoch that is over at once.
Epochs have no gaps and are not removed, so the newest is found by asking for keys, not by trusting a listing.

Why two never act at once: a holder starts a call only where its own clock leaves time for all of it before `until`;
another one takes the lease only when its clock shows `until + skew_s`. So it holds as long as no two machines' clocks
differ by more than `skew_s`, and no call takes longer than its time limit. A holder that has died or hangs blocks the
next one for `duration_s + skew_s` at most.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from artifacts.canonical import canonical_json
from artifacts.keys import VERSION_DIGITS, lease_group, lease_key
from artifacts.store import Store
from coral_core.clock import Clock
from coral_core.cloud.ports import LeaseLostError
from coral_core.errors import InputError, StoreConflictError, StoreError

_SCHEMA_VERSION: Final = 1
_RENEW_BELOW_FRAC: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """How long one epoch lasts, and the most that the clocks of two machines may differ. InputError for other than > 0."""

    duration_s: float = 300.0
    skew_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("duration_s", self.duration_s), ("skew_s", self.skew_s)):
            if not 0 < value < math.inf:
                raise InputError(f"{value} is not a positive number of seconds", where=f"lease.{name}")


class _Epoch(BaseModel):
    """One epoch as it is stored. `token` tells holders of one name apart; `since` is when this holder began."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = _SCHEMA_VERSION
    name: str
    epoch: int = Field(ge=1)
    holder: str
    token: str
    since: AwareDatetime
    until: AwareDatetime
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken:
    """Somebody else holds the lease: who, since when, and until when at the latest unless it is renewed."""

    name: str
    epoch: int
    holder: str
    since: datetime
    until: datetime
    skew_s: float

    def __str__(self) -> str:
        return (
            f"fleet {self.name} is being changed by {self.holder} since {self.since:%Y-%m-%d %H:%M:%S} UTC; its lease "
            f"(epoch {self.epoch}) runs until {self.until:%H:%M:%S} UTC unless renewed, and may be taken {self.skew_s:g} s later"
        )


class Lease:
    """A lease that was taken; `guard` before every change. For one thread."""

    def __init__(self, store: Store, terms: LeaseTerms, clock: Clock, held: _Epoch, *, until_s: float) -> None:
        self._store, self._terms, self._clock = store, terms, clock
        self._held, self._until_s = held, until_s

    @property
    def name(self) -> str:
        """What it is a lease on."""
        return self._held.name

    @property
    def holder(self) -> str:
        """Who holds it, for people."""
        return self._held.holder

    @property
    def epoch(self) -> int:
        """The newest epoch of this holder."""
        return self._held.epoch

    @property
    def left_s(self) -> float:
        """Seconds left of the epoch: the least that wall and monotonic clock say, as either may have been held up."""
        wall_s = (self._held.until - self._clock.now()).total_seconds()
        return min(wall_s, self._until_s - self._clock.monotonic_s())

    def guard(self) -> float:
        """Seconds left, after reading again whether it is still ours and renewing it where less than half is left.

        Raises LeaseLostError, naming the new holder, where it is not; StoreError where the store does not answer.
        """
        self._read_again()
        if self.left_s < self._terms.duration_s * _RENEW_BELOW_FRAC:
            self._write_next(until_s=self._terms.duration_s, released=False)
        return self.left_s

    def give_back(self) -> None:
        """End it at once. Only for a holder with nothing under way that a successor could not see."""
        try:
            self._read_again()
            self._write_next(until_s=0.0, released=True)
        except LeaseLostError:
            return

    def _read_again(self) -> None:
        """Adopt renewals of ours whose answer was lost; LeaseLostError for anybody else's epoch."""
        if not self._store.exists(lease_key(self.name, self.epoch)):
            raise LeaseLostError(
                "its record was removed from the store",
                where=f"lease {self.name}",
                fix="never remove records of a lease that is held",
            )
        while (found := _find(self._store, self.name, self.epoch + 1)) is not None:
            self._adopt(found)

    def _adopt(self, found: _Epoch) -> None:
        if found.token != self._held.token:
            raise LeaseLostError(
                f"{found.holder} holds it since {found.since:%Y-%m-%d %H:%M:%S} UTC (epoch {found.epoch})",
                where=f"lease {self.name}",
                fix="let that run finish; this one must not go on",
            )
        left_s = (found.until - self._clock.now()).total_seconds()
        self._held, self._until_s = found, self._clock.monotonic_s() + left_s

    def _write_next(self, *, until_s: float, released: bool) -> None:
        now, now_s = self._clock.now(), self._clock.monotonic_s()  # before the put: what it takes is off the lease
        changes = {"epoch": self.epoch + 1, "until": now + timedelta(seconds=until_s), "released": released}
        wish = self._held.model_copy(update=changes)
        found = _write(self._store, wish)
        if found != wish:
            self._adopt(found)
            return
        self._held, self._until_s = wish, now_s + until_s


def take_lease(
    store: Store, name: str, *, holder: str, terms: LeaseTerms, clock: Clock, token: str | None = None
) -> Lease | LeaseTaken:
    """The lease, or who holds it. `token` (default: a new one) must differ between any two holders.

    Raises StoreError where the store does not answer or a record is damaged.
    """
    mine = token or uuid.uuid4().hex
    while True:
        newest = _newest(store, name)
        now, now_s = clock.now(), clock.monotonic_s()
        if newest is not None and not newest.released and now < newest.until + timedelta(seconds=terms.skew_s):
            return LeaseTaken(
                name=name,
                epoch=newest.epoch,
                holder=newest.holder,
                since=newest.since,
                until=newest.until,
                skew_s=terms.skew_s,
            )
        wish = _Epoch(
            name=name,
            epoch=1 if newest is None else newest.epoch + 1,
            holder=holder,
            token=mine,
            since=now,
            until=now + timedelta(seconds=terms.duration_s),
        )
        if _write(store, wish) == wish:
            return Lease(store, terms, clock, wish, until_s=now_s + terms.duration_s)


def read_lease(store: Store, name: str) -> LeaseTaken | None:
    """Who held the lease last, whether it has run out or not; None where nobody does or it was given back."""
    newest = _newest(store, name)
    if newest is None or newest.released:
        return None
    return LeaseTaken(
        name=name, epoch=newest.epoch, holder=newest.holder, since=newest.since, until=newest.until, skew_s=0.0
    )


def _write(store: Store, wish: _Epoch) -> _Epoch:
    """What now lies under the epoch's key: `wish`, or what was there before it."""
    try:
        store.put_if_absent(lease_key(wish.name, wish.epoch), canonical_json(wish.model_dump()))
    except StoreConflictError:
        # The client repeats a put whose answer was lost, so what is in the way may be our own.
        found = _find(store, wish.name, wish.epoch)
        if found is None:
            raise
        return found
    return wish


def _newest(store: Store, name: str) -> _Epoch | None:
    """The newest epoch, found in about 2 log2(epochs) requests; a listing beyond it allows for removed old ones."""

    def exists(epoch: int) -> bool:
        return store.exists(lease_key(name, epoch))

    low, high = 0, 1
    while exists(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    beyond = store.list_keys_after(lease_group(name), lease_key(name, low))
    later = [int(key.rsplit("/", 1)[-1].removesuffix(".json")) for key in beyond if _is_epoch(key)]
    newest = max(later, default=low)
    return _find(store, name, newest) if newest else None


def _is_epoch(key: str) -> bool:
    stem = key.rsplit("/", 1)[-1].removesuffix(".json")
    return len(stem) == VERSION_DIGITS and stem.isascii() and stem.isdigit()


def _find(store: Store, name: str, epoch: int) -> _Epoch | None:
    key = lease_key(name, epoch)
    data = store.find(key)
    if data is None:
        return None
    try:
        found = _Epoch.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}"
        raise StoreError(
            what, where=store.url_of(key), fix="the record is damaged: remove it when no run is acting"
        ) from None
    if (found.name, found.epoch, found.schema_version) != (name, epoch, _SCHEMA_VERSION):
        raise StoreError(
            f"is epoch {found.epoch} of {found.name} in schema {found.schema_version}",
            where=store.url_of(key),
            fix="the record is foreign: remove it when no run is acting",
        )
    return found
