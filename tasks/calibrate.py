"""How much of a capacity a plan may count on: `max_utilization_frac` per phase, found in the simulator (DESIGN 3.1).

At full load the queue alone breaks the SLO. For each phase the highest fraction of a grid is sought by bisection at which
the scenario's plan at ample supply serves, over one epoch, at least `TARGET_FRAC` of every model's offered tokens within
their SLO, in the mean over the seeds; the other phase is held at the lowest fraction meanwhile. Both are then tried
together and lowered in turn, the higher first, until the goal holds. Where even the lowest fraction fails, that is said,
with what it reached and whether the first token or the following ones are late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final

from coral_core.allocation.policies import Policy
from coral_core.config.resolve import ResolvedScenario
from coral_core.config.scenario import Ample
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.sim import ModelMetrics
from tasks.replay import TemplateSource, fleet_of, plan_epochs, replay

TARGET_FRAC: Final = 0.99
GRID: Final = tuple(round(0.3 + 0.05 * step, 2) for step in range(15))
"""0.3 to 1.0 in steps of 0.05."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One plan at fractions by phase, simulated. `goodput_frac` is each model's goodput over its offered tokens/s.

    `latencies_s` holds each model's 99th percentiles beside its bounds, so that it shows which bound is broken.
    """

    utilization: Mapping[str, float]
    cost_usd_per_h: float
    planned_full: bool
    goodput_frac: Mapping[str, float]
    without_handover_goodput_frac: Mapping[str, float]
    latencies_s: Mapping[str, Mapping[str, float]]

    def meets(self, *, target_frac: float, handover: bool) -> bool:
        """Whether every model's goodput reaches the target, with the time per output token counted as asked."""
        shares = self.goodput_frac if handover else self.without_handover_goodput_frac
        return all(share >= target_frac for share in shares.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was found: fractions by phase, None where the target is not met at the lowest of the grid.

    `alone` holds what each phase reaches beside the others at their lowest; `trials` all plans simulated, in order.
    """

    scenario: str
    policy: str
    target_frac: float
    handover: bool
    seeds: tuple[int, ...]
    found: Mapping[str, float] | None
    alone: Mapping[str, float | None]
    trials: tuple[Trial, ...]

    @property
    def document(self) -> dict[str, Any]:
        """As JSON has it; every goodput in it is simulated."""
        return {**asdict(self), "kind": "simulated"}


def calibrate(
    source: TemplateSource,
    policy: Policy,
    seeds: Sequence[int],
    *,
    grid: Sequence[float] = GRID,
    target_frac: float = TARGET_FRAC,
    handover: bool = True,
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> Calibration:
    """Calibrate a scenario's phases. `handover` counts hand-over from prefill to decode as time per output token.

    Goodput falls as utilisation rises only in the mean, so a lucky plan above the answer may go unseen.
    Raises InputError for an unusable grid, target or scenario.
    """
    grid = sorted(set(grid))
    if not grid or not 0 < grid[0] <= grid[-1] <= 1:
        raise InputError(f"the grid {grid} is not within (0, 1]", where="grid")
    if not 0 < target_frac <= 1:
        raise InputError(f"{target_frac!r} is not in (0, 1]", where="target_frac")
    phases = list(dict.fromkeys(phase for model in source.resolved.models for phase in model.phases))
    source = _ample_epoch(source)
    trials: dict[tuple[float, ...], Trial] = {}

    def meets(at: Mapping[Phase, int]) -> bool:
        key = tuple(grid[at[phase]] for phase in phases)
        if key not in trials:
            trials[key] = _trial(source, policy, seeds, dict(zip(phases, key, strict=True)))
            on_trial(trials[key])
        return trials[key].meets(target_frac=target_frac, handover=handover)

    lowest = dict.fromkeys(phases, 0)
    alone: dict[Phase, int | None] = dict.fromkeys(phases)
    together: dict[Phase, int] | None = None
    if meets(lowest):
        highest = {phase: _last_met(meets, lowest, phase, len(grid)) for phase in phases}
        alone.update(highest)
        together = dict(highest)
        while not meets(together):
            together[max(phases, key=lambda phase: together[phase])] -= 1
    return Calibration(
        scenario=source.resolved.scenario.name,
        policy=policy.name,
        target_frac=target_frac,
        handover=handover,
        seeds=tuple(seeds),
        found=None if together is None else {phase.value: grid[at] for phase, at in together.items()},
        alone={phase.value: None if at is None else grid[at] for phase, at in alone.items()},
        trials=tuple(trials.values()),
    )


def _last_met(meets: Callable[[Mapping[Phase, int]], bool], lowest: Mapping[Phase, int], phase: Phase, n: int) -> int:
    """Bisection between the lowest point, which is met, and the end of the grid."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets({**lowest, phase: middle}) else (low, middle)
    return low


def _ample_epoch(source: TemplateSource) -> TemplateSource:
    """The source with one epoch and ample supply: its fleet is ready from the start, so that load alone matters."""
    scenario = source.resolved.scenario
    update = {"epochs": scenario.epochs.model_copy(update={"count": 1}), "availability": Ample()}
    return source.changed(replace(source.resolved, scenario=scenario.model_copy(update=update)))


def _trial(source: TemplateSource, policy: Policy, seeds: Sequence[int], utilization: Mapping[Phase, float]) -> Trial:
    plans = plan_epochs(source, policy, utilization=utilization)
    fleet = fleet_of(source.resolved, plans)
    runs = [replay(source.resolved, plans, seed=seed, fleet=fleet) for seed in seeds]
    result = plans.epochs[0].result
    return Trial(
        utilization={phase.value: value for phase, value in utilization.items()},
        cost_usd_per_h=result.cost_usd_per_h,
        planned_full=result.full,
        goodput_frac=_goodput_frac([run.whole for run in runs]),
        without_handover_goodput_frac=_goodput_frac([run.without_handover for run in runs]),
        latencies_s=_latencies_s(source.resolved, [run.whole for run in runs]),
    )


def _goodput_frac(runs: Sequence[Mapping[str, ModelMetrics]]) -> dict[str, float]:
    """Each model's goodput over what was offered, mean over the runs; models that nothing is asked of are left out."""
    return {
        model: fmean(run[model].goodput_tokens_per_s / run[model].offered_tokens_per_s for run in runs)
        for model in runs[0]
        if model != "*" and all(run[model].offered_requests for run in runs)
    }


def _latencies_s(resolved: ResolvedScenario, runs: Sequence[Mapping[str, ModelMetrics]]) -> dict[str, dict[str, float]]:
    """Bounds beside 99th percentiles, means over the runs, of models with any request done."""
    found = {}
    for model in resolved.models:
        metrics = [run[model.shape.name] for run in runs]
        if all(one.ttft.requests and one.tpot.requests for one in metrics):
            found[model.shape.name] = {
                "ttft_bound": model.demand.slo.ttft_s,
                "ttft_p99": fmean(one.ttft.percentile_s[99.0] for one in metrics),
                "tpot_bound": model.demand.slo.tpot_s,
                "tpot_p99": fmean(one.tpot.percentile_s[99.0] for one in metrics),
            }
    return found
