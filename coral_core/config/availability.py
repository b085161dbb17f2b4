"""How many nodes there are to be had: per epoch, region and configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from coral_core.catalog.tables import read_table
from coral_core.config.scenario import Ample, AvailabilityTrace, Constant, EpochsSpec, RandomWalk
from coral_core.domain.hardware import NodeConfig
from coral_core.errors import InputError, unknown_name
from coral_core.units import GIB

T = TypeVar("T")
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TRACE_COLUMNS: Final = ("start_s", "region", "config", "nodes")
MOST_NODES: Final = 1_000_000
MOST_LOG: Final = 20.0
"""A walk without pull may go anywhere; beyond this factor from the mean a supply is all or nothing anyway."""


def supply(
    spec: Ample | Constant | AvailabilityTrace | RandomWalk,
    *,
    regions: Sequence[str],
    configs: Sequence[NodeConfig],
    sold: NDArray[np.bool_],
    epochs: EpochsSpec,
    ample_memory_bytes: Callable[[], float],
) -> Ints:
    """Nodes we may hold, (epochs, R, C); 0 where not `sold` (R, C).

    `ample_memory_bytes` is asked only by a random walk that is scaled to what an ample plan holds. InputError for unknown
    names and unusable trace files.
    """
    shape = (epochs.count, len(regions), len(configs))
    names = [config.name for config in configs]
    if isinstance(spec, Ample):
        nodes = np.full(shape, spec.nodes, dtype=np.int64)
    elif isinstance(spec, Constant):
        nodes = np.broadcast_to(_constant(spec, regions, names), shape)
    elif isinstance(spec, AvailabilityTrace):
        nodes = _trace(spec.file, regions, names, epochs)
    else:
        nodes = _random_walk(spec, configs, sold, epochs, ample_memory_bytes)
    return np.where(sold, nodes, 0)


def _constant(spec: Constant, regions: Sequence[str], configs: Sequence[str]) -> Ints:
    nodes = np.zeros((len(regions), len(configs)), dtype=np.int64)
    for region, counts in spec.nodes.items():
        where = f"availability.nodes.{region}"
        look_up(dict.fromkeys(regions), region, "region", where, "the scenario")
        for config, count in counts.items():
            look_up(dict.fromkeys(configs), config, "configuration", f"{where}.{config}", "the scenario")
            nodes[regions.index(region), configs.index(config)] = count
    return nodes


def _trace(file: Path, regions: Sequence[str], configs: Sequence[str], epochs: EpochsSpec) -> Ints:
    """What holds at the start of each epoch."""
    steps: dict[tuple[int, int], dict[float, int]] = {}
    for row in read_table(file, TRACE_COLUMNS):
        region = row.member("region", {name: r for r, name in enumerate(regions)})
        config = row.member("config", {name: c for c, name in enumerate(configs)})
        start_s = _seconds(row.text("start_s"), row.where)
        nodes = row.count_or_zero("nodes")
        if nodes > MOST_NODES:
            raise InputError(f"nodes is {nodes}, at most {MOST_NODES}", where=row.where)
        if start_s in steps.setdefault((region, config), {}):
            raise InputError(f"{regions[region]}, {configs[config]} has two rows at {start_s:g} s", where=row.where)
        steps[region, config][start_s] = nodes
    result = np.zeros((epochs.count, len(regions), len(configs)), dtype=np.int64)
    begin_s = np.arange(epochs.count) * epochs.duration_s
    for (region, config), step in steps.items():
        starts_s = np.array(sorted(step))
        held = np.array([0, *(step[start] for start in starts_s.tolist())], dtype=np.int64)
        result[:, region, config] = held[np.searchsorted(starts_s, begin_s, side="right")]
    return result


def _seconds(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"start_s is {text!r}, must be a number of at least 0", where=where)
    return value


def _random_walk(
    spec: RandomWalk,
    configs: Sequence[NodeConfig],
    sold: NDArray[np.bool_],
    epochs: EpochsSpec,
    ample_memory_bytes: Callable[[], float],
) -> Ints:
    gpus = dict.fromkeys(config.gpu.name for config in configs)
    for gpu in spec.gpu_weights:
        look_up(gpus, gpu, "GPU", f"availability.gpu_weights.{gpu}", "the scenario's configurations")
    if spec.memory_gib is not None:
        total_bytes = spec.memory_gib * GIB
    else:
        assert spec.memory_frac_of_ample is not None  # the schema requires one of the two
        total_bytes = spec.memory_frac_of_ample * ample_memory_bytes()
    weight = np.array([spec.gpu_weights.get(config.gpu.name, 1.0) for config in configs])
    share = np.where(sold, weight, 0.0) * np.exp(_walk(spec, (epochs.count, *sold.shape)))
    size_bytes = total_bytes * share / share.sum(axis=(1, 2)).mean()
    node_bytes = np.array([float(config.memory_bytes) for config in configs])
    return np.stack([_whole_nodes(wished, node_bytes) for wished in size_bytes])


def _walk(spec: RandomWalk, shape: tuple[int, int, int]) -> Floats:
    """Log supplies, (epochs, R, C), begun where such a walk is in the long run (at 0 where it has no such place)."""
    steps = np.random.default_rng(spec.seed).standard_normal(shape) * spec.step_log
    pull = spec.reversion_frac
    walk = np.empty(shape)
    walk[0] = steps[0] / math.sqrt(pull * (2 - pull)) if pull > 0 else 0.0
    for epoch in range(1, shape[0]):
        walk[epoch] = (1 - pull) * walk[epoch - 1] + steps[epoch]
    return np.clip(walk, -MOST_LOG, MOST_LOG)


def _whole_nodes(wished_bytes: Floats, node_bytes: Floats) -> Ints:
    """Whole nodes (R, C) of as near as can be the memory wished, never more in total.

    Each is rounded down; what that leaves over goes to the largest remainders, as far as a node still fits.
    """
    exact = wished_bytes / node_bytes
    nodes = np.floor(exact).astype(np.int64)
    left_bytes = wished_bytes.sum() - (nodes * node_bytes).sum()
    remainder = exact - nodes
    for flat in np.argsort(-remainder, axis=None, kind="stable"):
        r, c = np.unravel_index(flat, nodes.shape)
        if remainder[r, c] > 0 and node_bytes[c] <= left_bytes:
            nodes[r, c] += 1
            left_bytes -= node_bytes[c]
    return nodes


def look_up(known: Mapping[str, T], name: str, what: str, where: str, place: str) -> T:
    """`known[name]`, or an InputError at `where` that suggests the nearest name."""
    if name not in known:
        raise unknown_name(f"{what} in {place}", name, known, where=where)
    return known[name]
