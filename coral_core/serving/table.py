"""Who serves what: the instances of each model, their state and load, and whose turn it is.

One event loop owns a table; its calls are short, idempotent where they set something, and never wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from coral_core.domain.fleet import INSTANCE_NAME
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError, ServingError, unknown_name
from coral_core.routing import Rotation, max_handover_s, max_wait_s

URL: Final = re.compile(r"http://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_WEIGHTS: Final = (1e-9, 1e15)
_MEAN_TOKENS: Final = (1e-3, 1e9)
"""What can be told apart when weights are divided by these and added up; beyond them a pool could not be routed at all."""
_LEAST_SHARE: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTerms:
    """A model as it is promised: its SLO, the mean lengths that turn tokens/s into requests/s, and the time of a prompt.

    Raises InputError for mean lengths that no requests have.
    `prompt_s`: what a mean prompt takes on an idle instance; `planned_tpot_frac`: the share of the TPOT that the plan's
    decode instances were laid out for (what is left of it bounds the wait for decode).
    """

    name: str
    slo: Slo
    mean_input_tokens: float
    mean_output_tokens: float
    prompt_s: float = 0.0
    planned_tpot_frac: float = 1.0

    def __post_init__(self) -> None:
        for what in ("mean_input_tokens", "mean_output_tokens"):
            if not _MEAN_TOKENS[0] <= getattr(self, what) <= _MEAN_TOKENS[1]:
                least, most = _MEAN_TOKENS
                raise InputError(f"must be from {least:g} to {most:g}", where=f"{self.name}.{what}")

    @property
    def max_wait_s(self) -> float:
        """How long a request may queue for its first token."""
        return max_wait_s(self.slo.ttft_s, self.prompt_s)

    @property
    def max_handover_s(self) -> float:
        """How long a request may wait to be taken over for decode."""
        return max_handover_s(self.slo.tpot_s, self.planned_tpot_frac, self.mean_output_tokens)

    def requests_per_s(self, phase: Phase, weight: float) -> float:
        """T(tau) as requests/s: prefill counts prompt tokens/s, decode generated tokens/s, aggregated requests/s."""
        tokens = {Phase.PREFILL: self.mean_input_tokens, Phase.DECODE: self.mean_output_tokens}
        return weight / tokens.get(phase, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """A serving instance as the gateway is told of it. `weight` is T(tau) in its template's unit; 0: no new requests.

    Raises InputError for a name or URL that cannot be one, or a weight that is none.
    """

    name: str
    model: str
    phase: Phase
    url: str
    region: str = "local"
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not INSTANCE_NAME.fullmatch(self.name):
            raise InputError(f"{self.name[:200]!r} is no name of an instance", where="name", fix="letters, digits, ._-")
        if not (found := URL.fullmatch(self.url)) or not 0 < int(found[1] or 80) <= 65535:
            raise InputError(f"{self.url[:200]!r} is no address", where=f"{self.name}.url", fix="http://HOST:PORT")
        _checked_weight(self.weight, self.name)


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """An instance at work. `reported`: what its agent last said, if any; `closed_until_s`: set aside after failures.

    `weight_frac`: what of its throughput is left, as its agents say. `failed`: why it was given up for good, if it was. `on_gone` is called when it stops answering: streams from it may never end by themselves.
    """

    spec: InstanceSpec
    weight: float
    draining: bool = False
    answers: bool = False
    reported: bool | None = None
    weight_frac: float = 1.0
    failed: str = ""
    in_flight: int = 0
    failures: int = 0
    silent_probes: int = 0
    closed_until_s: float = 0.0
    on_gone: set[Callable[[], None]] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        """Whether it answers and nobody says otherwise."""
        return self.answers and self.reported is not False

    @property
    def routed_weight(self) -> float:
        """What it is routed by: of its weight what is left."""
        return self.weight * self.weight_frac

    @property
    def takes_requests(self) -> bool:
        """Whether it may get new requests."""
        return self.ready and not self.draining and self.weight > 0


@dataclass(slots=True, kw_only=True)
class ModelPool:
    """One model's members and whose turn it is: to begin a request (aggregated, prefill), and to decode, per region."""

    terms: ModelTerms
    members: dict[str, Member] = field(default_factory=dict)
    begin: Rotation = field(default_factory=lambda: Rotation.of({}))
    decode: dict[str, Rotation] = field(default_factory=dict)
    unheard: int = 0
    handing: int = 0

    def in_phase(self, *phases: Phase) -> list[Member]:
        """Members of these phases that may get new requests."""
        return [one for one in self.members.values() if one.takes_requests and one.spec.phase in phases]

    def rate(self, members: Iterable[Member]) -> float:
        """Requests/s that these serve together."""
        return sum(self.terms.requests_per_s(one.spec.phase, one.routed_weight) for one in members)


