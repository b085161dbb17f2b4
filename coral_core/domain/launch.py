"""What it takes to start a serving instance: where its nodes are, with what terms, and the command of each node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coral_core.domain.workload import Phase


class Runtime(StrEnum):
    """What runs an instance: vLLM as it is, or vLLM with our own stage executor and KV connector."""

    VLLM = "vllm"
    CORAL = "coral"


class Device(StrEnum):
    """What the engine computes on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTerms:
    """How an engine serves one variant of a model; None: derived from the variant, the model or the capacity's assumptions.

    `path` is a folder on the node, or a name that the node can download. `kv_cache_memory_bytes` is per worker (GPU, or
    process on a CPU). `start_limit_s`: an engine that is not ready by then has failed. `extra_args` and `env` go to every node
    of an instance, after all others.
    """

    path: str
    dtype: str | None = None
    quantization: str | None = None
    max_model_len_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    start_limit_s: int = 900
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """Terms of all engines of a fleet; `models` is keyed by (model, variant).

    `runtimes`: those that the nodes have, the first that can run a template is used. With our own among them prefill and
    decode exchange KV by its connector, which needs `key_file`, the fleet's key on every node. `step_timeout_s`: a step that takes longer ends the engine. `eager`: no graph compilation (None: on CPUs).
    """

    device: Device
    models: Mapping[tuple[str, str], ModelTerms]
    runtimes: tuple[Runtime, ...] = (Runtime.VLLM,)
    key_file: str | None = None
    step_timeout_s: int = 10
    eager: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Where node i of an instance is: `ports` ports from `first_port` on are its own, and so are `cpus` (empty: all)."""

    node: str
    config: str
    host: str
    first_port: int
    ports: int
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunch:
    """What one node runs: `argv` follows the interpreter, `env` is added to its environment, `ports` it listens on.

    `serves`: it answers HTTP for the whole instance.
    """

    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ports: tuple[int, ...]
    serves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """All nodes of a serving instance in start order; requests go to `url`."""

    instance_id: str
    model: str
    phase: Phase
    runtime: Runtime
    url: str
    nodes: tuple[NodeLaunch, ...]
