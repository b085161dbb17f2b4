"""How the nodes of a stage share its requests, and what each counts for: the throughput that the placement counted on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coral_core.domain.templates import ServingTemplate
from coral_core.errors import DataGapError
from coral_core.perf import capacity_table
from coral_core.perf.budgets import GRID, budget_table
from coral_core.perf.search import LayoutLimits

if TYPE_CHECKING:
    from tasks.library import BuildSpec, ModelBuild


def node_throughputs(template: ServingTemplate, spec: BuildSpec, model: ModelBuild) -> list[float] | None:
    """T^ of each node as one replica, in the order of `spec_of(template).slots`; None where no stage has several nodes.

    Raises DataGapError where a node has no capacity with today's figures; None where all nodes of each stage are alike,
    which can share without.
    """
    stages = template.placement.stages
    if all(len(stage.nodes) == 1 for stage in stages):
        return None
    try:
        return _capacities(template, spec, model)
    except DataGapError:
        if all(len(set(stage.nodes)) == 1 for stage in stages):
            return None
        raise


def _capacities(template: ServingTemplate, spec: BuildSpec, model: ModelBuild) -> list[float]:
    stages = template.placement.stages
    used = sorted({node for stage in stages for node in stage.nodes})
    question = spec.question(model, template.phase)
    question["configs"] = tuple(config for config in spec.configs if config.name in used)
    column = {config.name: index for index, config in enumerate(question["configs"])}
    missing = [node for node in used if node not in column]
    if missing:
        raise DataGapError(f"the scenario has no {', '.join(missing)}", where=f"template {template.template_id}")
    limits = LayoutLimits(whole_node=True)
    if len(stages) == 1 or stages[0].budget_frac is None:  # one stage has all the time and no hop
        equal = capacity_table(max_stages=len(stages), limits=limits, **question).throughput[-1]
        of_stage = [equal] * len(stages)
    else:
        grid = budget_table(limits=limits, **question).throughput
        of_stage = [grid[max(round((stage.budget_frac or 1.0) * GRID), 1) - 1] for stage in stages]
    shares = [
        float(rates[column[node], stage.layers - 1])
        for stage, rates in zip(stages, of_stage, strict=True)
        for node in sorted(stage.nodes)
    ]
    if min(shares) <= 0:
        raise DataGapError(
            "a node of it has no capacity with today's figures",
            where=f"template {template.template_id}",
            fix="build the library again, and plan anew",
        )
    return shares
