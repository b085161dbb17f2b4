"""The templates that policies plan from: which libraries that takes, and the supply that all policies share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from artifacts.library import LibrarySnapshot, list_libraries, open_library
from artifacts.store import Store
from artifacts.templates import template_columns
from coral_core.allocation.policies import Policy
from coral_core.config.resolve import ResolvedScenario, available_nodes
from coral_core.config.scenario import CapacitySpec, LibraryMethod, RandomWalk
from coral_core.domain.allocation import TemplateColumns
from coral_core.domain.workload import Phase
from coral_core.engine.runnable import ModelFacts
from coral_core.errors import InputError
from tasks.executor import Executor
from tasks.library import BuildProgress, build_library, build_spec_from_scenario
from tasks.plan import scenario_templates, stale_inputs
from tasks.runtimes import scope_of

FREE_SPLIT: Final = "lattice-free"
PUBLISHED_SPLIT: Final = "lattice"


def policy_method(resolved: ResolvedScenario, policy: Policy) -> LibraryMethod:
    """How the templates that a policy plans from are made.

    As the scenario says; but a policy that is meant for the published split never gets free ones.
    """
    method = resolved.scenario.library.method
    return PUBLISHED_SPLIT if policy.published_split and method == FREE_SPLIT else method


def needed_methods(resolved: ResolvedScenario, policies: Sequence[Policy]) -> tuple[LibraryMethod, ...]:
    """The libraries that planning takes, each once; supply that is scaled to an ample plan needs the scenario's own."""
    methods = [policy_method(resolved, policy) for policy in policies]
    return tuple(dict.fromkeys([*methods, resolved.scenario.library.method] if scales_with_plan(resolved) else methods))


def scales_with_plan(resolved: ResolvedScenario) -> bool:
    """Whether the scenario's supply depends on what a plan holds."""
    spec = resolved.scenario.availability
    return isinstance(spec, RandomWalk) and spec.memory_frac_of_ample is not None


def with_method(resolved: ResolvedScenario, method: LibraryMethod) -> ResolvedScenario:
    """The scenario with another library method; the library gets a name of its own unless the method is the scenario's."""
    scenario = resolved.scenario
    if method == scenario.library.method:
        return resolved
    library = scenario.library.model_copy(update={"method": method, "name": f"{scenario.library_name}-{method}"})
    return replace(resolved, scenario=scenario.model_copy(update={"library": library}))


def fresh_library(
    resolved: ResolvedScenario,
    store: Store,
    executor: Executor,
    *,
    on_progress: Callable[[BuildProgress], None] | None = None,
) -> LibrarySnapshot:
    """The newest snapshot of the scenario's library, built first where it is missing or stale."""
    name = resolved.scenario.library_name
    if name in list_libraries(store):
        snapshot = open_library(store, name)
        if not stale_inputs(resolved, snapshot):
            return snapshot
    manifest = build_library(build_spec_from_scenario(resolved), store, executor, on_progress=on_progress)
    return open_library(store, name, manifest.version)


class TemplateSource:
    """The libraries of one scenario, by method, read once each; and the supply that all policies share.

    Where the scenario names runtimes, `rows` are those that one of them can run, as `scopes` say.
    """

    def __init__(
        self,
        resolved: ResolvedScenario,
        snapshots: Mapping[LibraryMethod, LibrarySnapshot],
        *,
        rows: Mapping[LibraryMethod, pa.Table] | None = None,
    ) -> None:
        """`rows` are templates at hand, beside those of the snapshots."""
        self.resolved = resolved
        self.snapshots = dict(snapshots)
        names = [config.name for config in resolved.configs]
        allowed = resolved.scenario.runtimes
        facts = {model.shape.name: ModelFacts.of(model.shape) for model in resolved.models}
        found = {
            method: scenario_templates(with_method(resolved, method), snapshot, for_runtimes=allowed is not None)
            for method, snapshot in snapshots.items()
        } | dict(rows or {})
        self.scopes = {} if allowed is None else {m: scope_of(rows, facts, allowed) for m, rows in found.items()}
        self.rows: dict[LibraryMethod, pa.Table] = found | {m: scope.usable for m, scope in self.scopes.items()}
        self.columns = {method: template_columns(rows, names) for method, rows in self.rows.items()}
        self.supply = self.supply_at({})

    def supply_at(self, utilization: Mapping[Phase, float]) -> NDArray[np.int64]:
        """(epochs, R, C) nodes to be had.

        Where it is scaled to an ample plan, that plan counts on the same capacities, and comes from the scenario's own
        library, as the supply of `coral plan` does.
        """
        resolved = self.resolved
        method = resolved.scenario.library.method if scales_with_plan(resolved) else next(iter(self.columns))
        return available_nodes(resolved, scaled_columns(self.columns[method], utilization, resolved.scenario.capacity))

    def changed(self, resolved: ResolvedScenario) -> TemplateSource:
        """The same libraries for a scenario that differs in nothing that templates depend on."""
        other = copy(self)
        other.resolved = resolved
        other.supply = other.supply_at({})
        return other


def scaled_columns(columns: TemplateColumns, wanted: Mapping[Phase, float], capacity: CapacitySpec) -> TemplateColumns:
    """Templates at other utilisations than those of `capacity`, with which they were made. InputError outside (0, 1]."""
    for phase, value in wanted.items():
        if not 0 < value <= 1:
            raise InputError(f"{value!r} is not in (0, 1]", where=f"max_utilization_frac.{phase}")
    pairs = set(zip(columns.models, columns.phases, strict=True))
    factor = {
        (model, phase): wanted[phase] / capacity.max_utilization_frac_of(model, phase) if phase in wanted else 1.0
        for model, phase in pairs
    }
    factors = [factor[pair] for pair in zip(columns.models, columns.phases, strict=True)]
    return replace(columns, throughput=columns.throughput * np.array(factors))
