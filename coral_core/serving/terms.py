"""The limits that the gateway keeps to, all with working values."""

from __future__ import annotations

from dataclasses import dataclass, fields

from coral_core.errors import InputError
from coral_core.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayTerms:
    """Sizes, times and counts. Raises InputError for one that is not above 0 (retries: below 0).

    `max_choices`: of how many answers a request may be, over all its prompts. `request_s` holds for a request as a whole; `first_byte_s` for the wait for an engine's first token; `stall_s` for any
    pause after it, be it the engine's or the client's, and `gone_stall_s` once the engine takes no connections any more: it
    may finish its streams, and it may never say that it has ended them. `probe_s`: engines are asked that often whether they answer.
    `eject_s`: for so long an instance is set aside after `eject_after` failures in a row.
    """

    max_body_bytes: int = 4 * MIB
    max_answer_bytes: int = 64 * MIB
    max_requests: int = 4096
    max_choices: int = 128
    max_retries: int = 1
    header_s: float = 10.0
    body_s: float = 30.0
    connect_s: float = 3.0
    first_byte_s: float = 120.0
    stall_s: float = 60.0
    gone_stall_s: float = 5.0
    request_s: float = 1800.0
    drain_s: float = 120.0
    probe_s: float = 2.0
    probe_timeout_s: float = 5.0
    eject_s: float = 10.0
    eject_after: int = 3
    retry_after_s: float = 10.0
    demand_every_s: float = 60.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (value >= 0 if item.name == "max_retries" else value > 0):
                raise InputError(f"is {value!r}, must be above 0", where=f"limits.{item.name}")
