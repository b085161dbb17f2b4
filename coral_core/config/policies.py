"""The policies that a scenario names, ready to be asked."""

from __future__ import annotations

from collections.abc import Sequence

from coral_core.allocation.policies import HELIX, Policy, helix_policy, policy
from coral_core.config.layer_times import pool_problem
from coral_core.config.resolve import ResolvedScenario


def scenario_policies(resolved: ResolvedScenario, names: Sequence[str] | None = None) -> dict[str, Policy]:
    """The scenario's policies, or those of `names`, by name and in that order.

    Raises InputError for an unknown name, and for `helix` where the scenario has no fixed pool in its first region.
    """
    return {name: _policy(resolved, name) for name in names or resolved.scenario.policies}


def _policy(resolved: ResolvedScenario, name: str) -> Policy:
    if name != HELIX:
        return policy(name)
    region = resolved.scenario.regions[0]
    time_limit_s = resolved.scenario.allocation.time_limit_s
    return helix_policy(pool_problem(resolved, region=region), region=region, time_limit_s=time_limit_s)
