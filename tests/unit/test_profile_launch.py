"""What a node runs that measures: the flags of serving, and a key that says which those were."""

from __future__ import annotations

from dataclasses import replace

from coral_core.domain.launch import Device, ModelTerms, NodePlace, Runtime
from coral_core.domain.workload import Phase
from coral_core.engine.profile_launch import profile_flags, profile_launch
from tests.fakes.launch_cases import MODEL, ONE, plan_of, shape, terms

PLACE = NodePlace(node="n7", config="c0", host="10.0.0.7", first_port=8000, ports=4, cpus=(2, 3))
PLUGIN = ModelTerms(
    path="/models/q", kv_cache_memory_bytes=2**26, extra_args=("--worker-cls", "some.Worker"), env={"B": "2", "A": "1"}
)


def launched(given):
    return profile_launch(instance_id="i", place=PLACE, shape=shape(64), variant="bf16", terms=given)


def test_the_engine_is_measured_with_the_flags_that_it_serves_with():
    (serving,) = plan_of(Phase.AGGREGATED, [(64, ONE)]).nodes
    (node,) = launched(terms()).nodes
    assert node.argv[:2] == ("-m", "coral_core.engine.plugin.profile_server")
    assert node.argv[2:7] == ("--host", "10.0.0.7", "--port", "8000", "/models/q")
    served = serving.argv[serving.argv.index("/models/q") + 1 :]
    measured = node.argv[7:]
    assert set(measured) < set(served)
    for flag in (
        "--dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--gpu-memory-utilization",
    ):
        assert measured[measured.index(flag) + 1] == served[served.index(flag) + 1]
    for flag in ("--served-model-name", "--tensor-parallel-size", "--pipeline-parallel-size", "--shutdown-timeout"):
        assert flag in served
        assert flag not in measured
    assert (node.serves, node.node, node.ports) == (True, "0", (8000,))
    assert launched(terms()).url == "http://10.0.0.7:8000"


def test_a_cpu_computes_in_a_process_of_its_own_as_when_it_serves():
    (node,) = launched(terms(Device.CPU, PLUGIN)).nodes
    assert node.argv[-2:] == ("--distributed-executor-backend", "mp")
    assert "some.Worker" in node.argv
    assert "--enforce-eager" in node.argv
    assert node.env["A"] == "1"


def test_the_key_holds_every_flag_and_variable_but_no_place():
    flags = profile_flags(shape(64), "bf16", "c0", terms(Device.CPU, PLUGIN))
    assert flags[-2:] == ("A=1", "B=2")
    assert "--worker-cls" in flags
    assert not {"/models/q", "--host", "--port", "127.0.0.1"} & set(flags)
    elsewhere = terms(Device.CPU, replace(PLUGIN, path="/elsewhere"), runtimes=(Runtime.CORAL,), key_file="/k")
    assert profile_flags(shape(64), "bf16", "c0", elsewhere) == flags
    assert MODEL not in flags
