"""Measured times that a scenario's capacities come from: layer time tables, and profiles in the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts.profiles import newest_profile
from artifacts.store import open_store
from coral_core.config.layer_times import load_layer_times
from coral_core.config.resolve import ResolvedScenario
from coral_core.config.scenario import LayerTimesSpec, ProfilesSpec
from coral_core.config.settings import load_settings
from coral_core.errors import DataGapError
from coral_core.perf.layer_times import LayerTimes
from coral_core.perf.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Layer times that capacities come from instead of the estimates; `nodes` maps configurations to the table's nodes."""

    times: LayerTimes
    nodes: Mapping[str, str]


def measured_times(spec: LayerTimesSpec | None) -> MeasuredTimes | None:
    """The layer time table that a scenario names; None where it names none. DataGapError where it is not at hand."""
    if spec is None:
        return None
    return MeasuredTimes(times=load_layer_times(spec), nodes={name: node.node for name, node in spec.nodes.items()})


def stored_profiles(spec: ProfilesSpec | None, resolved: ResolvedScenario) -> dict[tuple[str, str], dict[str, Profile]]:
    """The newest profile of each model, variant and configuration by one engine; DataGapError where there is none at all."""
    if spec is None:
        return {}
    store = open_store(spec.store or load_settings().store_url)
    found: dict[tuple[str, str], dict[str, Profile]] = {}
    for model in resolved.models:
        for config in resolved.configs:
            profile = newest_profile(store, model.shape.name, config.name, spec.engine)
            if profile is not None and profile.key.variant in model.variants:
                found.setdefault((model.shape.name, profile.key.variant), {})[config.name] = profile
    if not found:
        raise DataGapError(
            f"no profile by {spec.engine} of any model and configuration of scenario {resolved.scenario.name}",
            where="capacity.profiles",
            fix=f"see `coral profile list --store {store.url}`",
        )
    return found
