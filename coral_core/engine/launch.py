"""Launch plans: template, terms and places -> the exact command, environment and ports of every node (pure).

Flags repeat what the capacity assumed: the layout inside the nodes, layers per pipeline rank, usable memory, and the limits
on requests and tokens per step. vLLM counts requests over all steps in flight, capacities those in one step: a pipeline
of P ranks gets P times as many.

    request limit  P x max_batch_requests
    token limit    prefill: max_prefill_tokens; decode: the request limit; aggregated: max_prefill_tokens + max_batch_requests
    context        the model's own, unless the terms bound it
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from coral_core.domain import model_math
from coral_core.domain.fleet import spec_of
from coral_core.domain.launch import Device, EngineTerms, LaunchPlan, ModelTerms, NodeLaunch, NodePlace, Runtime
from coral_core.domain.models import ModelShape
from coral_core.domain.templates import ServingTemplate
from coral_core.domain.workload import Phase
from coral_core.engine.runnable import runnable
from coral_core.errors import DataGapError, InputError, NoSolutionError, unknown_name
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.search import Layout

ENTRY: Final = {
    Device.CPU: ("-m", "coral_core.engine.plugin.serve", "serve"),
    Device.CUDA: ("-m", "vllm.entrypoints.cli.main", "serve"),
}
CPU_STAGE_WORKER: Final = "coral_core.engine.plugin.cpu_worker.StageWorker"
KV_ROLES: Final = {Phase.PREFILL: "kv_producer", Phase.DECODE: "kv_consumer"}
_EIGHT_BITS: Final = 8.5
"""KV entries of up to so many bits, scales included, are stored as 8-bit floats."""


def launch_plan(
    *,
    instance_id: str,
    template: ServingTemplate,
    layouts: Sequence[Sequence[Layout | None]],
    shape: ModelShape,
    terms: EngineTerms,
    assumptions: CapacityAssumptions,
    places: Sequence[NodePlace],
) -> LaunchPlan:
    """How to start one instance of `template` on `places`, which are in the order of `spec_of(template).slots`.

    `layouts` are those inside the nodes, stage by stage in the order of the stage's nodes; None where not known.
    Raises NoSolutionError where no runtime can run the template, InputError for terms or places that do not fit it.
    """
    model = terms.models.get((template.model, template.variant))
    if model is None:
        known = [f"{name} {variant}" for name, variant in terms.models]
        raise unknown_name("model in the engine's terms", f"{template.model} {template.variant}", known)
    can = runnable(template, layouts, shape, runtimes=[Runtime.VLLM])
    if can.runtime is None:
        why = "; ".join(f"{runtime}: {', '.join(against)}" for runtime, against in can.reasons.items())
        raise NoSolutionError(f"cannot be run: {why}", where=f"template {template.template_id}")
    _check_places(template, places)
    chain = [layout for row in layouts for layout in row if layout is not None]
    return _Vllm(
        instance_id=instance_id,
        template=template,
        chain=chain,
        shape=shape,
        terms=terms,
        model=model,
        assumptions=assumptions,
        places=places,
    ).plan()


def layer_partition(layers: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Layers of each pipeline rank: node i's `layers[i]` over its `ranks[i]`, as even as can be, the first ones taking more."""
    parts: list[int] = []
    for held, count in zip(layers, ranks, strict=True):
        least, more = divmod(held, count)
        parts += [least + (rank < more) for rank in range(count)]
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vllm:
    """Commands of stock vLLM for a chain of equal nodes, or for one node; `chain` holds their layouts."""

    instance_id: str
    template: ServingTemplate
    chain: Sequence[Layout]
    shape: ModelShape
    terms: EngineTerms
    model: ModelTerms
    assumptions: CapacityAssumptions
    places: Sequence[NodePlace]

    @property
    def layout(self) -> Layout:
        return self.chain[0]

    @property
    def partition(self) -> tuple[int, ...]:
        layers = [stage.layers for stage in self.template.placement.stages]
        return layer_partition(layers, [layout.pp for layout in self.chain])

    @property
    def http_port(self) -> int:
        return self.places[0].first_port

    @property
    def master_port(self) -> int | None:
        return self.http_port + 1 if len(self.places) > 1 else None

    @property
    def kv_ports(self) -> tuple[int, ...]:
        """One per data-parallel replica, counted on from the first by the engine itself."""
        return tuple(self.http_port + 1 + replica for replica in range(self.layout.dp)) if self.kv_role else ()

    @property
    def kv_role(self) -> str | None:
        return KV_ROLES.get(self.template.phase)

    @property
    def on_cpu(self) -> bool:
        return self.terms.device is Device.CPU

    def plan(self) -> LaunchPlan:
        host = self.places[0].host
        return LaunchPlan(
            instance_id=self.instance_id,
            model=self.template.model,
            phase=self.template.phase,
            runtime=Runtime.VLLM,
            url=f"http://{f'[{host}]' if ':' in host else host}:{self.http_port}",
            nodes=tuple(self._node(rank, place) for rank, place in enumerate(self.places)),
        )

    def _node(self, rank: int, place: NodePlace) -> NodeLaunch:
        ports = () if rank else (self.http_port, *((self.master_port,) if self.master_port else ()), *self.kv_ports)
        if len(ports) > place.ports:
            raise InputError(f"{place.ports} ports are too few, it needs {len(ports)}", where=f"node {place.node}")
        argv = (*ENTRY[self.terms.device], self.model.path, *self._engine(), *self._links(rank, place))
        return NodeLaunch(
            node=place.node,
            argv=(*argv, *self.model.extra_args),
            env={**self._env(place), **self.model.env},
            ports=ports,
            serves=rank == 0,
        )

    def _engine(self) -> list[str]:
        """What is the same on every node."""
        model, layout, ranks = self.model, self.layout, len(self.partition)
        requests, tokens = self._limits()
        flags = {
            "--served-model-name": self.template.model,
            "--dtype": model.dtype or _dtype(self.shape, self.template.variant),
            "--quantization": model.quantization,
            "--kv-cache-dtype": _kv_dtype(self.shape, self.template.variant),
            "--max-model-len": model.max_model_len_tokens or self.shape.max_context_tokens,
            "--max-num-seqs": requests,
            "--max-num-batched-tokens": tokens,
            "--block-size": model.block_size_tokens,
            "--kv-cache-memory-bytes": model.kv_cache_memory_bytes,
            "--gpu-memory-utilization": self._memory_frac(),
            "--tensor-parallel-size": layout.tp,
            "--pipeline-parallel-size": ranks,
            "--data-parallel-size": layout.dp if layout.dp > 1 else None,
            "--distributed-executor-backend": "mp" if layout.tp * ranks > 1 else None,
            "--worker-cls": CPU_STAGE_WORKER if self.on_cpu and ranks > 1 else None,
            "--kv-transfer-config": self._kv_transfer(),
            "--shutdown-timeout": 0,
        }
        eager = self.on_cpu if self.terms.eager is None else self.terms.eager
        named = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
        return [*named, *(["--enforce-eager"] if eager else [])]

    def _limits(self) -> tuple[int, int]:
        """Requests and tokens per step."""
        most = self.assumptions
        requests = self.model.max_num_seqs or len(self.partition) * most.max_batch_requests
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
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": self.kv_role,
            "kv_load_failure_policy": "recompute",
        }
        return json.dumps(config, separators=(",", ":"))

    def _links(self, rank: int, place: NodePlace) -> list[str]:
        """What makes the nodes one engine, and where it answers."""
        flags: list[str] = []
        if self.master_port is not None:
            flags += ["--nnodes", str(len(self.places)), "--node-rank", str(rank)]
            flags += ["--master-addr", self.places[0].host, "--master-port", str(self.master_port)]
        if rank:
            return [*flags, "--headless"]
        return [*flags, "--host", place.host, "--port", str(self.http_port), "--disable-uvicorn-access-log"]

    def _env(self, place: NodePlace) -> dict[str, str]:
        env = {
            "VLLM_HOST_IP": place.host,
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(self.terms.step_timeout_s),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        if self.model.path.startswith("/"):
            env["HF_HUB_OFFLINE"] = "1"
        if len(self.partition) > 1:
            env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, self.partition))
        if self.kv_role is not None:
            env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": place.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.kv_ports[0])}
        if self.on_cpu:
            env |= self._cpu_env(place)
        return env

    def _cpu_env(self, place: NodePlace) -> dict[str, str]:
        """Threads bound to the node's own cores, a list of cores per worker; unbound, one thread each, where there are fewer."""
        workers = self.layout.tp * self.layout.pp * self.layout.dp
        env = {"UCX_TLS": "tcp,sm,self"} if self.kv_role is not None else {}
        if not place.cpus or len(place.cpus) < workers:
            return {**env, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        ends = [len(place.cpus) * worker // workers for worker in range(workers + 1)]
        lists = [",".join(map(str, place.cpus[start:end])) for start, end in pairwise(ends)]
        return {**env, "VLLM_CPU_OMP_THREADS_BIND": "|".join(lists)}


def _check_places(template: ServingTemplate, places: Sequence[NodePlace]) -> None:
    """Raise InputError unless there is one place per node of the template, of its configuration, with ports of its own."""
    where = f"template {template.template_id}"
    wanted = [slot.config for slot in spec_of(template).slots]
    given = [place.config for place in places]
    if wanted != given:
        raise InputError(f"its nodes are {', '.join(wanted)}, the places are {', '.join(given) or 'none'}", where=where)
    names = [place.node for place in places]
    if len(set(names)) < len(names):
        raise InputError(f"a node is given twice: {', '.join(names)}", where=where)
    for place in places:
        if place.first_port < 1 or place.ports < 0 or place.first_port + place.ports > 65536:
            raise InputError(f"ports {place.first_port} to {place.first_port + place.ports - 1} are none", where=where)
    ordered = sorted(places, key=lambda place: (place.host, place.first_port))
    for one, other in pairwise(ordered):
        if one.host == other.host and one.first_port + one.ports > other.first_port:
            raise InputError(f"the ports of {one.node} and {other.node} overlap on {one.host}", where=where)


def _dtype(shape: ModelShape, variant: str) -> str:
    return "float16" if model_math.variant_of(shape, variant).compute_dtype == "fp16" else "bfloat16"


def _kv_dtype(shape: ModelShape, variant: str) -> str | None:
    return "fp8" if model_math.variant_of(shape, variant).kv_bits <= _EIGHT_BITS else None
