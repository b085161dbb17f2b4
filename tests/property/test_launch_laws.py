"""Laws of launch plans, and of what can be run, for whatever is laid out."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.templates import template_rows
from coral_core.catalog.models import package_models
from coral_core.domain.launch import Device, ModelTerms, Runtime
from coral_core.domain.models import SlidingWindow
from coral_core.domain.workload import Phase
from coral_core.engine.runnable import ModelFacts, runnable, runs_on
from coral_core.perf.search import Layout
from tasks.runtimes import scope_of
from tests.fakes.launch_cases import places, plan_of, shape, template, terms

SMALL = st.sampled_from([1, 1, 1, 2, 4])
LAYOUTS = st.builds(Layout, tp=SMALL, pp=SMALL, dp=SMALL)
CPU = ModelTerms(path="/m", kv_cache_memory_bytes=1 << 20)


@st.composite
def chains(draw):
    """What stock vLLM runs: a chain of nodes of one layout without replicas, or a single node."""
    nodes = draw(st.integers(1, 4))
    layout = draw(LAYOUTS)
    phase = draw(st.sampled_from(Phase)) if nodes == 1 else Phase.AGGREGATED
    if phase is not Phase.AGGREGATED:
        layout = replace(layout, pp=1)
    if nodes > 1:
        layout = replace(layout, dp=1)
    return phase, [(draw(st.integers(layout.pp, 40)), layout) for _ in range(nodes)]


def value(node, flag):
    return node.argv[node.argv.index(flag) + 1]


@settings(max_examples=60, deadline=None)
@given(chains(), st.sampled_from(Device), st.booleans())
def test_what_runs_is_launched_whole_and_alike_on_every_node(case, device, one_host):
    phase, chain = case
    configs = [f"c{i}" for i in range(len(chain))]
    where = [
        replace(place, host="127.0.0.1" if one_host else place.host, first_port=9000 + 20 * i if one_host else 9000)
        for i, place in enumerate(places(configs))
    ]
    given_terms = terms(device, CPU if device is Device.CPU else None)
    plan = plan_of(phase, chain, places=where, terms=given_terms)
    assert plan == plan_of(phase, chain, places=where, terms=given_terms)
    assert [node.node for node in plan.nodes] == [place.node for place in where]
    assert [node.serves for node in plan.nodes] == [True] + [False] * (len(chain) - 1)
    listening = [(place.host, port) for place, node in zip(where, plan.nodes, strict=True) for port in node.ports]
    assert len(set(listening)) == len(listening)
    for place, node in zip(where, plan.nodes, strict=True):
        assert all(place.first_port <= port < place.first_port + place.ports for port in node.ports)
        assert node.env["VLLM_HOST_IP"] == place.host
    ranks = sum(layout.pp for _, layout in chain)
    assert {value(node, "--pipeline-parallel-size") for node in plan.nodes} == {str(ranks)}
    partitions = {node.env.get("VLLM_PP_LAYER_PARTITION") for node in plan.nodes}
    if ranks == 1:
        assert partitions == {None}
        return
    [text] = partitions
    parts = [int(part) for part in text.split(",")]
    assert len(parts) == ranks
    at = 0
    for layers, layout in chain:
        held = parts[at : at + layout.pp]
        assert sum(held) == layers
        assert max(held) == -(-layers // layout.pp)  # what the capacity's fullest GPU holds
        assert min(held) >= 1
        at += layout.pp


@st.composite
def laid_out_templates(draw):
    stages = draw(st.lists(st.lists(LAYOUTS, min_size=1, max_size=3), min_size=1, max_size=3))
    known = draw(st.sampled_from([True, True, True, False]))
    heads, kv_heads = draw(st.sampled_from([(64, 8), (3, 1), (6, 3), (4, 2)]))
    moe = package_models()["gpt-oss-20b"].moe if draw(st.booleans()) else None
    window = draw(st.sampled_from([None, None, SlidingWindow(window_tokens=128, layers=30)]))
    model = shape(60, heads=heads, kv_heads=kv_heads, moe=moe, sliding_window=window)
    return draw(st.sampled_from(Phase)), stages, known, model, draw(st.sampled_from([20, 20, 3]))


def vllm_runs(phase, stages, known, model, layers):
    """The rules once more, one template at a time."""
    flat = [layout for stage in stages for layout in stage]
    if not known or any(len(stage) > 1 for stage in stages) or any(x.pp > layers for x in flat):
        return False
    if any(model.heads % x.tp or (model.kv_heads % x.tp and x.tp % model.kv_heads) for x in flat):
        return False
    if len(flat) > 1 and (len(set(flat)) > 1 or flat[0].dp > 1):
        # Of one number of GPUs, one TP and one replica, the layouts are equal.
        return False
    if model.moe is not None and flat[0].dp > 1:
        return False
    return phase is Phase.AGGREGATED or (len(flat) == 1 and flat[0].pp == 1)


def coral_runs(stages, known, model, layers):
    flat = [layout for stage in stages for layout in stage]
    if any(x.pp > layers for x in flat):
        return False
    if not known or model.sliding_window is not None or any(x.dp > 1 for x in flat):
        return False
    if any(model.heads % x.tp or (model.kv_heads % x.tp and x.tp % model.kv_heads) for x in flat):
        return False
    return all(x.pp == 1 for x in flat) or (len(set(flat)) == 1 and len(flat) == len(stages))


@settings(max_examples=150, deadline=None)
@given(st.lists(laid_out_templates(), min_size=0, max_size=12))
def test_all_at_once_decides_what_one_at_a_time_decides(cases):
    made = []
    for i, (phase, stages, _, _, layers) in enumerate(cases):
        named = [(layers, [f"c{j}" for j in range(len(stage))]) for stage in stages]
        made.append(replace(template(phase, named), template_id=f"t{i}", model=f"m{i}"))
    rows = template_rows(made)
    texts = [[[str(x) for x in stage] for stage in stages] if known else None for _, stages, known, *_ in cases]
    column = rows.schema.get_field_index("stage_layouts")
    rows = rows.set_column(column, rows.schema.field(column), pa.array(texts, rows.schema.field(column).type))
    scope = scope_of(rows, {f"m{i}": ModelFacts.of(model) for i, (*_, model, _) in enumerate(cases)}, [Runtime.VLLM])
    expected = [vllm_runs(*case) for case in cases]
    assert runs_on(scope.found, Runtime.VLLM).tolist() == expected
    assert runs_on(scope.found, Runtime.CORAL).tolist() == [coral_runs(*case[1:]) for case in cases]
    both = scope.mask((Runtime.VLLM, Runtime.CORAL)).tolist()
    either = [one or other for one, other in zip(expected, runs_on(scope.found, Runtime.CORAL), strict=True)]
    assert both == [
        other if case[0] is not Phase.AGGREGATED else any_of
        for case, any_of, other in zip(cases, either, runs_on(scope.found, Runtime.CORAL), strict=True)
    ]
    assert scope.usable["template_id"].to_pylist() == [f"t{i}" for i, runs in enumerate(expected) if runs]
    for one, (_, stages, known, model, _) in zip(made, cases, strict=True):
        alone = runnable(one, [[x if known else None for x in stage] for stage in stages], model)
        assert alone.reasons == scope.reasons(one.template_id)
        assert bool(scope.against(one.template_id)) == (Runtime.VLLM in alone.reasons)
        assert alone.runtime == next((r for r in Runtime if r not in alone.reasons), None)
