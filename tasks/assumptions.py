"""Which assumption a ratio between policies hangs on: the scenario with one thing changed at a time, planned by each of them.

All figures are predicted costs of the first epoch's plan. Beside the policies stands the plainest reading of a greedy
baseline: for each model and phase the homogeneous template of most throughput per USD, as often as the demand takes,
rounded up. Policy `homo` weighs what its last instance still adds, this one does not:

    cost = (1 + K) sum over rows of ceil(D / T(tau*)) p(tau*),  tau* = argmax T(tau) / p(tau)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from artifacts.library import LibrarySnapshot
from coral_core.allocation.baselines.homo_joint import homogeneous
from coral_core.allocation.policies import Policy
from coral_core.config.policies import scenario_policies
from coral_core.config.resolve import ResolvedScenario, allocation_problem, resolve_scenario
from coral_core.config.scenario import Ample, CapacitySpec, Scenario
from coral_core.domain.allocation import AllocationProblem
from coral_core.errors import CoralError, InputError, unknown_name
from tasks.policy_plans import plan_epochs
from tasks.template_source import TemplateSource, needed_methods, with_method

POLICIES: Final = ("coral", "coral_paper", "homo_joint", "homo", "cauchy")
SUBJECT: Final = "coral"
ROUNDED: Final = "best homogeneous template, rounded up"
ROUNDED_SINGLE: Final = "the same, replicas of one node"
GREEDY: Final = (ROUNDED, ROUNDED_SINGLE)

Row = dict[str, Any]
Snapshots = Callable[[ResolvedScenario], LibrarySnapshot]
"""The library of a scenario, built first where it is missing."""


def _rates(factor: float) -> Callable[[Scenario], Scenario]:
    def change(scenario: Scenario) -> Scenario:
        models = [m.model_copy(update={"requests_per_s": m.requests_per_s * factor}) for m in _rated(scenario)]
        return scenario.model_copy(update={"models": tuple(models)})

    return change


def _rated(scenario: Scenario) -> Sequence[Any]:
    without = next((model.model for model in scenario.models if model.requests_per_s is None), None)
    if without is not None:
        raise InputError(
            f"{without} has the rate of a trace", where=scenario.name, fix="give requests_per_s to change it"
        )
    return scenario.models


def _slos(factor: float) -> Callable[[Scenario], Scenario]:
    def change(scenario: Scenario) -> Scenario:
        models = [
            model.model_copy(
                update={
                    "slo": model.slo.model_copy(
                        update={"ttft_s": model.slo.ttft_s * factor, "tpot_s": model.slo.tpot_s * factor}
                    )
                }
            )
            for model in scenario.models
        ]
        return scenario.model_copy(update={"models": tuple(models)})

    return change


def _n_max(nodes: int) -> Callable[[Scenario], Scenario]:
    return lambda scenario: scenario.model_copy(
        update={"library": scenario.library.model_copy(update={"n_max": nodes})}
    )


def _no_headroom(scenario: Scenario) -> Scenario:
    bare = CapacitySpec(allow_estimates=scenario.capacity.allow_estimates, layer_times=scenario.capacity.layer_times)
    return scenario.model_copy(update={"capacity": bare})


def _first_region(scenario: Scenario) -> Scenario:
    return scenario.model_copy(update={"regions": scenario.regions[:1]})


def _any_region(scenario: Scenario) -> Scenario:
    return scenario.model_copy(update={"allocation": scenario.allocation.model_copy(update={"pd_same_region": False})})


def _equal_split(scenario: Scenario) -> Scenario:
    library = scenario.library.model_copy(update={"method": "lattice", "name": f"{scenario.library_name}-lattice"})
    return scenario.model_copy(update={"library": library})


ASSUMPTIONS: Final[Mapping[str, Callable[[Scenario], Scenario]]] = {
    "as stated": lambda scenario: scenario,
    "no headroom": _no_headroom,
    "no headroom, rates x 0.25": lambda scenario: _no_headroom(_rates(0.25)(scenario)),
    "no headroom, bounds x 0.5": lambda scenario: _no_headroom(_slos(0.5)(scenario)),
    "equal split for all": _equal_split,
    "prefill and decode in any region": _any_region,
    "first region only": _first_region,
    "rates x 0.25": _rates(0.25),
    "rates x 4": _rates(4.0),
    "rates x 16": _rates(16.0),
    "bounds x 0.5": _slos(0.5),
    "bounds x 2": _slos(2.0),
    "n_max 1": _n_max(1),
    "n_max 2": _n_max(2),
}
"""What is changed, by name; everything else stays as the scenario states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumptionRun:
    """Which rows, and whose costs are beside Coral's."""

    names: tuple[str, ...] = tuple(ASSUMPTIONS)
    policies: tuple[str, ...] = POLICIES

    def __post_init__(self) -> None:
        """Raise InputError for names that do not exist."""
        for name in self.names:
            if name not in ASSUMPTIONS:
                raise unknown_name("assumption", name, ASSUMPTIONS, where="--only")
        for name in self.policies:
            if name not in POLICIES:
                raise unknown_name("policy", name, POLICIES, where="--policies")


