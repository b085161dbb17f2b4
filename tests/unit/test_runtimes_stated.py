"""What a plan states of its instances' runtimes."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from artifacts.templates import template_rows
from coral_core.domain.launch import Runtime
from coral_core.domain.workload import Phase
from coral_core.engine.runnable import ModelFacts
from tasks.runtimes import scope_of, state_runtimes
from tests.fakes.launch_cases import MODEL, shape, template

ONE, TWO_REPLICAS = "tp1 pp1 dp1", "tp1 pp1 dp2"
DOCUMENT = {
    "allowed": None,
    "restrictions": [
        {"runtimes": names, "templates": 3, "extra_usd_per_h": 0.0, "extra_frac": 0.0}
        for names in (["vllm"], ["vllm", "coral"], None)
    ],
}


def stated(prefill, decode, allowed=None):
    """The runtime of each instance of a plan: prefill and decode on stages of these layouts, and an aggregated node."""
    given = {Phase.PREFILL: prefill, Phase.DECODE: decode, Phase.AGGREGATED: [[ONE]]}
    made = [
        replace(template(phase, [(4, ["c"] * len(nodes)) for nodes in stages]), template_id=phase.value)
        for phase, stages in given.items()
    ]
    rows = template_rows(made)
    at = rows.schema.get_field_index("stage_layouts")
    rows = rows.set_column(at, rows.schema.field(at), pa.array([*given.values()], rows.schema.field(at).type))
    scope = scope_of(rows, {MODEL: ModelFacts.of(shape(4))}, allowed)
    instances = [
        {"template": phase.value, "model": MODEL, "phase": phase, "count": 1, "stages": [{} for _ in stages]}
        for phase, stages in given.items()
    ]
    plan = {"instances": instances, "notes": [], "changes": []}
    state_runtimes(plan, scope, {**DOCUMENT, "allowed": None if allowed is None else [name.value for name in allowed]})
    return [item["runtime"] for item in instances], plan["notes"]


@pytest.mark.parametrize(
    ("prefill", "decode", "runtimes"),
    [
        ([[ONE]], [[ONE]], ["vllm", "vllm", "vllm"]),
        ([[ONE]], [[ONE, ONE]], ["coral", "coral", "vllm"]),
        ([[ONE], [ONE]], [[ONE]], ["coral", "coral", "vllm"]),
        ([[TWO_REPLICAS]], [[ONE, ONE]], [None, "coral", "vllm"]),
        ([[TWO_REPLICAS]], [[TWO_REPLICAS, ONE]], ["vllm", None, "vllm"]),
    ],
)
def test_prefill_and_decode_of_a_model_are_stated_to_exchange_kv_in_one_way(prefill, decode, runtimes):
    found, notes = stated(prefill, decode)
    assert found == runtimes
    assert len(notes) == (None in runtimes)


def test_where_the_plan_may_rely_on_our_runtime_kv_goes_by_it():
    assert stated([[ONE]], [[ONE]], [Runtime.VLLM, Runtime.CORAL])[0] == ["coral", "coral", "vllm"]
    assert stated([[ONE]], [[ONE]], [Runtime.VLLM])[0] == ["vllm", "vllm", "vllm"]
