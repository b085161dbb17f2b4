"""Commands of our stage executor: pipelines whose stages have several, unlike nodes.

The first node runs the engine and, as its child, its own part of the first stage; every other node runs `stage_node` and comes
to the engine by itself. All nodes read the layout from the engine: layers per stage, each node's GPUs and its share of its
stage's requests. Where the engine says what is left of it is for the node's agent to tell it (`stage_status`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coral_core.domain.launch import LaunchPlan, NodeLaunch, NodePlace
from coral_core.engine.chain_commands import Commands, compact
from coral_core.errors import DataGapError

EXECUTOR: Final = "coral_core.engine.plugin.stage_executor.StageExecutor"
STAGE_NODE: Final = ("-m", "coral_core.engine.plugin.stage_node")
_LOOPBACK: Final = ("127.", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages(Commands):
    """Our executor: any number of nodes per stage, each one replica whose GPUs share every layer."""

    @property
    def listen_port(self) -> int:
        """Where the nodes report to the engine."""
        return self.http_port + 1

    @property
    def _in_flight(self) -> int:
        stages = self.template.placement.stages
        return len(stages) * max(len(stage.nodes) for stage in stages)

    def plan(self) -> LaunchPlan:
        """The engine's node first, then the others in the order of the stages."""
        first, *others = self.places
        return self.whole([self._engine(first), *(self._stage_node(place) for place in others)])

    def _engine(self, place: NodePlace) -> NodeLaunch:
        parallel: Mapping[str, object] = {
            "--distributed-executor-backend": EXECUTOR,
            "--additional-config": compact({"coral_stages": self._layout()}),
        }
        argv = self.serve(
            parallel,
            in_flight=self._in_flight,
            links=["--no-async-scheduling", "--no-enable-prefix-caching", *self.answers()],
        )
        return self.node(place, argv, self._env(place), (self.http_port, self.listen_port))

    def _stage_node(self, place: NodePlace) -> NodeLaunch:
        argv = [*STAGE_NODE, "--engine", f"{_bracketed(self.places[0].host)}:{self.listen_port}", "--name", place.node]
        argv += ["--host", _bracketed(place.host), "--port", str(place.first_port)]
        key_file = self._key_file()
        return self.node(
            place, [*argv, *(["--key-file", key_file] if key_file else [])], self._env(place), (place.first_port,)
        )

    def _layout(self) -> dict[str, object]:
        throughputs, (requests, _) = self._throughputs(), self._limits(self._in_flight)
        numbers = iter(range(len(self.places)))
        stages = []
        for stage in self.template.placement.stages:
            mine = [next(numbers) for _ in stage.nodes]
            whole = sum(throughputs[i] for i in mine)
            unlike = len({throughputs[i] for i in mine}) > 1
            nodes = [
                {
                    "name": self.places[i].node,
                    "throughput": throughputs[i],
                    "tp": self.layouts[i].tp,
                    **({"max_num_seqs": math.ceil(requests * throughputs[i] / whole)} if unlike else {}),
                    **({"local": True} if i == 0 else {}),
                }
                for i in mine
            ]
            stages.append({"layers": stage.layers, "nodes": nodes})
        key_file = self._key_file()
        listen = f"{_bracketed(self.places[0].host)}:{self.listen_port}"
        rest = {"key_file": key_file} if key_file else {}
        return {"stages": stages, "listen": listen, "start_s": self.model.start_limit_s, **rest}

    def _throughputs(self) -> list[float]:
        if self.throughputs is not None:
            return list(self.throughputs)
        for number, stage in enumerate(self.template.placement.stages):
            if len(Counter(stage.nodes)) > 1:
                raise DataGapError(
                    f"the shares of the unlike nodes of stage {number} are not known: {', '.join(stage.nodes)}",
                    where=f"template {self.template.template_id}",
                )
        # Within a stage alike; where no capacities are known, every stage is taken to be as strong as the others.
        return [1.0 / len(stage.nodes) for stage in self.template.placement.stages for _ in stage.nodes]

    def _key_file(self) -> str | None:
        """The fleet's key; without one nodes talk over loopback only."""
        if self.terms.key_file is None and not all(place.host.startswith(_LOOPBACK) for place in self.places):
            raise DataGapError(
                "nodes that talk over a network need the fleet's key",
                where="engine's terms",
                fix="give key_file",
            )
        return self.terms.key_file

    def _env(self, place: NodePlace) -> dict[str, str]:
        env = {**self.env(place), "VLLM_USE_V2_MODEL_RUNNER": "0"}
        if self.on_cpu:
            tp = self.layouts[self.places.index(place)].tp
            threads = max(len(place.cpus) // tp, 1)
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        return env


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
