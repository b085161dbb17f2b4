"""Which of a library's templates a runtime can run, and what it costs to plan with those alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coral_core.config.allocation_file import allocation_result_to_json
from coral_core.domain.allocation import AllocationResult
from coral_core.domain.hardware import split_market
from coral_core.domain.launch import Runtime
from coral_core.domain.workload import Phase
from coral_core.engine.runnable import LaidOut, ModelFacts, obstacles, reasons, runs_on
from coral_core.errors import unknown_name
from coral_core.perf.layer_times import AS_MEASURED
from coral_core.perf.search import Layout
from coral_core.report.plan_report import extra_text, restriction_text

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Allowed = tuple[Runtime, ...] | None
"""Runtimes that a plan may rely on; None: any template, whether something can run it or not."""

RESTRICTIONS: Final[tuple[Allowed, ...]] = ((Runtime.VLLM,), tuple(Runtime), None)
"""What every plan is compared with."""
_ALIKE: Final = 1e-6
"""Weighted fractions of demand that count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A library's rows, what stands in the way of each (n,), and which runtimes a plan may rely on.

    `passes_kv` (n,): prefill or decode.
    """

    rows: pa.Table
    found: Ints
    passes_kv: Bools
    models: Mapping[str, ModelFacts]
    allowed: Allowed

    def mask(self, allowed: Allowed) -> Bools:
        """The rows that one of `allowed` can run, (n,).

        Prefill and decode exchange KV by our own connector wherever our runtime is among them, so all must be able to.
        """
        if allowed is None:
            return np.ones(len(self.found), dtype=np.bool_)
        masks = [runs_on(self.found, runtime) for runtime in allowed]
        result: Bools = np.logical_or.reduce(masks)
        return result & (runs_on(self.found, Runtime.CORAL) | ~self.passes_kv) if Runtime.CORAL in allowed else result

    @property
    def usable(self) -> pa.Table:
        """The rows that the plan may use."""
        return self.rows.filter(pa.array(self.mask(self.allowed)))

    @property
    def on_vllm(self) -> frozenset[str]:
        """The templates that are launched on vLLM where its nodes have what the plan may rely on; none where any template may be used."""
        if self.allowed is None or Runtime.VLLM not in self.allowed:
            return frozenset()
        own = runs_on(self.found, Runtime.VLLM) & ~(self.passes_kv & (Runtime.CORAL in self.allowed))
        return frozenset(self.rows.filter(pa.array(own))["template_id"].to_pylist())

    @property
    def left_out(self) -> set[tuple[str, Phase]]:
        """Models and phases that have templates, none of which the plan may use."""
        pairs = [
            {(row["model"], Phase(row["phase"])) for row in rows.group_by(["model", "phase"]).aggregate([]).to_pylist()}
            for rows in (self.rows.select(["model", "phase"]), self.usable.select(["model", "phase"]))
        ]
        return pairs[0] - pairs[1]

    def layouts(self, template: str) -> list[list[str]] | None:
        """The layouts inside the nodes of one of the rows, stage by stage; None where the library does not say."""
        value: list[list[str]] | None = self.rows["stage_layouts"][self._at(template)].as_py()
        return value

    def reasons(self, template: str) -> dict[Runtime, tuple[str, ...]]:
        """By runtime, why it cannot run one of the rows; those that can are left out."""
        found = int(self.found[self._at(template)])
        why = {runtime: reasons(found, runtime) for runtime in Runtime}
        return {runtime: texts for runtime, texts in why.items() if texts}

    def against(self, template: str) -> list[str]:
        """Why the plan may not use a template; empty where it may, and for one that is not among the rows."""
        if self.allowed is None or self._at(template) < 0:
            return []
        at, why = self._at(template), self.reasons(template)
        if self.mask(self.allowed)[at]:
            return []
        if any(runtime not in why for runtime in self.allowed):  # another one, which its KV does not go by
            return [f"{text} ({Runtime.CORAL}, by which KV goes)" for text in why[Runtime.CORAL]]
        return [f"{text} ({runtime})" for runtime in self.allowed for text in why[runtime]]

    def _at(self, template: str) -> int:
        return int(pc.index(self.rows["template_id"], template).as_py())


def made_for_runtimes(rows: pa.Table) -> pa.ChunkedArray:
    """Which rows hold placements that were made for a runtime (`tasks.runtime_shards`), as booleans."""
    starts = [pc.starts_with(rows["method"], runtime.value) for runtime in Runtime]
    return pc.or_(*starts)


def scope_of(rows: pa.Table, models: Mapping[str, ModelFacts], allowed: Iterable[Runtime] | None) -> Scope:
    """The rows with what stands in the way of each. `models` has the facts of every model among them."""
    laid = laid_out(rows, models)
    return Scope(
        rows=rows,
        found=obstacles(laid),
        passes_kv=laid.passes_kv,
        models=models,
        allowed=None if allowed is None else tuple(allowed),
    )


def recorded_scope(rows: pa.Table, document: Mapping[str, Any] | None) -> Scope:
    """The scope of a recorded decision; plans from before there were runtimes used every template."""
    if document is None:
        nothing = np.zeros(rows.num_rows, dtype=np.int64)
        return Scope(rows=rows, found=nothing, passes_kv=nothing.astype(np.bool_), models={}, allowed=None)
    models = {name: ModelFacts(**facts) for name, facts in document["models"].items()}
    allowed = document["allowed"]
    return scope_of(rows, models, None if allowed is None else [Runtime(name) for name in allowed])


def runtimes_document(
    scope: Scope,
    result: AllocationResult,
    solve: Callable[[pa.Table], AllocationResult],
    *,
    weights: Sequence[float],
) -> dict[str, Any]:
    """What may be relied on, and the best plan of every restriction beside the unrestricted one (all predicted).

    `result` is the answer of `scope.allowed`, `solve` gives those of other rows; a set of rows that was solved before is not
    solved again. `weights` are those of the demand rows.
    """
    solved: list[tuple[Bools, AllocationResult]] = [(scope.mask(scope.allowed), result)]
    answers: list[tuple[Allowed, Bools, AllocationResult]] = []
    for allowed in dict.fromkeys((scope.allowed, *RESTRICTIONS)):
        mask = scope.mask(allowed)
        known = next((answer for other, answer in solved if np.array_equal(other, mask)), None)
        if known is None:
            known = solve(scope.rows.filter(pa.array(mask)))
            solved.append((mask, known))
        answers.append((allowed, mask, known))
    unmet = [_unmet(answer, weights) for _, answer in solved]
    # An answer that was found among fewer rows is one to all rows too.
    least = min(unmet)
    free_usd_per_h = min(
        answer.objective_usd_per_h for (_, answer), lacks in zip(solved, unmet, strict=True) if _alike(lacks, least)
    )
    return {
        "allowed": _names(scope.allowed),
        "models": {name: asdict(facts) for name, facts in sorted(scope.models.items())},
        "restrictions": [
            {
                "runtimes": _names(allowed),
                "templates": int(mask.sum()),
                **_figures(answer),
                **_extra(answer.objective_usd_per_h, free_usd_per_h, met=_alike(_unmet(answer, weights), least)),
            }
            for allowed, mask, answer in answers
        ],
    }


def state_runtimes(plan: dict[str, Any], scope: Scope, document: Mapping[str, Any]) -> None:
    """Put into a plan which runtime each instance needs or why there is none, its layouts, and what the restriction costs."""
    unrunnable = 0
    connected = _by_connector(plan["instances"], scope)
    for item in plan["instances"]:
        name = split_market(item["template"])[0]
        why, layouts = scope.reasons(name), scope.layouts(name)
        by_connector = item["phase"] != Phase.AGGREGATED and item["model"] in connected
        first = (Runtime.CORAL,) if by_connector else tuple(Runtime)
        item["runtime"] = next((runtime.value for runtime in first if runtime not in why), None)
        item["not_runnable"] = {runtime.value: list(texts) for runtime, texts in why.items()}
        for stage, of_nodes in zip(item["stages"], layouts or repeat(None), strict=False):
            stage["layouts"] = of_nodes
        unrunnable += item["count"] if item["runtime"] is None else 0
    made_for = bool(pc.any(made_for_runtimes(scope.rows)).as_py())
    plan["notes"] = [
        *plan["notes"],
        *_notes(document, unrunnable, made_for=made_for),
        *_retired(plan["changes"], scope),
    ]


def _by_connector(instances: Sequence[Mapping[str, Any]], scope: Scope) -> set[str]:
    """The models whose prefill and decode exchange KV by our connector; where any template may be used, those that need it."""
    connected: set[str] = set()
    for item in instances:
        if item["phase"] != Phase.AGGREGATED:
            why = scope.reasons(split_market(item["template"])[0])
            needed = Runtime.VLLM in why and Runtime.CORAL not in why
            if needed if scope.allowed is None else Runtime.CORAL in scope.allowed:
                connected.add(item["model"])
    return connected


def _notes(document: Mapping[str, Any], unrunnable_instances: int, *, made_for: bool) -> list[str]:
    """What the restriction costs; or, without one, how much of the plan nothing can run."""
    by_names = {restriction_text(item["runtimes"]): item for item in document["restrictions"]}
    own, everything = by_names[restriction_text(document["allowed"])], by_names[restriction_text(None)]
    if document["allowed"] is not None:
        share = f"{own['templates']:,} of {everything['templates']:,} templates"
        if not made_for:
            share += "; the library has none made for it: `runtimes` in the scenario builds them"
        can = restriction_text(document["allowed"])
        return [f"only what {can} can run is used ({share}); beside all templates: {extra_text(own)}"]
    if not unrunnable_instances:
        return []
    stock = by_names[restriction_text([Runtime.VLLM])]
    many = (
        "1 instance is of a template"
        if unrunnable_instances == 1
        else f"{unrunnable_instances} instances are of templates"
    )
    return [
        (
            f"{many} that no runtime can run: a plan to compare with, not to "
            f"serve on; `runtimes: [vllm]` in the scenario plans with what vLLM runs: {extra_text(stock)}"
        )
    ]


def _retired(changes: Sequence[Mapping[str, Any]], scope: Scope) -> list[str]:
    """Instances that run on what the plan may not rely on: they are stopped once others serve in their place."""
    count = sum(item["running"] for item in changes if scope.against(split_market(item["template"])[0]))
    allowed = restriction_text(None if scope.allowed is None else [runtime.value for runtime in scope.allowed])
    return (
        [f"{count} running instances are of templates that {allowed} cannot run: the plan stops them"] if count else []
    )


def _figures(answer: AllocationResult) -> dict[str, Any]:
    document = allocation_result_to_json(answer)
    return {name: value for name, value in document.items() if name != "instances"}


def _extra(usd_per_h: float, free_usd_per_h: float, *, met: bool) -> dict[str, float | None]:
    """What a restriction costs: not known (None) where it meets less, since what is not served is not paid for."""
    extra = max(usd_per_h - free_usd_per_h, 0.0) if met else None
    return {
        "extra_usd_per_h": extra,
        "extra_frac": extra / free_usd_per_h if extra is not None and free_usd_per_h > 0 else None,
    }


def _unmet(answer: AllocationResult, weights: Sequence[float]) -> tuple[int, float]:
    """What the allocation minimises before its cost: instances missing from floors, then demand not met."""
    lacking = sum(weight * item.frac for weight, item in zip(weights, answer.shortfall, strict=True))
    return sum(answer.floor_deficit.values()), lacking


def _alike(one: tuple[int, float], other: tuple[int, float]) -> bool:
    return one[0] == other[0] and abs(one[1] - other[1]) <= _ALIKE


def _names(allowed: Allowed) -> list[str] | None:
    return None if allowed is None else [runtime.value for runtime in allowed]


def laid_out(rows: pa.Table, models: Mapping[str, ModelFacts]) -> LaidOut:
    """What decides about runtimes, of template rows. Raises InputError for a model without facts, DataGapError for a layout that is none."""
    nodes = rows["stage_nodes"].combine_chunks()
    stage_start, inner = _starts(nodes), pc.list_flatten(nodes)
    node_start = _starts(inner)
    layouts = rows["stage_layouts"].combine_chunks()
    codes = pc.list_flatten(pc.list_flatten(layouts)).dictionary_encode()
    texts = [
        Layout(tp=0, pp=0, dp=0) if text == AS_MEASURED else Layout.parse(text) for text in codes.dictionary.to_pylist()
    ]
    # A row without layouts has none of its nodes among the texts.
    known = np.repeat(~_numpy(pc.is_null(layouts)), np.diff(node_start[stage_start]))

    def per_node(values: Sequence[int]) -> Ints:
        found = np.zeros(len(known), dtype=np.int64)
        found[known] = np.array(values, dtype=np.int64)[_numpy(codes.indices)] if values else 0
        return found

    of_model = rows["model"].combine_chunks().dictionary_encode()
    names = of_model.dictionary.to_pylist()
    for name in names:
        if name not in models:
            raise unknown_name("model", name, models, where="library")
    experts, heads, kv_heads, windows = np.array([astuple(models[name]) for name in names], np.int64).reshape(-1, 4).T
    of_row = _numpy(of_model.indices)
    return LaidOut(
        stage_start=stage_start,
        node_start=node_start,
        layers=_numpy(pc.list_flatten(rows["stage_layers"].combine_chunks())).astype(np.int64),
        tp=per_node([layout.tp for layout in texts]),
        pp=per_node([layout.pp for layout in texts]),
        dp=per_node([layout.dp for layout in texts]),
        passes_kv=_numpy(pc.not_equal(rows["phase"].combine_chunks(), Phase.AGGREGATED.value)).astype(np.bool_),
        experts=experts[of_row].astype(np.bool_),
        heads=heads[of_row],
        kv_heads=kv_heads[of_row],
        windows=windows[of_row].astype(np.bool_),
    )


def _starts(lists: pa.ListArray) -> Ints:
    """Where each list starts among its values put one after another, and where the last one ends."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return np.concatenate(([0], np.cumsum(_numpy(lengths))))


def _numpy(values: pa.Array) -> NDArray[Any]:
    return np.asarray(values.to_numpy(zero_copy_only=False))
