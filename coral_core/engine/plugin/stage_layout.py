"""What runs where in a pipeline whose stages have several nodes, and which node of each stage serves which request.

Data: stages of layers, the nodes of each with their relative throughputs, KV blocks that each node can hold.
A request is bound to one node per stage, its path, by smooth weighted round robin over the nodes that live, and stays there.
Blocks: the i-th block of a request has an id of its own on each node of its path; a node holds blocks of its own requests only.
Pure: imports neither the engine nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

CONFIG_KEY: Final = "coral_stages"
"""Under which `--additional-config` carries the layout."""
STATUS_VARIABLE: Final = "CORAL_STAGE_STATUS"
"""Where the status goes if the layout does not say: whoever starts the engine knows its folder, who made the layout does not."""
LOOPBACK: Final = ("127.", "localhost", "[::1]")

Path: TypeAlias = tuple[str, ...]


class LayoutError(Exception):
    """A layout that cannot be, or one that this engine cannot run; the message says why."""


class StageLostError(Exception):
    """A stage without a node: nothing can be served any more."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`throughput`: tokens/s, or any figure in proportion to them. `max_num_seqs`: requests per step of this node at most.

    `local`: the engine starts it as a child of its own; else it is started by `stage_node` and comes by itself.
    """

    name: str
    throughput: float = 1.0
    tp: int = 1
    max_num_seqs: int | None = None
    kv_cache_memory_bytes: int | None = None
    local: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a node needs a name")
        if not 0 < self.throughput < float("inf"):
            raise ValueError(f"node {self.name}: throughput {self.throughput} must be above 0 and finite")
        for figure in ("tp", "max_num_seqs", "kv_cache_memory_bytes"):
            value = getattr(self, figure)
            if value is not None and value < 1:
                raise ValueError(f"node {self.name}: {figure} {value} must be at least 1")


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive layers, each of its nodes holding all of them."""

    layers: int
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if self.layers < 1 or not self.nodes:
            raise ValueError("a stage needs at least one layer and one node")


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`listen`: HOST:PORT where nodes report; port 0 takes a free one, for local nodes only. LayoutError.

    `silence_s`: a node not heard of for so long is lost. `status_file`: where the status is written (else to `STATUS_VARIABLE`). `key_file` as for KV transfers.
    `encrypt` False: activations go in clear, each message signed by a secret of this engine, which is much faster.
    """

    stages: tuple[Stage, ...]
    listen: str = "127.0.0.1:0"
    silence_s: float = 10.0
    start_s: float = 600.0
    status_file: str | None = None
    key_file: str | None = None
    encrypt: bool = True

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a layout needs a stage")
        names = [node.name for node in self.nodes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"node names are used twice: {', '.join(twice)}")
        if not (1 <= self.silence_s < float("inf") and 0 < self.start_s < float("inf")):
            raise ValueError(
                f"silence_s {self.silence_s} must be at least 1, start_s {self.start_s} above 0, both finite"
            )
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"listen {self.listen!r} is no HOST:PORT")
        if port == "0" and not all(node.local for node in self.nodes):
            raise ValueError("listen needs a port when nodes come from elsewhere")

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Of all stages, in order."""
        return tuple(node for stage in self.stages for node in stage.nodes)

    @property
    def layers(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(stage.layers for stage in self.stages)

    def stage_of(self, name: str) -> int:
        """The stage, from 0, of a node of this layout."""
        return next(number for number, stage in enumerate(self.stages) if name in {node.name for node in stage.nodes})


def layout_of(additional_config: Mapping[str, Any] | None) -> Layout:
    """The layout in vLLM's `--additional-config`; LayoutError names what is missing or wrong."""
    given = (additional_config or {}).get(CONFIG_KEY)
    if given is None:
        raise LayoutError(f"--additional-config has no {CONFIG_KEY!r}: it says which node runs which layers")
    try:
        layout = msgspec.convert(given, Layout)
    except msgspec.ValidationError as error:
        raise LayoutError(f"--additional-config {CONFIG_KEY}: {error}") from None
    return (
        layout if layout.status_file else msgspec.structs.replace(layout, status_file=os.environ.get(STATUS_VARIABLE))
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    return host.startswith(LOOPBACK)


class Rota:
    """Smooth weighted round robin: over any n turns a name gets n x its share of the weights, give or take less than one."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)
        self._credit = dict.fromkeys(weights, 0.0)

    def turn(self) -> str:
        """Whose turn it is."""
        for name, weight in self.weights.items():
            self._credit[name] += weight
        best = max(self._credit, key=self._credit.__getitem__)
        self._credit[best] -= sum(self.weights.values())
        return best

    def drop(self, name: str) -> None:
        """It gets no more turns."""
        del self.weights[name], self._credit[name]


class Bindings:
    """Which request goes which way; knows the nodes that are left."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.paths: dict[str, Path] = {}
        self.lost: dict[str, str] = {}
        self._rotas = [Rota({node.name: node.throughput for node in stage.nodes}) for stage in layout.stages]

    @property
    def alive(self) -> frozenset[str]:
        """The nodes that are left."""
        return frozenset(name for rota in self._rotas for name in rota.weights)

    @property
    def weight_frac(self) -> float:
        """What is left of the throughput: that of the weakest stage by that which the weakest had."""
        least = min(sum(node.throughput for node in stage.nodes) for stage in self.layout.stages)
        return min(sum(rota.weights.values()) for rota in self._rotas) / least

    def bind(self, request_id: str) -> Path:
        """The request's path, chosen on its first call."""
        if request_id not in self.paths:
            self.paths[request_id] = tuple(rota.turn() for rota in self._rotas)
        return self.paths[request_id]

    def lose(self, name: str, reason: str) -> list[str]:
        """Requests that go through the node, which takes no more; StageLostError where it was the last of its stage."""
        self.lost[name] = reason
        stage = self.layout.stage_of(name)
        self._rotas[stage].drop(name)
        if not self._rotas[stage].weights:
            raise StageLostError(f"stage {stage} has no node left, the last one was {name}: {reason}")
        return [request_id for request_id, path in self.paths.items() if name in path]


class BlockPools:
    """The KV blocks of each node by request; block 0 of each node is nobody's."""

    def __init__(self, blocks: Mapping[str, int]) -> None:
        self.blocks = dict(blocks)
        self._free = {node: list(range(count - 1, 0, -1)) for node, count in blocks.items()}
        self._held: dict[tuple[str, str], list[int]] = {}

    def scheduler_blocks(self, layout: Layout) -> int:
        """Blocks for the scheduler's one pool: no stage can hold more, whatever goes where; with one for nobody."""
        return 1 + min(sum(self.blocks[node.name] - 1 for node in stage.nodes) for stage in layout.stages)

    def free_blocks(self, path: Path) -> int:
        """How many more blocks a request on this path could have: those of its fullest node."""
        return min(len(self._free[node]) for node in path)

    def grow(self, request_id: str, path: Path, count: int) -> None:
        """Give the request `count` blocks in all on each node of its path. ValueError if a node has too few."""
        if self.free_blocks(path) < count - max(len(self.held(request_id, node)) for node in path):
            raise ValueError(f"request {request_id}: a node of {path} has too few blocks for {count}")
        for node in path:
            held = self._held.setdefault((node, request_id), [])
            while len(held) < count:
                held.append(self._free[node].pop())

    def held(self, request_id: str, node: str) -> list[int]:
        """The ids of the request's blocks on the node."""
        return self._held.get((node, request_id), [])

    def holders(self, request_id: str) -> list[str]:
        """The nodes on which the request has blocks."""
        return [node for node in self.blocks if (node, request_id) in self._held]

    def release(self, request_id: str, nodes: Iterable[str]) -> None:
        """The request's blocks on these nodes are free."""
        for node in nodes:
            self._free[node] += reversed(self._held.pop((node, request_id), []))

    def lose(self, node: str) -> None:
        """The node's blocks are nobody's: none is free, none is held."""
        self._held = {key: held for key, held in self._held.items() if key[0] != node}
        self._free[node] = []
        self.blocks[node] = 1

    def in_use(self) -> dict[str, int]:
        """Blocks held on each node."""
        return {
            node: sum(len(held) for (owner, _), held in self._held.items() if owner == node) for node in self.blocks
        }
