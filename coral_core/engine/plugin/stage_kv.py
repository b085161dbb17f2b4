"""The fleet's KV connector (`kv_connector`) over stages with several nodes: each node hears of its own requests, in its own blocks.

A request's transfer has ended when every worker of its path says so; a node that is lost says nothing any more, which counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from vllm.v1.outputs import KVConnectorOutput

from coral_core.engine.plugin.kv_scheduler import StepMetadata
from coral_core.engine.plugin.kv_stats import TransferCounts
from coral_core.engine.plugin.stage_layout import BlockPools, Layout

Worker = tuple[int, int, str]
"""Stage, rank inside the node, node: as `kv_scheduler.WorkerId`."""


def workers_of(layout: Layout, path: Iterable[str]) -> Iterator[Worker]:
    """The workers that serve a request with this path."""
    names = set(path)
    for number, stage in enumerate(layout.stages):
        for node in stage.nodes:
            if node.name in names:
                yield from ((number, rank, node.name) for rank in range(node.tp))


def for_node(whole: StepMetadata, node: str, pools: BlockPools, *, speaks: bool) -> StepMetadata:
    """What `node` is to hear; one node `speaks` for all."""

    def own(request_id: str, count: int) -> list[int]:
        return pools.held(request_id, node)[:count]

    return StepMetadata(
        grants={
            request_id: replace(grant, block_ids=own(request_id, len(grant.block_ids)))
            for request_id, grant in whole.grants.items()
            if pools.held(request_id, node)
        },
        fetches={
            request_id: replace(fetch, block_ids=own(request_id, len(fetch.block_ids)))
            for request_id, fetch in whole.fetches.items()
            if pools.held(request_id, node)
        },
        cancelled={request_id for request_id in whole.cancelled if pools.held(request_id, node)},
        tells=whole.tells if speaks else [],
    )


def joined(one: StepMetadata | None, other: StepMetadata) -> StepMetadata:
    """Both, for a node that takes them with one step."""
    if one is None:
        return other
    return StepMetadata(
        grants=one.grants | other.grants,
        fetches=one.fetches | other.fetches,
        cancelled=one.cancelled | other.cancelled,
        tells=one.tells + other.tells,
    )


class TransferCount:
    """Who has not yet said of which transfers that they ended; `holders`: the living nodes on which a request has blocks."""

    def __init__(self, layout: Layout, holders: Callable[[str], Iterable[str]]) -> None:
        self._ranks = {node.name: node.tp for node in layout.nodes}
        self._holders = holders
        self._sending: set[str] = set()
        self._receiving: set[str] = set()
        self._sent: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._received: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._failed: set[str] = set()
        self._counted = TransferCounts()
        self._changed = False

    def begin(self, step: StepMetadata) -> None:
        """The transfers of a step: of these alone the end is told, once, also where nobody lives who could say it."""
        self._sending |= step.grants.keys()
        self._receiving |= step.fetches.keys()
        self._changed = True

    def take(self, node: str, outputs: Iterable[KVConnectorOutput]) -> None:
        """What the ranks of a node say."""
        for output in outputs:
            for said, counts in ((output.finished_sending, self._sent), (output.finished_recving, self._received)):
                for request_id in said or ():
                    counts[request_id][node] += 1
            self._failed |= output.failed_recving
            if output.kv_connector_stats:
                self._counted.aggregate(output.kv_connector_stats)
        self._changed = True

    def lose(self) -> None:
        """A holder says no more."""
        self._changed = True

    def ended(self) -> KVConnectorOutput | None:
        """The transfers that have ended since the last call."""
        if not self._changed:
            return None
        self._changed = False
        sent, received = self._complete(self._sending, self._sent), self._complete(self._receiving, self._received)
        if not sent and not received:
            return None
        failed = received & self._failed
        self._failed -= failed
        counted, self._counted = self._counted, TransferCounts()
        return KVConnectorOutput(
            finished_sending=sent, finished_recving=received, failed_recving=failed, kv_connector_stats=counted
        )

    def _complete(self, running: set[str], counts: dict[str, dict[str, int]]) -> set[str]:
        done = {
            request_id
            for request_id in running
            if all(counts[request_id][node] >= self._ranks[node] for node in self._holders(request_id))
        }
        running -= done
        for request_id in done:
            counts.pop(request_id, None)
        return done
