"""What the records of fleets say, as Prometheus metrics: read from the store at each scrape, so nothing has to be kept up.

Predicted figures come from the newest plan, measured ones from the newest run that looked at the fleet. What is not known
has no sample. The only file that imports prometheus_client; infra/prometheus and infra/grafana are written for these names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from artifacts.fleets import FleetRun, list_runs
from artifacts.leases import read_lease
from artifacts.plans import list_fleets, list_plans, read_plan
from artifacts.store import Store
from coral_core.clock import Clock
from coral_core.errors import CoralError

RECENT: Final = timedelta(hours=24)
"""How far back outcomes and refusals are counted."""

METRICS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "coral_records_readable": ("1 where the fleet's records could be read, 0 where not", ()),
    "coral_plan_time_seconds": ("When the newest plan was made, since 1970", ()),
    "coral_plan_cost_usd_per_h": ("Cost of the newest plan, without start-up (predicted)", ()),
    "coral_plan_gap_frac": ("Proven distance of the newest plan from the optimum", ()),
    "coral_plan_demand": ("Demand of the newest plan, in tokens/s or requests/s", ("model", "phase", "unit")),
    "coral_plan_capacity": ("Capacity of the newest plan (predicted)", ("model", "phase", "unit")),
    "coral_plan_shortfall_frac": ("Demand that the newest plan does not meet", ("model", "phase")),
    "coral_plan_instances": ("Instances of the newest plan", ("model", "phase", "region", "market")),
    "coral_run_time_seconds": ("When the newest run that acted ended, since 1970", ()),
    "coral_run_unfinished": ("1 while a run is under way or has died, from its record", ()),
    "coral_runs": ("Runs begun within a day by how they ended", ("outcome",)),
    "coral_fleet_cost_usd_per_h": ("Cost of the nodes held at the end of the newest run (measured)", ()),
    "coral_fleet_nodes": ("Nodes held at the end of the newest run (measured)", ("region", "config", "market")),
    "coral_fleet_refused_starts": ("Starts refused within a day", ("region", "config", "code")),
    "coral_lease_until_seconds": ("Until when the fleet's lease runs, since 1970; 0 where nobody holds it", ()),
}
"""Help text and labels of every metric; all carry the label `fleet` besides."""

Samples = dict[str, dict[tuple[str, ...], float]]


class FleetMetrics(Collector):
    """A collector of all fleets in a store, or of those named."""

    def __init__(self, store: Store, clock: Clock, fleets: tuple[str, ...] = ()) -> None:
        self._store, self._clock, self._fleets = store, clock, fleets

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every metric, with a sample for each fleet that has one."""
        by_fleet = {fleet: self._of(fleet) for fleet in self._fleets or tuple(list_fleets(self._store))}
        for name, (text, labels) in METRICS.items():
            family = GaugeMetricFamily(name, text, labels=("fleet", *labels))
            for fleet, samples in by_fleet.items():
                for values, value in sorted(samples.get(name, {}).items()):
                    family.add_metric((fleet, *values), value)
            yield family

    def _of(self, fleet: str) -> Samples:
        try:
            return {**self._plan(fleet), **self._runs(fleet), "coral_records_readable": {(): 1.0}}
        except CoralError:  # what it was is for `coral fleet status`; here it is a fact to alert on
            return {"coral_records_readable": {(): 0.0}}

    def _plan(self, fleet: str) -> Samples:
        if not list_plans(self._store, fleet):
            return {}
        stored = read_plan(self._store, fleet)
        plan = stored.plan
        instances: Counter[tuple[str, ...]] = Counter()
        for item in plan["instances"]:
            instances[item["model"], item["phase"], item["region"], item.get("market", "on_demand")] += item["count"]
        covered = {(item["model"], item["phase"], item["unit"]): item for item in plan["coverage"]}
        return {
            "coral_plan_time_seconds": {(): stored.record.time.timestamp()},
            "coral_plan_cost_usd_per_h": {(): plan["cost_usd_per_h"]},
            "coral_plan_gap_frac": {(): plan["gap_frac"]},
            "coral_plan_demand": {key: item["demand"] for key, item in covered.items()},
            "coral_plan_capacity": {key: item["capacity"] for key, item in covered.items()},
            "coral_plan_shortfall_frac": {(item["model"], item["phase"]): item["frac"] for item in plan["shortfall"]},
            "coral_plan_instances": {key: float(count) for key, count in instances.items()},
        }

    def _runs(self, fleet: str) -> Samples:
        now = self._clock.now()
        recent = list_runs(self._store, fleet, since=now - RECENT)
        lease = read_lease(self._store, fleet)
        refused: Counter[tuple[str, ...]] = Counter()
        for run in recent:
            for item in run.result.failures if run.result else ():
                refused[item["region"], item["config"], item["code"]] += 1
        begun = [run for run in recent if run.steps is not None]
        return {
            "coral_runs": {(name,): float(n) for name, n in Counter(run.outcome.value for run in recent).items()},
            "coral_run_unfinished": {(): float(bool(begun) and begun[-1].result is None)},
            "coral_fleet_refused_starts": {key: float(count) for key, count in refused.items()},
            "coral_lease_until_seconds": {(): lease.until.timestamp() if lease and lease.until > now else 0.0},
            **self._held(fleet, recent),
        }

    def _held(self, fleet: str, recent: Sequence[FleetRun]) -> Samples:
        """Of the newest run that has looked; older than a day where nothing has run since."""
        acted = [run for run in recent if run.steps is not None and run.result is not None]
        acted = acted or [run for run in list_runs(self._store, fleet, newest=20, acted=True) if run.result is not None]
        if not acted:
            return {}
        result = acted[-1].result
        assert result is not None
        nodes = Counter((n["region"], n["tags"]["config"], str(n["market"])) for n in result.nodes)
        known: dict[tuple[str, ...], float] = {} if result.cost_usd_per_h is None else {(): result.cost_usd_per_h}
        return {
            "coral_run_time_seconds": {(): result.ended_at.timestamp()},
            "coral_fleet_cost_usd_per_h": known,
            "coral_fleet_nodes": {key: float(count) for key, count in nodes.items()},
        }


def registry_of(collector: FleetMetrics) -> CollectorRegistry:
    """A registry with this collector alone; it is asked at each scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def exposition(collector: FleetMetrics) -> str:
    """All metrics as text, as a scrape would get them."""
    return generate_latest(registry_of(collector)).decode("utf-8")
