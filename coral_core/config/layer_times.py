"""The layer time table that a scenario names (other people's data, which never ships with Coral), and its fixed pool."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from coral_core.config.resolve import ResolvedScenario
from coral_core.config.scenario import Constant, LayerTimesSpec
from coral_core.domain.pool import PoolNode, PoolProblem
from coral_core.errors import DataGapError, InputError
from coral_core.perf import CapacityAssumptions, network
from coral_core.perf.layer_times import LayerTimes, pool_capacity, read_layer_times
from coral_core.units import GBIT_PER_S

REFERENCE_VARIABLE: Final = "CORAL_REFERENCE_DATA"


def reference_folder(folder: Path | None) -> Path:
    """The folder of reference data: the one given, else REFERENCE_VARIABLE's. DataGapError where there is none."""
    named = str(folder) if folder is not None else os.environ.get(REFERENCE_VARIABLE, "")
    if not named:
        raise DataGapError(
            "reference data does not ship with Coral",
            where=REFERENCE_VARIABLE,
            fix="set it to the folder of reference data, or name one with --data",
        )
    found = Path(named).expanduser()
    if not found.is_dir():
        raise DataGapError(
            f"there is no folder {named}", where=REFERENCE_VARIABLE, fix="name the folder of reference data"
        )
    return found


def load_layer_times(spec: LayerTimesSpec) -> LayerTimes:
    """The table of `spec`. DataGapError says which variable to set where it is not at hand."""
    where = f"capacity.layer_times.table {spec.table}"
    folder = os.environ.get(REFERENCE_VARIABLE, "")
    if not folder and not spec.table.is_absolute():
        raise DataGapError(
            "the layer time table does not ship with Coral",
            where=where,
            fix=f"set {REFERENCE_VARIABLE} to the folder of reference data that holds it",
        )
    file = Path(folder).expanduser() / spec.table
    if not file.is_file():
        raise DataGapError(f"there is no {file}", where=where, fix=f"check {REFERENCE_VARIABLE}={folder}")
    return read_layer_times(file, spec.model)


def pool_problem(resolved: ResolvedScenario, *, region: str) -> PoolProblem:
    """The scenario's only model on all nodes that `region` holds, as policy `helix` takes it.

    Raises InputError for a scenario without a fixed pool (layer times, constant availability, one model), DataGapError
    where the table is not at hand.
    """
    scenario = resolved.scenario
    spec, supply = scenario.capacity.layer_times, scenario.availability
    if spec is None or not isinstance(supply, Constant) or len(resolved.models) != 1 or region not in supply.nodes:
        raise InputError(
            f"there is no fixed pool in {region!r}",
            where=f"scenario {scenario.name}",
            fix="policy helix needs one model, capacity.layer_times and availability of kind constant, as helix-64 has",
        )
    times, model, assumptions = load_layer_times(spec), resolved.models[0], CapacityAssumptions()
    lengths = model.demand.lengths
    tokens = lengths.mean_input_tokens + lengths.mean_output_tokens
    # one hidden state per token, as in the method that this serves (the estimates count the residual stream as well)
    request_bytes = tokens * network.activation_bytes_per_token(model.shape, replace(assumptions, hop_tensors=1))
    nodes: list[PoolNode] = []
    for config in resolved.configs:
        count = supply.nodes[region].get(config.name, 0)
        if count and config.name not in spec.nodes:
            raise InputError(f"no layer times are named for {config.name}", where="capacity.layer_times.nodes")
        if count:
            rates = pool_capacity(
                times=times,
                node=spec.nodes[config.name].node,
                config=config,
                max_layers=min(spec.nodes[config.name].max_layers, model.shape.layers),
                shape=model.shape,
                variant=model.variant,
                lengths=lengths,
                kv_memory_frac=spec.kv_memory_frac,
                assumptions=assumptions,
            )
            nic = config.nic_bytes_per_s * assumptions.nic_usable_frac / request_bytes
            nodes += [PoolNode(config=config.name, requests_per_s=tuple(np.minimum(rates, nic).tolist()))] * count
    n = len(nodes)
    link = np.inf if spec.link_gbit_per_s is None else spec.link_gbit_per_s * GBIT_PER_S / request_bytes
    return PoolProblem(
        model=model.shape.name,
        layers=model.shape.layers,
        nodes=tuple(nodes),
        link_requests_per_s=np.full((n, n), link),
        source_requests_per_s=np.full(n, np.inf),
        sink_requests_per_s=np.full(n, np.inf),
    )