def assumption_rows(
    scenario: Scenario, snapshots: Snapshots, run: AssumptionRun, *, user_models: Path | None = None
) -> Iterator[Row]:
    """One row for each assumption changed: Coral's cost, and the others' over it (None where one has no full plan).

    A change that cannot be planned says why in `failed`. Raises InputError where supply is not ample: the plain greedy
    baseline knows no limits.
    """
    if not isinstance(scenario.availability, Ample):
        raise InputError(
            f"supply is {scenario.availability.kind}",
            where=f"scenario {scenario.name}",
            fix="use one with ample supply",
        )
    for name in run.names:
        try:
            changed = ASSUMPTIONS[name](scenario)
            yield {"assumption": name, **_costs(_named(changed, scenario, name), snapshots, run, user_models)}
        except CoralError as error:
            yield {"assumption": name, "failed": str(error)}


def _named(changed: Scenario, scenario: Scenario, name: str) -> Scenario:
    """With a library of its own where its templates differ from the scenario's."""
    same = (changed.capacity, changed.library.n_max, [m.slo for m in changed.models]) == (
        scenario.capacity,
        scenario.library.n_max,
        [m.slo for m in scenario.models],
    )
    suffix = "" if same else "-" + re.sub("[^a-z0-9]+", "-", name)
    library = changed.library.model_copy(update={"name": f"{changed.library_name}{suffix}"})
    epochs = changed.epochs.model_copy(update={"count": 1})
    return changed.model_copy(update={"library": library, "epochs": epochs})


def _costs(scenario: Scenario, snapshots: Snapshots, run: AssumptionRun, user_models: Path | None) -> Row:
    resolved = resolve_scenario(scenario, user_models=user_models)
    policies = scenario_policies(resolved, [SUBJECT, *(name for name in run.policies if name != SUBJECT)])
    methods = needed_methods(resolved, list(policies.values()))
    source = TemplateSource(resolved, {method: snapshots(with_method(resolved, method)) for method in methods})
    costs = {name: _cost_usd_per_h(source, policy) for name, policy in policies.items()}
    problem = homogeneous(allocation_problem(resolved, source.columns[methods[-1]], available=source.supply[0]))
    costs |= {ROUNDED: rounded_up_usd_per_h(problem), ROUNDED_SINGLE: rounded_up_usd_per_h(problem, single=True)}
    ours = costs[SUBJECT]
    return {
        "cost_usd_per_h": costs,
        "ratios": {name: None if ours is None or cost is None else cost / ours for name, cost in costs.items()},
    }


def _cost_usd_per_h(source: TemplateSource, policy: Policy) -> float | None:
    (epoch,) = plan_epochs(source, policy).epochs
    return epoch.result.objective_usd_per_h if epoch.result.full else None


def rounded_up_usd_per_h(problem: AllocationProblem, *, single: bool = False) -> float | None:
    """The formula above over the problem's templates, or those of one node; None where a row has none.

    Regions are chosen row by row.
    """
    templates = problem.templates
    # nodes that a template lacks cost nothing, sold or not
    unsold = (templates.nodes > 0).astype(float) @ np.isnan(problem.price_usd_per_h).T.astype(float) > 0
    price = np.where(unsold, math.inf, templates.nodes @ np.nan_to_num(problem.price_usd_per_h).T).min(axis=1)
    total = 0.0
    for row in problem.demand:
        asked = row.tokens_per_s if row.tokens_per_s is not None else row.requests_per_s
        if not asked:
            continue
        mine = np.array(
            [pair == (row.model, row.phase) for pair in zip(templates.models, templates.phases, strict=True)]
        )
        mine &= np.isfinite(price) & (~np.full(len(price), single) | (templates.nodes.sum(axis=1) == 1))
        if not mine.any():
            return None
        at = np.flatnonzero(mine)
        best = at[np.argmax(templates.throughput[at] / price[at])]
        total += math.ceil(asked / templates.throughput[best] - 1e-9) * float(price[best])
    return total * (1 + problem.churn_k)
