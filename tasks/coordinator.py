"""What a coordinator asks of the store: the launch plan of an instance's template, from the library it was planned with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow.compute as pc

from artifacts.library import list_versions, open_library
from artifacts.store import Store
from artifacts.templates import row_to_template
from coral_core.config.resolve import ResolvedScenario
from coral_core.domain.hardware import NodeConfig
from coral_core.domain.launch import Device, EngineTerms, LaunchPlan
from coral_core.domain.templates import ServingTemplate
from coral_core.engine.chain_commands import dtype_of
from coral_core.engine.launch import launch_plan
from coral_core.errors import InputError, NoSolutionError
from coral_core.perf.layer_times import AS_MEASURED
from coral_core.perf.search import Layout
from coral_core.serving.control.held import AskPlan
from tasks.library import ModelBuild, build_spec_from_scenario
from tasks.node_throughputs import node_throughputs

_VERSIONS: Final = 5
"""How many of a library's newest versions are looked through: a plan may be older than the newest one."""


def launcher(store: Store, resolved: ResolvedScenario, terms: EngineTerms) -> Callable[[AskPlan], LaunchPlan]:
    """What says how an instance is launched.

    It raises InputError for a template that no recent version of the scenario's library has, NoSolutionError for one whose
    GPUs lack what its engine would compute in, and as `launch_plan` does.
    """
    spec = build_spec_from_scenario(resolved)
    models = {(model.shape.name, model.variant): model for model in spec.models}

    def launch(question: AskPlan) -> LaunchPlan:
        row = _template_row(store, spec.library, question)
        template = row_to_template(row)
        model = models.get((template.model, template.variant))
        if model is None:
            raise InputError(
                f"the scenario does not serve {template.model} {template.variant}",
                where=f"template {template.template_id}",
                fix="give the coordinator the scenario that the fleet is planned for",
            )
        _check_dtype(template, model, terms, spec.configs)
        return launch_plan(
            instance_id=question.instance_id,
            template=template,
            layouts=_layouts(row),
            shape=model.shape,
            terms=terms,
            assumptions=model.assumptions(spec.assumptions),
            places=question.places,
            throughputs=node_throughputs(template, spec, model),
        )

    return launch


def _check_dtype(
    template: ServingTemplate, model: ModelBuild, terms: EngineTerms, configs: Sequence[NodeConfig]
) -> None:
    """Capacities take fp16 where a GPU has no bf16; vLLM does so only if told, and all engines of a model must agree, as their KV does."""
    given = terms.models.get((template.model, template.variant))
    if (
        terms.device is Device.CPU
        or given is None
        or (given.dtype or dtype_of(model.shape, model.variant)) != "bfloat16"
    ):
        return
    used = [config.gpu for config in configs if config.name in template.placement.combination]
    lacking = sorted({gpu.name for gpu in used if "bf16" not in gpu.compute_flops_per_s})
    if lacking:
        raise NoSolutionError(
            f"{', '.join(lacking)} cannot compute in bfloat16",
            where=f"template {template.template_id}",
            fix="plan with the variant fp16, or give the model `dtype: float16` in the engine file, for all its engines",
        )


def _template_row(store: Store, library: str, question: AskPlan) -> dict[str, Any]:
    """The template's row in the newest version that has it."""
    for version in islice(reversed(list_versions(store, library)), _VERSIONS):
        snapshot = open_library(store, library, version)
        if question.model in snapshot.models:
            rows = snapshot.read(models=[question.model], phases=[question.phase])
            found = rows.filter(pc.equal(rows["template_id"], question.template_id))
            if found.num_rows:
                row: dict[str, Any] = found.slice(0, 1).to_pylist()[0]
                return row
    raise InputError(
        f"no template {question.template_id} of {question.model} in its newest {_VERSIONS} versions",
        where=f"library {library}",
        fix="give the coordinator the scenario that the fleet is planned for",
    )


def _layouts(row: dict[str, Any]) -> list[list[Layout | None]]:
    """The layouts inside the nodes, stage by stage; None where the library does not say."""
    stages = row["stage_layouts"] or [[AS_MEASURED] * len(nodes) for nodes in row["stage_nodes"]]
    return [[None if text == AS_MEASURED else Layout.parse(text) for text in stage] for stage in stages]
