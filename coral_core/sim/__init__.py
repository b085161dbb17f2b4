"""Event simulator of a fleet that serves several models: iterations on nodes, KV, hops, routing, lifecycles.

`simulate` takes a `SimInput` and gives a `SimOutcome`; `measure` turns that into goodput, attainment and percentiles;
`sim_instance` makes instances from templates and the capacity model, `sim_model` what goes with them.
"""

from coral_core.sim.disruptions import random_failures, spot_loss
from coral_core.sim.fleet import prompt_times_s, sim_instance
from coral_core.sim.inputs import (
    UNLIMITED,
    LifecycleEvent,
    LifecycleKind,
    NodeTiming,
    Routing,
    SimInput,
    SimInstance,
    SimModel,
    SimNode,
    SimOptions,
    SimRequests,
    SimStage,
)
from coral_core.sim.metrics import Latencies, Load, ModelMetrics, load, measure, tpot_s, ttft_s, within_slo
from coral_core.sim.outcome import ConservationError, FleetOutcome, RequestOutcome, RequestStatus, SimOutcome
from coral_core.sim.run import simulate
from coral_core.sim.timing import Served, node_timing, sim_model

__all__ = [
    "UNLIMITED",
    "ConservationError",
    "FleetOutcome",
    "Latencies",
    "LifecycleEvent",
    "LifecycleKind",
    "Load",
    "ModelMetrics",
    "NodeTiming",
    "RequestOutcome",
    "RequestStatus",
    "Routing",
    "Served",
    "SimInput",
    "SimInstance",
    "SimModel",
    "SimNode",
    "SimOptions",
    "SimOutcome",
    "SimRequests",
    "SimStage",
    "load",
    "measure",
    "node_timing",
    "prompt_times_s",
    "random_failures",
    "sim_instance",
    "sim_model",
    "simulate",
    "spot_loss",
    "tpot_s",
    "ttft_s",
    "within_slo",
]
