"""Commands of vLLM: what every way of running a template has in common, and chains of equal nodes, which it runs itself.

Flags repeat what the capacity assumed: the layout inside the nodes, layers per pipeline rank, usable memory, and the limits
on requests and tokens per step. vLLM counts requests over all steps in flight, capacities those in one step of one
replica: a pipeline of P ranks gets P times as many.

    request limit  P x max_batch_requests (x nodes of the largest stage)
    token limit    prefill: max_prefill_tokens; decode: the request limit; aggregated: max_prefill_tokens + max_batch_requests
    context        what the terms say; else a chain's engines take as much of the model's own as has room in their KV cache,
                   since capacities see to room for mean requests only
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from coral_core.domain import model_math
from coral_core.domain.launch import Device, EngineTerms, LaunchPlan, ModelTerms, NodeLaunch, NodePlace, Runtime
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import ServingTemplate
from coral_core.domain.workload import Phase
from coral_core.errors import DataGapError, InputError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.search import Layout

ENTRY: Final = {
    Device.CPU: ("-m", "coral_core.engine.plugin.serve", "serve"),
    Device.CUDA: ("-m", "vllm.entrypoints.cli.main", "serve"),
}
CPU_STAGE_WORKER: Final = "coral_core.engine.plugin.cpu_worker.StageWorker"
KV_ROLES: Final = {Phase.PREFILL: "kv_producer", Phase.DECODE: "kv_consumer"}
NIXL: Final = {"kv_connector": "NixlConnector"}
OWN_CONNECTOR: Final = {
    "kv_connector": "CoralKVConnector",
    "kv_connector_module_path": "coral_core.engine.plugin.kv_connector",
}
_EIGHT_BITS: Final = 8.5
"""KV entries of up to so many bits, scales included, are stored as 8-bit floats."""


def layer_partition(layers: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Layers of each pipeline rank: node i's `layers[i]` over its `ranks[i]`, as even as can be, the first ones taking more."""
    parts: list[int] = []
    for held, count in zip(layers, ranks, strict=True):
        least, more = divmod(held, count)
        parts += [least + (rank < more) for rank in range(count)]
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """What all ways of running a template have in common; `layouts` and `places` have one entry per node."""

    instance_id: str
    template: ServingTemplate
    runtime: Runtime
    layouts: Sequence[Layout]
    shape: ModelShape
    terms: EngineTerms
    model: ModelTerms
    assumptions: CapacityAssumptions
    places: Sequence[NodePlace]
    throughputs: Sequence[float] | None

    @property
    def layers(self) -> list[int]:
        """Layers of each stage."""
        return [stage.layers for stage in self.template.placement.stages]

    @property
    def http_port(self) -> int:
        """Where the first node answers."""
        return self.places[0].first_port

    @property
    def longest(self) -> int | str:
        """The longest request where the terms do not say."""
        return self.shape.max_context_tokens

    @property
    def kv_role(self) -> str | None:
        """Which end of a KV transfer it is, if any."""
        return KV_ROLES.get(self.template.phase)

    @property
    def own_connector(self) -> bool:
        """Whether KV goes by our connector."""
        return self.kv_role is not None and self.runtime is Runtime.CORAL

    @property
    def on_cpu(self) -> bool:
        """Whether the engines compute on CPUs."""
        return self.terms.device is Device.CPU

    def node(self, place: NodePlace, argv: Sequence[str], env: Mapping[str, str], ports: Sequence[int]) -> NodeLaunch:
        """A node's launch; InputError where it has too few ports."""
        if len(ports) > place.ports:
            raise InputError(f"{place.ports} ports are too few, it needs {len(ports)}", where=f"node {place.node}")
        return NodeLaunch(
            node=place.node,
            argv=tuple(argv),
            env={**env, **self.model.env},
            ports=tuple(ports),
            serves=place is self.places[0],
        )

    def whole(self, nodes: Sequence[NodeLaunch]) -> LaunchPlan:
        """The plan of all nodes."""
        host = self.places[0].host
        return LaunchPlan(
            instance_id=self.instance_id,
            model=self.template.model,
            phase=self.template.phase,
            runtime=self.runtime,
            url=f"http://{f'[{host}]' if ':' in host else host}:{self.http_port}",
            nodes=tuple(nodes),
        )

    def serve(self, parallel: Mapping[str, object], *, in_flight: int, links: Sequence[str]) -> list[str]:
        """`vllm serve` with its flags; `in_flight`: how many times the requests of one step there are at once."""
        model = self.model
        requests, tokens = self._limits(in_flight)
        flags = {
            "--served-model-name": self.template.model,
            "--dtype": model.dtype or dtype_of(self.shape, self.template.variant),
            "--quantization": model.quantization,
            "--kv-cache-dtype": _kv_dtype(self.shape, self.template.variant),
            "--max-model-len": model.max_model_len_tokens or self.longest,
            "--max-num-seqs": requests,
            "--max-num-batched-tokens": tokens,
            "--block-size": model.block_size_tokens,
            "--kv-cache-memory-bytes": model.kv_cache_memory_bytes,
            "--gpu-memory-utilization": self._memory_frac(),
            **parallel,
            "--kv-transfer-config": self._kv_transfer(),
            "--shutdown-timeout": 0,
        }
        eager = self.on_cpu if self.terms.eager is None else self.terms.eager
        named = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
        started = [*ENTRY[self.terms.device], model.path, *named, *(["--enforce-eager"] if eager else [])]
        return [*started, *links, *model.extra_args]

    def answers(self) -> list[str]:
        """Where the first node answers, as flags."""
        return ["--host", self.places[0].host, "--port", str(self.http_port), "--disable-uvicorn-access-log"]

    def env(self, place: NodePlace) -> dict[str, str]:
        """What every node's environment has."""
        env = {
            "VLLM_HOST_IP": place.host,
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(self.terms.step_timeout_s),
            "VLLM_ENGINE_READY_TIMEOUT_S": str(self.model.start_limit_s),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if self.model.path.startswith("/"):
            env["HF_HUB_OFFLINE"] = "1"
        if self.own_connector and self.terms.key_file is not None:
            env["CORAL_KV_KEY_FILE"] = self.terms.key_file
        return env

    def _limits(self, in_flight: int) -> tuple[int, int]:
        """Requests and tokens per step."""
        most = self.assumptions
        requests = self.model.max_num_seqs or in_flight * most.max_batch_requests
        if self.model.max_num_seqs is None and self.model.max_num_batched_tokens is not None:
            requests = min(requests, self.model.max_num_batched_tokens)  # vLLM starts with no more
        tokens = {
            Phase.PREFILL: most.max_prefill_tokens,
            Phase.DECODE: requests,
            Phase.AGGREGATED: most.max_prefill_tokens + most.max_batch_requests,
        }[self.template.phase]
        return requests, self.model.max_num_batched_tokens or max(tokens, requests)

    def _memory_frac(self) -> float | None:
        if self.model.kv_cache_memory_bytes is not None:
            return None
        if self.on_cpu:
            name = f"{self.template.model} {self.template.variant}"
            raise DataGapError(
                "nothing says how much memory its KV cache may take on a CPU",
                where=f"engine's terms of {name}",
                fix="give kv_cache_memory_bytes",
            )
        return self.assumptions.usable_memory_frac

    def _kv_transfer(self) -> str | None:
        if self.kv_role is None:
            return None
        # A failed transfer then costs a prompt's computation, not the request.
        config = {"kv_role": self.kv_role, "kv_load_failure_policy": "recompute"}
        return compact({**(OWN_CONNECTOR if self.own_connector else NIXL), **config})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Commands):
    """vLLM's own executor: a single node of any layout, or one node per stage, all of one layout without replicas."""

    @property
    def layout(self) -> Layout:
        """That of every node."""
        return self.layouts[0]

    @property
    def longest(self) -> str:
        """What has room: vLLM refuses to start where one request of the model's whole context has no room."""
        return "auto"

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each pipeline rank."""
        return layer_partition(self.layers, [layout.pp for layout in self.layouts])

    @property
    def master_port(self) -> int | None:
        """Where the nodes of a pipeline meet."""
        return self.http_port + 1 if len(self.places) > 1 else None

    @property
    def side_channel(self) -> tuple[int, ...]:
        """NIXL's ports, one per data-parallel replica, counted on from the first by the engine itself."""
        nixl = self.kv_role is not None and not self.own_connector
        return tuple(self.http_port + 1 + replica for replica in range(self.layout.dp)) if nixl else ()

    def plan(self) -> LaunchPlan:
        """The plan; every node has the same command but for its rank."""
        layout, ranks = self.layout, len(self.partition)
        parallel = {
            "--tensor-parallel-size": layout.tp,
            "--pipeline-parallel-size": ranks,
            "--data-parallel-size": layout.dp if layout.dp > 1 else None,
            "--distributed-executor-backend": "mp" if layout.tp * ranks > 1 else None,
            "--worker-cls": CPU_STAGE_WORKER if self.on_cpu else None,
        }
        return self.whole(
            [
                self.node(
                    place,
                    self.serve(parallel, in_flight=ranks, links=self._links(rank)),
                    {**self.env(place), **self._own_env(place)},
                    () if rank else self._ports(),
                )
                for rank, place in enumerate(self.places)
            ]
        )

    def _ports(self) -> tuple[int, ...]:
        meeting = () if self.master_port is None else (self.master_port,)
        return (self.http_port, *meeting, *self.side_channel)

    def _links(self, rank: int) -> list[str]:
        """What makes the nodes one engine, and where it answers."""
        flags: list[str] = []
        if self.master_port is not None:
            flags += ["--nnodes", str(len(self.places)), "--node-rank", str(rank)]
            flags += ["--master-addr", self.places[0].host, "--master-port", str(self.master_port)]
        return [*flags, "--headless"] if rank else [*flags, *self.answers()]

    def _own_env(self, place: NodePlace) -> dict[str, str]:
        env: dict[str, str] = {}
        if len(self.partition) > 1:
            env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, self.partition))
        if self.side_channel:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = place.host
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel[0])
        if self.on_cpu:
            env |= {"UCX_TLS": "tcp,sm,self"} if self.side_channel else {}
            env |= self._threads(place)
        return env

    def _threads(self, place: NodePlace) -> dict[str, str]:
        """Threads bound to the node's own cores, a list of cores per worker; one thread each, and unbound, where there is no more than one core for it."""
        workers = self.layout.tp * self.layout.pp * self.layout.dp
        # The node's agent keeps it on its cores; and engines of single threads start in half the time.
        if len(place.cpus) <= workers:
            return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        ends = [len(place.cpus) * worker // workers for worker in range(workers + 1)]
        lists = [",".join(map(str, place.cpus[start:end])) for start, end in pairwise(ends)]
        return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(lists)}


def compact(value: object) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def dtype_of(shape: ModelShape, variant: str) -> str:
    """What vLLM computes a variant in, by its own name."""
    compute_dtype = model_math.variant_of(shape, variant).compute_dtype
    return {"fp16": "float16", "fp32": "float32"}.get(compute_dtype, "bfloat16")


def _kv_dtype(shape: ModelShape, variant: str) -> str | None:
    return "fp8" if model_math.variant_of(shape, variant).kv_bits <= _EIGHT_BITS else None