class RoutingTable:
    """All models and their instances. Models are fixed, instances come and go."""

    def __init__(self, models: Iterable[ModelTerms], *, eject_s: float = 10.0, eject_after: int = 3) -> None:
        self.pools = {terms.name: ModelPool(terms=terms) for terms in models}
        self._of: dict[str, ModelPool] = {}
        self._eject_s = eject_s
        self._eject_after = eject_after

    @property
    def members(self) -> list[Member]:
        """Every instance, by model."""
        return [one for pool in self.pools.values() for one in pool.members.values()]

    def find(self, name: str) -> Member | None:
        """The instance of this name."""
        pool = self._of.get(name)
        return pool.members[name] if pool else None

    def register(self, spec: InstanceSpec) -> Member:
        """Add an instance; the same again changes its weight only, a different one of this name takes its place.

        Raises InputError for a model that is not served here.
        """
        if spec.model not in self.pools:
            raise unknown_name("model", spec.model, self.pools, where=f"{spec.name}.model")
        known = self.find(spec.name)
        if known and _identity(known.spec) == _identity(spec):
            self.set_weight(spec.name, spec.weight)
            return known
        self.remove(spec.name)
        member = Member(spec=spec, weight=spec.weight)
        self._of[spec.name] = self.pools[spec.model]
        self._of[spec.name].members[spec.name] = member
        self._rebuild(self._of[spec.name])
        return member

    def remove(self, name: str) -> None:
        """Forget an instance; what it is at work on goes on."""
        pool = self._of.pop(name, None)
        if pool:
            del pool.members[name]
            self._rebuild(pool)

    def set_weight(self, name: str, weight: float) -> None:
        """Route in proportion to `weight`; above 0 also ends its draining. 0 for an unknown one is done already."""
        _checked_weight(weight, name)
        member = self.find(name)
        if member is None:
            if weight > 0:
                raise ServingError(f"instance {name!r} is not known", fix="register it first, with its address")
            return
        if (member.weight, member.draining) != (weight, member.draining and weight == 0):
            member.weight, member.draining = weight, member.draining and weight == 0
            self._rebuild(self._of[name])

    def drain(self, name: str) -> bool:
        """Give it no new requests; True once none is in flight, or where it is not known."""
        member = self.find(name)
        if member is None:
            return True
        member.draining = True
        self._reopen(self._of[name])
        return member.in_flight == 0

    def report(self, name: str, *, ready: bool, failed: str = "", weight_frac: float = 1.0) -> None:
        """What the instance's agents say of it; `False` holds until they say `True`. `failed`: why it is given up for good.

        `weight_frac`: it is routed by so much of its weight; a change explains its failures so far. Raises ServingError if not
        known, InputError for one that is ready and failed, or a share that is none.
        """
        if not _LEAST_SHARE <= weight_frac <= 1:
            raise InputError(f"{weight_frac!r} is no share: above 0, at most 1", where=f"{name}.weight_frac")
        if ready and failed:
            raise InputError("is ready and failed at once", where=f"{name}.readiness")
        member = self.find(name)
        if member is None:
            raise ServingError(f"instance {name!r} is not known", fix="register it first, with its address")
        member.reported, member.failed = ready, failed
        if member.weight_frac != weight_frac:
            member.weight_frac = weight_frac
            member.failures, member.closed_until_s = 0, 0.0  # what failed did so with the node that is lost
            self._rebuild(self._of[name])
        self._reopen(self._of[name])
        for call in tuple(member.on_gone) if failed else ():
            call()

    def probed(self, member: Member, *, answers: bool | None, now_s: float) -> None:
        """The outcome of asking the engine; None: no answer in time, which a busy one may miss once or twice.

        One that was set aside comes back once its time is over.
        """
        gone = answers is False and member.answers
        member.silent_probes = member.silent_probes + 1 if answers is None else 0
        if answers and now_s < member.closed_until_s:
            return
        member.answers = bool(answers) or (
            answers is None and member.answers and member.silent_probes < self._eject_after
        )
        self._touch(member)
        for call in tuple(member.on_gone) if gone else ():
            call()

    def failed(self, member: Member, *, gone: bool, now_s: float) -> None:
        """A request failed there. Gone (no connection): closed until it answers a probe.

        Otherwise it is set aside after several in a row, unless no other serves its phase: then it is the best there is.
        """
        member.failures += 1
        pool = self.pools[member.spec.model]
        if gone:
            member.answers = False
        elif member.failures >= self._eject_after and pool.in_phase(member.spec.phase) != [member]:
            member.answers, member.closed_until_s, member.failures = False, now_s + self._eject_s, 0
        self._touch(member)

    def first(self, model: str, excluding: Collection[str] = ()) -> Member | None:
        """Who begins the next request: an aggregated instance, or a prefill one whose region can decode."""
        pool = self.pools[model]
        return _next(pool.begin, pool, excluding)

    def decoder(self, model: str, region: str, excluding: Collection[str] = ()) -> Member | None:
        """Who decodes what was prefilled in `region`."""
        pool = self.pools[model]
        return _next(pool.decode[region], pool, excluding) if region in pool.decode else None

    def whole(self, model: str, excluding: Collection[str] = ()) -> Member | None:
        """Who does a whole request alone: an aggregated instance, else a decode one, which computes the prompt itself."""
        pool = self.pools[model]
        prefill = [name for name, one in pool.members.items() if one.spec.phase is Phase.PREFILL]
        found = _next(pool.begin, pool, {*excluding, *prefill})
        for region in pool.decode:
            found = found or self.decoder(model, region, excluding)
        return found

    def _touch(self, member: Member) -> None:
        """Reopen its pool; an instance that has been removed is in none."""
        if self.find(member.spec.name) is member:
            self._reopen(self._of[member.spec.name])

    def _rebuild(self, pool: ModelPool) -> None:
        """The rotations anew: weights or members have changed."""
        weights: dict[Phase | str, dict[str, float]] = {}
        for name, one in pool.members.items():
            if one.weight > 0:
                key = one.spec.region if one.spec.phase is Phase.DECODE else Phase.AGGREGATED
                weights.setdefault(key, {})[name] = pool.terms.requests_per_s(one.spec.phase, one.routed_weight)
        pool.begin = Rotation.of(weights.pop(Phase.AGGREGATED, {}))
        pool.decode = {str(region): Rotation.of(found) for region, found in weights.items()}
        self._reopen(pool)

    def _reopen(self, pool: ModelPool) -> None:
        """Who takes part now."""
        decoding = {one.spec.region for one in pool.in_phase(Phase.DECODE)}
        for rotation in (pool.begin, *pool.decode.values()):
            for name in rotation.names:
                one = pool.members[name]
                able = one.spec.phase is not Phase.PREFILL or one.spec.region in decoding
                rotation.set_open(name, is_open=one.takes_requests and able)


def _next(rotation: Rotation, pool: ModelPool, excluding: Collection[str]) -> Member | None:
    try:
        return pool.members[rotation.pick(excluding=excluding)]
    except ServingError:
        return None


def _identity(spec: InstanceSpec) -> tuple[str, ...]:
    return (spec.model, spec.phase, spec.url, spec.region)


def _checked_weight(weight: float, name: str) -> None:
    least, most = _WEIGHTS
    if weight != 0 and not least <= weight <= most:
        what = f"{weight!r} is no weight: 0, or its throughput ({least:g} to {most:g})"
        raise InputError(what, where=f"{name}.weight")


def by_region(members: Iterable[Member]) -> Mapping[str, list[Member]]:
    """Members by where they are."""
    found: dict[str, list[Member]] = {}
    for one in members:
        found.setdefault(one.spec.region, []).append(one)
    return found
