"""Launch plans of our own runtime: stages of several nodes, and KV by our connector."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coral_core.domain.launch import Device, ModelTerms, Runtime
from coral_core.domain.models import SlidingWindow
from coral_core.domain.workload import Phase
from coral_core.engine.plugin.kv_plan import terms as connector_terms
from coral_core.engine.plugin.stage_layout import Bindings, layout_of
from coral_core.errors import DataGapError, NoSolutionError
from coral_core.perf.search import Layout
from tests.fakes.launch_cases import ONE, places, plan_of, shape, template, terms

TWO = Layout(tp=2, pp=1, dp=1)
STAGES = [(6, ["a", "b"]), (2, ["c"])]
BOTH = terms(runtimes=tuple(Runtime), key_file="/fleet.key")


def wide(phase=Phase.AGGREGATED, **changes):
    given = {
        "template": template(phase, STAGES),
        "layouts": [[TWO, ONE], [ONE]],
        "shape": shape(8),
        "places": places(["a", "b", "c"]),
        "terms": BOTH,
        "throughputs": [3.0, 1.0, 2.0],
    }
    return plan_of(phase, [(8, ONE)], **{**given, **changes})


def value(node, flag):
    return node.argv[node.argv.index(flag) + 1]


def test_the_engine_runs_on_the_first_node_and_the_others_come_to_it():
    plan = wide()
    assert (plan.runtime, plan.url) == (Runtime.CORAL, "http://10.0.0.0:8000")
    engine, second, third = plan.nodes
    assert value(engine, "--distributed-executor-backend") == "coral_core.engine.plugin.stage_executor.StageExecutor"
    assert {"--no-async-scheduling", "--no-enable-prefix-caching"} <= set(engine.argv)
    assert not {"--tensor-parallel-size", "--pipeline-parallel-size", "--nnodes", "--kv-transfer-config"} & set(
        engine.argv
    )
    assert value(engine, "--max-num-seqs") == "4096"  # two stages in flight, two nodes in the wider one
    layout = layout_of(json.loads(value(engine, "--additional-config")))
    assert layout.layers == (6, 2)
    assert [[(n.name, n.throughput, n.tp, n.local) for n in stage.nodes] for stage in layout.stages] == [
        [("n0", 3.0, 2, True), ("n1", 1.0, 1, False)],
        [("n2", 2.0, 1, False)],
    ]
    assert value(engine, "--max-model-len") == "40960"  # nodes of a stage have unlike room: one cannot speak for all
    assert [node.max_num_seqs for node in layout.nodes] == [3072, 1024, None]  # of 4096, by speed among unlike nodes
    assert (layout.listen, layout.key_file, layout.start_s) == ("10.0.0.0:8001", "/fleet.key", 900.0)
    assert (engine.ports, second.ports, third.ports) == ((8000, 8001), (8000,), (8000,))
    assert [node.serves for node in plan.nodes] == [True, False, False]
    for node, name, host in ((second, "n1", "10.0.0.1"), (third, "n2", "10.0.0.2")):
        assert node.argv == (
            *("-m", "coral_core.engine.plugin.stage_node", "--engine", "10.0.0.0:8001", "--name", name),
            *("--host", host, "--port", "8000", "--key-file", "/fleet.key"),
        )
    for node, place in zip(plan.nodes, places(["a", "b", "c"]), strict=True):
        assert node.env["VLLM_HOST_IP"] == place.host
        assert node.env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert "VLLM_PP_LAYER_PARTITION" not in node.env


def test_cores_are_shared_out_over_a_nodes_workers():
    cpu = ModelTerms(path="/m", kv_cache_memory_bytes=1 << 26)
    both = terms(Device.CPU, cpu, runtimes=tuple(Runtime), key_file="/k")
    cores = [replace(place, cpus=tuple(range(4))) for place in places(["a", "b", "c"])]
    assert [node.env["OMP_NUM_THREADS"] for node in wide(terms=both, places=cores).nodes] == ["2", "4", "4"]


@pytest.mark.parametrize(("phase", "role"), [(Phase.PREFILL, "kv_producer"), (Phase.DECODE, "kv_consumer")])
@pytest.mark.parametrize("chain", [True, False])
def test_kv_goes_by_our_connector_wherever_our_runtime_is(phase, role, chain):
    plan = plan_of(phase, [(5, ONE), (3, ONE)], terms=BOTH) if chain else wide(phase)
    assert plan.runtime is Runtime.CORAL
    config = json.loads(value(plan.nodes[0], "--kv-transfer-config"))
    assert config == {
        "kv_connector": "CoralKVConnector",
        "kv_connector_module_path": "coral_core.engine.plugin.kv_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
    }
    assert connector_terms(config.get("kv_connector_extra_config", {})).first_port is None
    for node in plan.nodes:
        assert node.env["CORAL_KV_KEY_FILE"] == "/fleet.key"
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in node.env
    assert ("--nnodes" in plan.nodes[1].argv) == chain


def test_a_single_node_is_served_by_the_same_connector_and_aggregated_chains_by_stock_vllm():
    assert plan_of(Phase.DECODE, [(8, TWO)], terms=BOTH).runtime is Runtime.CORAL
    assert plan_of(Phase.AGGREGATED, [(5, ONE), (3, ONE)], terms=BOTH).runtime is Runtime.VLLM
    assert plan_of(Phase.DECODE, [(8, TWO)]).runtime is Runtime.VLLM


def test_nodes_of_one_configuration_share_alike_and_unlike_ones_must_be_told():
    alike = {"template": template(Phase.AGGREGATED, [(6, ["a", "a"]), (2, ["c"])]), "places": places(["a", "a", "c"])}
    plan = wide(layouts=[[ONE, ONE], [ONE]], throughputs=None, **alike)
    layout = layout_of(json.loads(value(plan.nodes[0], "--additional-config")))
    assert [node.throughput for node in layout.nodes] == [0.5, 0.5, 1.0]
    bindings = Bindings(layout)
    assert bindings.weight_frac == 1.0
    bindings.lose(layout.nodes[1].name, "it is gone")
    assert bindings.weight_frac == 0.5, "the other stage cannot make up for it"
    with pytest.raises(DataGapError, match="stage 0 are not known: a, b"):
        wide(throughputs=None)


def test_over_a_network_the_key_is_needed_and_on_loopback_it_is_not():
    keyless = terms(runtimes=tuple(Runtime))
    with pytest.raises(DataGapError, match="fleet's key"):
        wide(terms=keyless)
    here = [
        replace(place, host="127.0.0.1", first_port=9000 + 20 * i) for i, place in enumerate(places(["a", "b", "c"]))
    ]
    assert "--key-file" not in wide(terms=keyless, places=here).nodes[1].argv


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"terms": terms()}, "vllm: a stage has several nodes"),
        ({"layouts": [[TWO, Layout(tp=1, pp=2, dp=1)], [ONE]]}, "coral: a node is a pipeline inside"),
        ({"layouts": [[Layout(tp=1, pp=1, dp=2), ONE], [ONE]]}, "coral: a node holds several replicas"),
        ({"shape": shape(8, sliding_window=SlidingWindow(window_tokens=128, layers=4))}, "coral: the model has layers"),
    ],
)
def test_what_our_runtime_cannot_run_is_refused(changes, match):
    with pytest.raises(NoSolutionError, match=match):
        wide(**changes)
