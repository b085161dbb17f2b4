"""A scenario so small that planning and simulating it takes a fraction of a second, and its libraries."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from artifacts.store import open_store
from coral_core.config.policies import scenario_policies
from coral_core.config.resolve import ResolvedScenario, resolve_scenario
from coral_core.config.scenario import Scenario, load_scenario
from tasks.executor import InlineExecutor
from tasks.template_source import TemplateSource, fresh_library, needed_methods, with_method

MICRO_YAML = """
name: micro
catalog: paper-core
configs: [1xL40S, 1xL4, 1xA10G]
regions: [us-east-2, ap-northeast-2]
models:
  - model: phi-4
    requests_per_s: 4
    lengths: {mean_input_tokens: 300, mean_output_tokens: 60}
    slo: {ttft_s: 1.2, tpot_s: 0.25}
library: {n_max: 2, rho: 12}
capacity: {max_utilization_frac: {prefill: 0.6, decode: 0.6}}
allocation: {startup_s: 5, interval_s: 60}
epochs: {count: 2, duration_s: 15}
policies: [coral, coral_paper, homo_joint, homo]
seeds: [0, 1]
"""


def micro(folder: Path, *changes: tuple[str, str]) -> Path:
    """The scenario as a file, after textual changes; each must be of something that is there."""
    text = MICRO_YAML
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "micro.yaml"
    path.write_text(text)
    return path


def resolved(folder: Path, *changes: tuple[str, str]) -> ResolvedScenario:
    scenario: Scenario = load_scenario(str(micro(folder, *changes)))
    return resolve_scenario(scenario)


def source_of(scenario: ResolvedScenario) -> TemplateSource:
    """Its libraries, kept within the process: they depend on nothing that the tests change."""
    methods = needed_methods(scenario, list(scenario_policies(scenario).values()))
    return TemplateSource(
        scenario,
        {method: fresh_library(with_method(scenario, method), _store(), InlineExecutor()) for method in methods},
    )


@cache
def _store():
    return open_store("memory://evaluation-cases")
