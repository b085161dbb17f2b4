"""The engine's view of its stages: what is in flight where, and what comes back.

The n-th wait gives whatever has come back by then, of whichever step: fast nodes do not wait for slow ones. A request's
blocks on a node are given away again only when nothing of it is in flight there: its node answered, or said that it dropped it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from coral_core.clock import ListeningClock
from coral_core.engine.plugin.kv_scheduler import StepMetadata
from coral_core.engine.plugin.stage_kv import TransferCount, for_node, joined
from coral_core.engine.plugin.stage_layout import Bindings, BlockPools, Layout, Path, StageLostError
from coral_core.engine.plugin.stage_steps import Entry, entries_for
from coral_core.engine.plugin.stage_wire import Hub, Message

logger = logging.getLogger("vllm.coral.stage")
_IDLE_WAIT_S: Final = 0.002
_CHECK_S: Final = 0.5
_OLDEST: Final = 6
"""Of so many step limits a step has failed that has not come back, though others do: a node of it hangs."""


@dataclass
class Outcome(ModelRunnerOutput):
    """What has come back: results with the tokens of each request that they are for, and requests lost with the reason."""

    parts: list[tuple[dict[str, int], ModelRunnerOutput]] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)


class Pipeline:
    """Belongs to the engine core's thread, the hub's thread excepted."""

    pools: BlockPools
    check: Callable[[], None] | None = None
    """While the engine starts: raises for what cannot become ready. A node lost later is told by `wait`."""

    def __init__(self, layout: Layout, hub: Hub, step_timeout_s: float) -> None:
        self.layout = layout
        self.bindings = Bindings(layout)
        self._hub = hub
        self._step_timeout_s = step_timeout_s
        self._number = 0
        self._flying: dict[tuple[int, str], tuple[int, float]] = {}  # tokens, and when they were sent
        self._listened_s = ListeningClock(time.monotonic, most_s=step_timeout_s)
        self._steps_of: Counter[str] = Counter()
        self._known: set[str] = set()
        self._ending: set[str] = set()
        self._dropping: set[tuple[str, str]] = set()
        self._released: set[tuple[str, str]] = set()
        self._transfers = TransferCount(layout, self._holders)
        self._events: deque[tuple[str, Message]] = deque()

    def flying(self, request_id: str) -> bool:
        """Whether a step of the request has not come back."""
        return self._steps_of[request_id] > 0

    def ask(self, nodes: Iterable[str], *message: object, timeout_s: float | None = None) -> list[Any]:
        """Send each node a message that it answers; what `gather` gives."""
        names = list(nodes)
        for node in names:
            self._hub.send(node, *message)
        return self.gather(names, str(message[0]), timeout_s)

    def gather(self, names: Sequence[str], what: str, timeout_s: float | None = None, word: str = "reply") -> list[Any]:
        """The nodes' answers, in their order, without those of nodes lost meanwhile. StageLostError, TimeoutError."""
        waited_s = ListeningClock(time.monotonic)
        answers: dict[str, Any] = {}
        # Who was lost during an earlier question, which no step has told yet, is not asked by the hub.
        missing = set(names) - {node for node, event in self._events if event[0] == "lost"}
        while missing:
            if timeout_s is not None and waited_s() > timeout_s:
                raise TimeoutError(f"no answer to {what} from {', '.join(sorted(missing))} in {timeout_s:.0f} s")
            if self.check is not None:
                self.check()
            try:
                node, event = self._hub.events.get(timeout=_CHECK_S)
            except queue.Empty:
                continue
            if event[0] == word and node in missing:
                answers[node] = event[1]
                missing.discard(node)
                continue
            if event[0] == "lost" and self.check is not None:
                raise StageLostError(f"node {node} was lost before it answered {what}: {event[1]}")
            if event[0] == "lost":
                missing.discard(node)
            self._events.append((node, event))
        return [answers[node] for node in names if node in answers]

    def dispatch(self, steps: list[tuple[Path, SchedulerOutput]], grammar: Mapping[str, npt.NDArray[np.int32]]) -> None:
        """Send every node its entries of these steps, and tell it which requests ended."""
        entries: dict[str, list[Entry]] = defaultdict(list)
        metadata: dict[str, StepMetadata] = {}
        for path, output in steps:
            self._number += 1
            if isinstance(output.kv_connector_metadata, StepMetadata):
                self._share(output.kv_connector_metadata, metadata)
            for request_id in output.finished_req_ids:
                self._end(request_id)
            for request_id, tokens in output.num_scheduled_tokens.items():
                self._flying[self._number, request_id] = tokens, self._listened_s()
                self._steps_of[request_id] += 1
                self._known.add(request_id)
            for node in path:
                if node not in self.bindings.lost:
                    entries[node] += entries_for(
                        self._number, path, node, output, grammar=grammar, held=self.pools.held
                    )
        for node in entries.keys() | metadata.keys():
            if entries[node] or node in metadata:  # a path whose requests all wait has nothing for its nodes
                self._hub.send(node, "run", entries[node], metadata.get(node))

    def notice(self) -> None:
        """Where nobody is served, hear of nodes lost meanwhile: who comes must not be bound to them. StageLostError."""
        while not self.bindings.paths:
            event = self._events.popleft() if self._events else self._now()
            if event is None:
                return
            self._take(*event, Outcome(req_ids=[], req_id_to_index={}))

    def wait(self) -> Outcome:
        """What has come back, at least something if anything is in flight. StageLostError, TimeoutError."""
        outcome = Outcome(req_ids=[], req_id_to_index={})
        while not (outcome.parts or outcome.lost or outcome.kv_connector_output):
            event = self._next()
            while event is not None:
                self._take(*event, outcome)
                event = self._events.popleft() if self._events else self._now()
            outcome.kv_connector_output = self._transfers.ended()
            if not self._flying:
                break
            self._check_oldest()
        return outcome

    def release(self, request_id: str) -> None:
        """The scheduler has freed the request's blocks; where a node still drops it, they are free once it has."""
        for node in self.pools.holders(request_id):
            if (node, request_id) in self._dropping:
                self._released.add((node, request_id))
            else:
                self.pools.release(request_id, [node])

    def _holders(self, request_id: str) -> list[str]:
        return self.pools.holders(request_id)

    def _share(self, whole: StepMetadata, metadata: dict[str, StepMetadata]) -> None:
        self._transfers.begin(whole)
        alive = [node.name for node in self.layout.nodes if node.name not in self.bindings.lost]
        for node in alive:
            own = for_node(whole, node, self.pools, speaks=node == alive[0])
            if own != StepMetadata():
                metadata[node] = joined(metadata.get(node), own)

    def _next(self) -> tuple[str, Message] | None:
        if self._events:
            return self._events.popleft()
        if not self._flying:
            try:
                return self._hub.events.get(timeout=_IDLE_WAIT_S)
            except queue.Empty:
                return None
        waited_s = ListeningClock(time.monotonic)
        while waited_s() < self._step_timeout_s:
            try:
                return self._hub.events.get(timeout=min(_CHECK_S, self._step_timeout_s))
            except queue.Empty:
                continue
        waiting = sorted({node for _, request_id in self._flying for node in self.bindings.paths[request_id]})
        raise TimeoutError(f"nothing came back in {self._step_timeout_s:.0f} s from nodes {', '.join(waiting)}")

    def _check_oldest(self) -> None:
        (_, request_id), (_, sent_s) = next(iter(self._flying.items()))
        waited_s = self._listened_s() - sent_s
        if waited_s > _OLDEST * self._step_timeout_s:
            nodes = ", ".join(self.bindings.paths[request_id])
            raise TimeoutError(f"a step did not come back in {waited_s:.0f} s from nodes {nodes}, though others do")

    def _now(self) -> tuple[str, Message] | None:
        try:
            return self._hub.events.get_nowait()
        except queue.Empty:
            return None

    def _take(self, node: str, event: Message, outcome: Outcome) -> None:
        match event:
            case ("done", keys, result):
                tokens = {key[1]: self._land(key) for key in keys if key in self._flying}
                outcome.parts.append((tokens, result))
            case ("dropped", request_ids):
                for request_id in request_ids:
                    self._dropping.discard((node, request_id))
                    if (node, request_id) in self._released:
                        self._released.discard((node, request_id))
                        self.pools.release(request_id, [node])
            case ("kv", outputs):
                self._transfers.take(node, outputs)
            case ("lost", reason):
                outcome.lost |= self._lose(node, reason)
            case ("hello", _):
                pass  # said again before it was heard
            case _:
                logger.warning("node %s sent an unexpected %s", node, event[0])

    def _land(self, key: tuple[int, str]) -> int:
        request_id = key[1]
        tokens, _ = self._flying.pop(key)
        self._steps_of[request_id] -= 1
        if not self._steps_of[request_id]:
            del self._steps_of[request_id]
            if request_id in self._ending:
                self._ending.discard(request_id)
                self._end(request_id)
        return tokens

    def _end(self, request_id: str) -> None:
        """Let the nodes forget the request, once nothing of it is in flight."""
        if self.flying(request_id):
            self._ending.add(request_id)
            return
        path = self.bindings.paths.pop(request_id, ())
        if request_id in self._known:
            self._known.discard(request_id)
            for node in path:
                if node not in self.bindings.lost:
                    self._hub.send(node, "end", [request_id])

    def _lose(self, lost: str, reason: str) -> dict[str, str]:
        """Go on without a node; the requests that it takes with it. Those that it had not begun are bound anew."""
        logger.error("stage node %s is lost: %s", lost, reason)
        through = self.bindings.lose(lost, reason)
        self.pools.lose(lost)
        self._transfers.lose()
        for node in self.bindings.alive:
            self._hub.send(node, "gone", lost)
        failed = {}
        for request_id in through:
            path = self.bindings.paths[request_id]
            if request_id not in self._known and not self.pools.holders(request_id):
                del self.bindings.paths[request_id]
                continue
            keys = [key for key in self._flying if key[1] == request_id]
            for node in path:
                if node not in self.bindings.lost:
                    self._dropping.add((node, request_id))
                    self._hub.send(node, "drop", keys, [request_id])
            for key in keys:
                self._land(key)
            failed[request_id] = f"node {lost} of stage {self.layout.stage_of(lost)} was lost: {reason}"
        return failed


class Status:
    """Writes how much of the instance is left where its agent reads it; used by the hub's thread."""

    def __init__(self, layout: Layout) -> None:
        self.whole = True
        self._bindings = Bindings(layout)
        self._file = FilePath(layout.status_file) if layout.status_file else None

    def lose(self, node: str, reason: str) -> bool:
        """Note a lost node; False where a stage has none left. OSError where the file cannot be written."""
        try:
            self._bindings.lose(node, reason)
        except StageLostError:
            self.whole = False
        self.write("degraded" if self.whole else "failed")
        return self.whole

    def write(self, state: str) -> None:
        """`state`: ready, degraded or failed; `weight_frac`: the share of its throughput that is left."""
        if self._file is None:
            return
        nodes = {
            node.name: {"stage": self._bindings.layout.stage_of(node.name), "lost": self._bindings.lost.get(node.name)}
            for node in self._bindings.layout.nodes
        }
        text = json.dumps(
            {"state": state, "weight_frac": self._bindings.weight_frac, "nodes": nodes, "pid": os.getpid()}, indent=1
        )
        new = self._file.with_name(f"{self._file.name}.new")
        new.write_text(text, encoding="utf-8")
        new.replace(self._file)
