"""Steps of vLLM's scheduler cut into entries, one per request, and put together again for each node.

A node's step may hold entries of several scheduler steps: whatever is ready, in the order in which it was scheduled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput

from coral_core.engine.plugin.stage_layout import Path

BlockIds = list[int]
_SHARE: Final = 1.25


@dataclass(slots=True, kw_only=True)
class Known:
    """Of a request that the node knows: CachedRequestData's fields, for one request."""

    resumed: bool
    new_token_ids: list[int]
    new_block_ids: tuple[BlockIds, ...] | None
    num_computed_tokens: int
    num_output_tokens: int


@dataclass(slots=True, kw_only=True)
class Entry:
    """`tokens` of one request in one scheduler step, as one node gets it. `after`: the node of the next stage, if any."""

    step: int
    request_id: str
    tokens: int
    after: str | None
    new: NewRequestData | None
    known: Known | None
    grammar: npt.NDArray[np.int32] | None = None

    @property
    def key(self) -> tuple[int, str]:
        """By which its activations and its result are known."""
        return self.step, self.request_id


@dataclass
class PathSteps(SchedulerOutput):
    """Scheduler steps, each for the requests of one path; as a step it is their union, as far as the engine core looks."""

    steps: list[tuple[Path, SchedulerOutput]] = dataclasses.field(default_factory=list)


def united(steps: list[tuple[Path, SchedulerOutput]]) -> PathSteps:
    """What the engine core and its log read of the steps; requests differ between steps of different paths."""
    outputs = [output for _, output in steps]
    whole: PathSteps = PathSteps.make_empty()
    whole.steps = steps
    whole.num_scheduled_tokens = {
        request_id: count for output in outputs for request_id, count in output.num_scheduled_tokens.items()
    }
    whole.total_num_scheduled_tokens = sum(whole.num_scheduled_tokens.values())
    whole.finished_req_ids = set().union(*(output.finished_req_ids for output in outputs))
    whole.has_structured_output_requests = any(output.has_structured_output_requests for output in outputs)
    return whole


def outcome_of(tokens: dict[str, int]) -> SchedulerOutput:
    """A step as the scheduler needs it to take the results of these requests."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = tokens
    output.total_num_scheduled_tokens = sum(tokens.values())
    return output


def entries_for(
    number: int,
    path: Path,
    node: str,
    output: SchedulerOutput,
    *,
    grammar: Mapping[str, npt.NDArray[np.int32]],
    held: Callable[[str, str], BlockIds],
) -> Iterator[Entry]:
    """The entries for a node of the path; `held`: the ids that a request's blocks have on a node."""
    after = dict(pairwise(path)).get(node)

    def entry(request_id: str, new: NewRequestData | None, known: Known | None) -> Entry:
        return Entry(
            step=number,
            request_id=request_id,
            tokens=output.num_scheduled_tokens[request_id],
            after=after,
            new=new,
            known=known,
            grammar=grammar.get(request_id) if after is None else None,
        )

    for data in output.scheduled_new_reqs:
        yield entry(data.req_id, dataclasses.replace(data, block_ids=(list(held(data.req_id, node)),)), None)
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        resumed = request_id in cached.resumed_req_ids
        added = cached.new_block_ids[index]
        count = len(added[0]) if added is not None else 0
        blocks = held(request_id, node)
        known = Known(
            resumed=resumed,
            new_token_ids=cached.new_token_ids[index] if cached.new_token_ids else [],
            new_block_ids=(blocks[len(blocks) - count :],) if count else None,
            num_computed_tokens=cached.num_computed_tokens[index],
            num_output_tokens=cached.num_output_tokens[index],
        )
        yield entry(request_id, None, known)


def grammar_rows(grammar: GrammarOutput | None) -> dict[str, npt.NDArray[np.int32]]:
    """The bitmask of each request that has one."""
    if grammar is None:
        return {}
    return dict(zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True))


def merged(entries: Sequence[Entry], finished: Iterable[str], metadata: KVConnectorMetadata | None) -> SchedulerOutput:
    """One step of entries of different requests; what `finished` is forgotten by the node."""
    cached = CachedRequestData.make_empty()
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = cached
    output.finished_req_ids = set(finished)
    output.kv_connector_metadata = metadata
    for entry in entries:
        output.num_scheduled_tokens[entry.request_id] = entry.tokens
        if entry.new is not None:
            output.scheduled_new_reqs.append(entry.new)
            continue
        known = entry.known
        assert known is not None
        cached.req_ids.append(entry.request_id)
        if known.resumed:
            cached.resumed_req_ids.add(entry.request_id)
        cached.new_token_ids.append(known.new_token_ids)
        cached.new_block_ids.append(known.new_block_ids)
        cached.num_computed_tokens.append(known.num_computed_tokens)
        cached.num_output_tokens.append(known.num_output_tokens)
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    return output


def merged_grammar(entries: Sequence[Entry]) -> GrammarOutput | None:
    """The bitmasks that the entries carry."""
    rows = {entry.request_id: entry.grammar for entry in entries if entry.grammar is not None}
    if not rows:
        return None
    return GrammarOutput(list(rows), np.stack(list(rows.values())), [0] * len(rows))


class Backlog:
    """A node's entries that wait: they run in the order of scheduling, a request's never two in one step.

    A step takes one in `parts` of the requests that the node knows, and a quarter more: all in one step would go round as one,
    and leave the other stages idle; without the quarter a request too many would make a step of its own.
    `ready`: whether what the entry needs from the stage before has come.
    """

    def __init__(self, *, most_requests: int, most_tokens: int, parts: int) -> None:
        self._most_requests, self._most_tokens, self._parts = most_requests, most_tokens, parts
        self._entries: list[Entry] = []
        self._known: set[str] = set()

    def add(self, entries: Iterable[Entry]) -> None:
        """Behind those that wait."""
        for entry in entries:
            self._entries.append(entry)
            self._known.add(entry.request_id)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget these requests."""
        gone = set(request_ids)
        self._entries = [entry for entry in self._entries if entry.request_id not in gone]
        self._known -= gone

    def take(self, ready: Callable[[Entry], bool]) -> list[Entry]:
        """The next step's entries; the first ready one always fits."""
        taken: list[Entry] = []
        left: list[Entry] = []
        seen: set[str] = set()
        tokens = 0
        most_requests = min(self._most_requests, math.ceil(_SHARE * len(self._known) / self._parts))
        for entry in self._entries:
            fits = len(taken) < most_requests and (not taken or tokens + entry.tokens <= self._most_tokens)
            if fits and entry.request_id not in seen and ready(entry):
                taken.append(entry)
                tokens += entry.tokens
            else:
                left.append(entry)
            seen.add(entry.request_id)
        self._entries = left
        return taken
