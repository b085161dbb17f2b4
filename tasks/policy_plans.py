"""What a policy holds in each epoch of a scenario.

Each epoch is planned on its own supply, with the fleet of the epoch before as what runs: its nodes on demand stay ours
when the market has fewer, and it is kept where a change would cost more service than it brings.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_core.allocation.policies import Policy
from coral_core.allocation.transition import holding_what_runs, solve_from_running
from coral_core.allocation.warm_up import warm_up
from coral_core.config.resolve import ResolvedScenario, allocation_problem, node_prices, problem_templates
from coral_core.config.scenario import LibraryMethod
from coral_core.domain.allocation import AllocationResult, Running
from coral_core.domain.hardware import split_market
from coral_core.domain.templates import ServingTemplate
from coral_core.domain.workload import Phase
from coral_core.sim.timeline import Key
from tasks.plan import templates_by_id
from tasks.template_source import TemplateSource, policy_method, scaled_columns

ANY_REGION: Final = frozenset({"coral_paper"})
"""Policies whose prefill and decode may lie in different regions; their KV then crosses at no extra delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch's plan and the wall time it took to find."""

    result: AllocationResult
    solve_s: float

    @property
    def counts(self) -> dict[Key, int]:
        """Instances by (template, region)."""
        return {(item.template, item.region): item.count for item in self.result.instances}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPlans:
    """A policy's plans for all epochs; `method` made the templates. `vllm_chains`: those of them that vLLM's scheduler runs as pipelines.

    `supply` (epochs, R, C) is what it may hold: the market's, which is the same for all policies, and at least the nodes that
    it ran on demand in the epoch before.
    """

    policy: str
    method: LibraryMethod
    epochs: tuple[EpochPlan, ...]
    templates: Mapping[str, ServingTemplate]
    vllm_chains: frozenset[str]
    supply: NDArray[np.int64]

    @property
    def pd_same_region(self) -> bool:
        """Whether its decode must lie where its prefill does, if the scenario asks for that."""
        return self.policy not in ANY_REGION


def plan_epochs(
    source: TemplateSource, policy: Policy, *, utilization: Mapping[Phase, float] | None = None
) -> PolicyPlans:
    """The policy's plan for each epoch. `utilization` replaces the scenario's `max_utilization_frac` of the phases named.

    Throughput is proportional to that fraction, so the library holds for any.
    """
    resolved = source.resolved
    method = policy_method(resolved, policy)
    columns = scaled_columns(source.columns[method], utilization or {}, resolved.scenario.capacity)
    supply = source.supply_at(utilization) if utilization else source.supply
    running: tuple[Running, ...] = ()
    known = set(problem_templates(resolved, columns).ids)
    epochs: list[EpochPlan] = []
    held: list[NDArray[np.int64]] = []
    for available in supply:
        problem = allocation_problem(resolved, columns, running, available=available)
        if policy.name in ANY_REGION:
            problem = replace(problem, options=replace(problem.options, pd_same_region=False))
        warm_up(policy, problem)
        problem = holding_what_runs(problem)
        started_s = time.perf_counter()
        result = solve_from_running(problem, policy.solve)
        held.append(problem.available)
        epochs.append(EpochPlan(result=result, solve_s=time.perf_counter() - started_s))
        running = tuple(
            Running(template=item.template, region=item.region, count=item.count)
            for item in result.instances
            if item.template in known
        )
    chosen = sorted({item.template for epoch in epochs for item in epoch.result.instances})
    templates = templates_by_id(source.rows[method], chosen)
    on_vllm = source.scopes[method].on_vllm if method in source.scopes else frozenset()
    return PolicyPlans(
        policy=policy.name,
        method=method,
        epochs=tuple(epochs),
        templates=templates,
        vllm_chains=frozenset(
            name
            for name, template in templates.items()
            if len(template.placement.stages) > 1 and split_market(name)[0] in on_vllm
        ),
        supply=np.array(held),
    )


def template_nodes(resolved: ResolvedScenario, plans: PolicyPlans) -> dict[str, NDArray[np.int64]]:
    """(offers,) nodes by template, in the order of the scenario's offers."""
    offers = [split_market(name) for name in resolved.offers]
    return {
        name: np.array(
            [
                template.placement.combination.get(config, 0) if market is split_market(name)[1] else 0
                for config, market in offers
            ],
            dtype=np.int64,
        )
        for name, template in plans.templates.items()
    }


def template_prices(resolved: ResolvedScenario, plans: PolicyPlans) -> dict[Key, float]:
    """USD/h of one instance by (template, region), of those planned."""
    prices = np.nan_to_num(node_prices(resolved))
    nodes = template_nodes(resolved, plans)
    keys = {key for epoch in plans.epochs for key in epoch.counts if key[0] in nodes}
    return {
        (template, region): float(nodes[template] @ prices[resolved.scenario.regions.index(region)])
        for template, region in keys
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCounts:
    """Instances of a plan, how many of them mix configurations, and their nodes; None where a template is not a library's."""

    instances: int
    mixed_instances: int | None
    nodes: int | None


def instance_counts(plans: PolicyPlans, epoch: int) -> InstanceCounts:
    """The counts of an epoch's plan."""
    counts: Counter[str] = Counter()
    for (template, _), count in plans.epochs[epoch].counts.items():
        counts[template] += count
    known = {name: plans.templates[name].placement.combination for name in counts if name in plans.templates}
    whole = len(known) == len(counts)
    return InstanceCounts(
        instances=sum(counts.values()),
        mixed_instances=sum(counts[name] for name in known if len(known[name]) > 1) if whole else None,
        nodes=sum(counts[name] * sum(nodes.values()) for name, nodes in known.items()) if whole else None,
    )
