"""A node of a stage: `python -m coral_core.engine.plugin.stage_node --engine HOST:PORT --name NAME [--host H --port P]`.

It comes to the engine, gets its layers, and then runs entries in the order of scheduling as soon as their activations are
there. One thread: what comes in during a step waits, and the next step takes all of it that fits.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import torch
import zmq
from vllm.config import VllmConfig
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.version import __version__ as vllm_version

from coral_core.engine.plugin.kv_scheduler import StepMetadata
from coral_core.engine.plugin.on_cpu import end_with_parent
from coral_core.engine.plugin.stage_kv import joined
from coral_core.engine.plugin.stage_layout import Layout, Node
from coral_core.engine.plugin.stage_rank import Ranks, Seat
from coral_core.engine.plugin.stage_steps import Backlog, Entry, merged, merged_grammar
from coral_core.engine.plugin.stage_wire import Inbox, Link, Outbox, Wire, keys_for, wait_for

logger = logging.getLogger("vllm.coral.stage")
_IDLE_S: Final = 0.5
_HELLO_S: Final = 2.0
_TRANSFER_S: Final = 0.005
"""How often an idle node looks whether a KV transfer has ended."""


class StageNode:
    """Serves one engine until it says `stop`."""

    def __init__(self, *, name: str, engine: str, host: str, port: int, key_file: str | None) -> None:
        self._wire = Wire(keys_for(host, key_file))
        self._host, self._port = host, port
        self._inbox: Inbox
        self._secret = b""
        self._link = Link(wire=self._wire, address=f"tcp://{engine}", name=name)
        self._outbox = Outbox(self._wire, {})
        self._finished: set[str] = set()
        self._first = True
        self._has_kv = False
        self._metadata: StepMetadata | None = None
        self._transfers = 0  # that have begun here and not ended, counted by rank
        self._ranks: Ranks
        self._backlog: Backlog

    def serve(self) -> None:
        """Until told to stop; an error is told to the engine, which then goes on without this node."""
        try:
            while self._handle_all():
                if not hasattr(self, "_backlog"):
                    # Again and again: what was sent before the engine listened may be lost.
                    self._link.send("hello", {"vllm": vllm_version, "pid": os.getpid()})
                    wait_for([self._link.socket], _HELLO_S)
                    continue
                self._inbox.read()
                if entries := self._backlog.take(self._ready):
                    self._step(entries)
                elif self._finished or self._metadata is not None:
                    self._step([])
                else:
                    wait_for([self._link.socket, self._inbox.socket], _TRANSFER_S if self._transfers else _IDLE_S)
                    if self._transfers:
                        self._metadata = joined(self._metadata, StepMetadata())
        except Exception:
            logger.exception("stage node failed")
            self._link.send("failed", traceback.format_exc())
            time.sleep(1.0)  # lets it leave
            raise

    def _handle_all(self) -> bool:
        while (message := self._link.receive()) is not None:
            if message[0] == "stop":
                return False
            getattr(self, f"_on_{message[0]}")(*message[1:])
        return True

    def _on_start(self, config: VllmConfig, node: Node, index: int, layout: Layout, secret: bytes) -> None:
        """Become node number `index`; activations are signed by the secret if there is one, else encrypted."""
        self._secret = secret
        pull, address = self._wire.bound(zmq.PULL, self._host, self._port, clear=bool(secret))
        self._inbox = Inbox(pull, secret)
        stage = layout.stage_of(node.name)
        self._first = stage == 0
        self._has_kv = config.kv_transfer_config is not None
        seat = Seat(
            node=node,
            index=index,
            replica=layout.stages[stage].nodes.index(node),
            stage=stage,
            layers=layout.layers,
            rank=0,
            init_method=get_file_store_init_method(),
        )
        self._ranks = Ranks(config, seat)
        scheduler = config.scheduler_config
        self._backlog = Backlog(
            most_requests=node.max_num_seqs or scheduler.max_num_seqs,
            most_tokens=scheduler.max_num_batched_tokens,
            # Where requests come into the pipeline; later stages take what comes.
            parts=len(layout.stages) if self._first else 1,
        )
        self._link.send("reply", address)

    def _on_next(self, addresses: dict[str, str]) -> None:
        self._outbox = Outbox(self._wire, addresses, self._secret)

    def _on_call(self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._link.send("reply", self._ranks.run("call", method, args, kwargs))

    def _on_cache(self, engine: KVCacheConfig) -> None:
        own = self._ranks.run("cache_config", engine)
        self._ranks.run("make_cache", own)
        self._link.send("reply", own.num_blocks)

    def _on_warm_up(self) -> None:
        self._link.send("reply", self._ranks.run("warm_up"))

    def _on_hops(self) -> None:
        hop = self._inbox.hop
        self._link.send("reply", (hop.messages, hop.payload_bytes, hop.seconds))

    def _on_handshake(self) -> None:
        self._link.send("reply", self._ranks.run("handshakes"))

    def _on_run(self, entries: list[Entry], metadata: StepMetadata | None) -> None:
        self._backlog.add(entries)
        if metadata is not None:
            self._metadata = joined(self._metadata, metadata)
            self._transfers += (len(metadata.grants) + len(metadata.fetches)) * self._ranks.size

    def _on_end(self, request_ids: list[str]) -> None:
        self._finished.update(request_ids)
        self._backlog.drop(request_ids)

    def _on_drop(self, keys: list[tuple[int, str]], request_ids: list[str]) -> None:
        """Requests that will not be answered: what of them is in the backlog never runs."""
        self._backlog.drop(request_ids)
        self._inbox.drop(keys)
        self._link.send("dropped", request_ids)

    def _on_gone(self, name: str) -> None:
        self._outbox.drop(name)

    def _ready(self, entry: Entry) -> bool:
        return self._first or entry.key in self._inbox.rows

    def _step(self, entries: list[Entry]) -> None:
        rows = {} if self._first else {entry.request_id: self._inbox.rows.pop(entry.key) for entry in entries}
        metadata = (self._metadata or StepMetadata()) if self._has_kv else None
        output = merged(entries, self._finished, metadata)
        self._finished, self._metadata = set(), None
        result, transfers = self._ranks.run("step", output, rows, merged_grammar(entries))
        if transfers:
            self._transfers -= sum(
                len(one.finished_sending or ()) + len(one.finished_recving or ()) for one in transfers
            )
            self._link.send("kv", transfers)
        if result is None:
            return
        if isinstance(result, ModelRunnerOutput):
            self._link.send("done", [entry.key for entry in entries], result)
            return
        by_request = {entry.request_id: entry for entry in entries}
        parts: dict[str, list[tuple[int, str, int, slice]]] = defaultdict(list)
        first = 0
        for request_id in self._ranks.lead.order:
            entry = by_request[request_id]
            assert entry.after is not None
            parts[entry.after].append((entry.step, request_id, entry.tokens, slice(first, first + entry.tokens)))
            first += entry.tokens
        for node, own in parts.items():
            tensors = {name: cut(full, [place for *_, place in own]) for name, full in result.items()}
            self._outbox.send(node, [(step, request_id, tokens) for step, request_id, tokens, _ in own], tensors)


def cut(rows: torch.Tensor, places: list[slice]) -> torch.Tensor:
    """These rows of a tensor, one after another."""
    return rows[places[0]] if len(places) == 1 else torch.cat([rows[place] for place in places])


def main(arguments: list[str] | None = None) -> None:
    """Be a node until the engine says stop."""
    parser = argparse.ArgumentParser(
        prog="stage_node", description="A node of a stage of Coral's own pipeline runtime."
    )
    parser.add_argument("--engine", required=True, help="HOST:PORT at which the engine listens")
    parser.add_argument("--name", required=True, help="the node's name in the layout")
    parser.add_argument("--host", default="127.0.0.1", help="where other nodes reach this one")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--key-file", help="the fleet's key; needed off loopback")
    parser.add_argument("--child", action="store_true", help="end with the process that started this one")
    given = parser.parse_args(arguments)
    if given.child:
        end_with_parent()
    node = StageNode(name=given.name, engine=given.engine, host=given.host, port=given.port, key_file=given.key_file)
    node.serve()


if __name__ == "__main__":
    main()
