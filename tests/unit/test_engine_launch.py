"""Launch plans: worked examples flag by flag, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coral_core.catalog.models import package_models
from coral_core.domain.launch import Device, EngineTerms, ModelTerms, Runtime
from coral_core.domain.models import Variant
from coral_core.domain.workload import Phase
from coral_core.errors import DataGapError, InputError, NoSolutionError
from coral_core.perf.assumptions import CapacityAssumptions
from coral_core.perf.search import Layout
from tests.fakes.launch_cases import MODEL, ONE, places, plan_of, shape, template, terms

CPU = ModelTerms(path="/models/q", dtype="float32", kv_cache_memory_bytes=64 << 20)


def flags(node):
    """Flags with their values; those without one map to None."""
    argv = node.argv[node.argv.index("serve") + 2 :]
    follows = [*argv[1:], "--"]
    return {
        flag: None if value.startswith("--") else value
        for flag, value in zip(argv, follows, strict=True)
        if flag.startswith("--")
    }


def test_a_single_node_repeats_what_its_capacity_assumed():
    plan = plan_of(Phase.AGGREGATED, [(64, Layout(tp=2, pp=2, dp=2))])
    [node] = plan.nodes
    assert (plan.instance_id, plan.model, plan.runtime) == ("i-1", MODEL, Runtime.VLLM)
    assert plan.url == "http://10.0.0.0:8000"
    assert node.argv[:4] == ("-m", "vllm.entrypoints.cli.main", "serve", "/models/q")
    assert flags(node) == {
        "--served-model-name": MODEL,
        "--dtype": "bfloat16",
        "--max-model-len": "auto",  # one request of all 40960 tokens need not have room
        "--max-num-seqs": "2048",  # two steps of 1024 are in flight in a pipeline of two
        "--max-num-batched-tokens": "17408",  # 16384 of prompts beside 1024 decoding requests
        "--gpu-memory-utilization": "0.9",
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "2",
        "--data-parallel-size": "2",
        "--distributed-executor-backend": "mp",
        "--shutdown-timeout": "0",
        "--host": "10.0.0.0",
        "--port": "8000",
        "--disable-uvicorn-access-log": None,
    }
    assert node.env == {
        "VLLM_HOST_IP": "10.0.0.0",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "10",
        "VLLM_ENGINE_READY_TIMEOUT_S": "900",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PP_LAYER_PARTITION": "32,32",
    }
    assert (node.ports, node.serves) == ((8000,), True)


def test_an_uneven_pipeline_over_two_cpu_nodes():
    plan = plan_of(Phase.AGGREGATED, [(6, ONE), (2, ONE)], terms=terms(Device.CPU, CPU, step_timeout_s=7))
    first, second = plan.nodes
    chain = {"--nnodes": "2", "--master-addr": "10.0.0.0", "--master-port": "8001"}
    assert chain.items() <= flags(first).items()
    assert chain.items() <= flags(second).items()
    assert (flags(first)["--node-rank"], flags(second)["--node-rank"]) == ("0", "1")
    assert "--headless" in flags(second)
    assert not {"--host", "--port"} & set(flags(second))
    for node, cpus in ((first, "0,1"), (second, "2,3")):
        assert node.argv[:3] == ("-m", "coral_core.engine.plugin.serve", "serve")
        assert flags(node)["--worker-cls"] == "coral_core.engine.plugin.cpu_worker.StageWorker"
        assert flags(node)["--kv-cache-memory-bytes"] == str(64 << 20)
        assert "--enforce-eager" in flags(node)
        assert "--gpu-memory-utilization" not in flags(node)
        assert node.env["VLLM_PP_LAYER_PARTITION"] == "6,2"
        assert node.env["VLLM_CPU_OMP_THREADS_BIND"] == cpus
        assert node.env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "7"
    assert (first.ports, second.ports) == ((8000, 8001), ())
    assert (first.serves, second.serves) == (True, False)


@pytest.mark.parametrize(
    ("phase", "role", "tokens"), [(Phase.PREFILL, "kv_producer", 16384), (Phase.DECODE, "kv_consumer", 1024)]
)
def test_prefill_and_decode_hand_kv_over_with_nixl(phase, role, tokens):
    [node] = plan_of(phase, [(64, Layout(tp=2, pp=1, dp=2))]).nodes
    assert json.loads(flags(node)["--kv-transfer-config"]) == {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
    }
    assert flags(node)["--max-num-batched-tokens"] == str(tokens)
    assert node.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.0"
    assert node.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "8001"
    assert node.ports == (8000, 8001, 8002)
    assert "UCX_TLS" not in node.env
    [on_cpu] = plan_of(phase, [(8, ONE)], terms=terms(Device.CPU, CPU)).nodes
    assert on_cpu.env["UCX_TLS"] == "tcp,sm,self"


def test_what_the_terms_say_goes_before_what_is_derived():
    model = ModelTerms(
        path="some/name",
        dtype="float16",
        quantization="awq",
        max_model_len_tokens=4096,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size_tokens=32,
        kv_cache_memory_bytes=1 << 30,
        extra_args=("--seed", "7"),
        env={"DO_NOT_TRACK": "0", "MORE": "x"},
    )
    [node] = plan_of(Phase.DECODE, [(64, ONE)], terms=terms(model=model, eager=True)).nodes
    assert {
        "--dtype": "float16",
        "--quantization": "awq",
        "--max-model-len": "4096",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "64",
        "--block-size": "32",
        "--kv-cache-memory-bytes": str(1 << 30),
        "--seed": "7",
        "--enforce-eager": None,
    }.items() <= flags(node).items()
    assert node.argv[-2:] == ("--seed", "7")
    assert (node.env["DO_NOT_TRACK"], node.env["MORE"]) == ("0", "x")
    assert "HF_HUB_OFFLINE" not in node.env


def test_a_variant_with_small_kv_and_fp16_says_so():
    small = Variant(
        name="bf16",
        weight_bits=16,
        expert_bits=16,
        embedding_bits=16,
        kv_bits=8,
        compute_dtype="fp16",
        expert_compute_dtype="fp16",
    )
    [node] = plan_of(Phase.DECODE, [(64, ONE)], shape=shape(64, variants={"bf16": small})).nodes
    assert flags(node)["--kv-cache-dtype"] == "fp8"
    assert flags(node)["--dtype"] == "float16"


@pytest.mark.parametrize(("ranks", "bound"), [(1, "0,1"), (2, "nobind"), (4, "nobind")])
def test_threads_are_bound_where_a_worker_has_more_than_one_core(ranks, bound):
    [node] = plan_of(Phase.AGGREGATED, [(8, Layout(tp=1, pp=ranks, dp=1))], terms=terms(Device.CPU, CPU)).nodes
    assert node.env["VLLM_CPU_OMP_THREADS_BIND"] == bound
    assert node.env.get("OMP_NUM_THREADS") == ("1" if bound == "nobind" else None)


def test_an_ipv6_host_is_bracketed_in_the_url():
    plan = plan_of(Phase.AGGREGATED, [(8, ONE)], places=places(["c0"], host="fd00::1"))
    assert plan.url == "http://[fd00::1]:8000"


def test_the_limits_of_other_assumptions_are_repeated():
    other = CapacityAssumptions(max_batch_requests=64, max_prefill_tokens=512, usable_memory_frac=0.8)
    [node] = plan_of(Phase.AGGREGATED, [(8, ONE)], assumptions=other).nodes
    assert flags(node)["--max-num-seqs"] == "64"
    assert flags(node)["--max-num-batched-tokens"] == "576"
    assert flags(node)["--gpu-memory-utilization"] == "0.8"


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"terms": terms(Device.CPU)}, DataGapError, "KV cache"),
        (
            {"template": template(Phase.DECODE, [(8, ["c0", "c0"])]), "layouts": [[ONE, ONE]]},
            NoSolutionError,
            "several nodes",
        ),
        ({"layouts": [[None]]}, NoSolutionError, "laid out inside"),
        (
            {"template": template(Phase.AGGREGATED, [(2, ["c0"])]), "layouts": [[Layout(tp=1, pp=4, dp=1)]]},
            NoSolutionError,
            "fewer layers than parts",
        ),
        ({"places": places(["c1"])}, InputError, "its nodes are c0"),
        ({"places": []}, InputError, "none"),
        ({"places": places(["c0"], ports=1)}, InputError, "1 ports are too few, it needs 2"),
        ({"places": places(["c0"], first_port=65530)}, InputError, "ports 65530"),
        ({"places": places(["c0"], first_port=0)}, InputError, "ports 0"),
    ],
)
def test_what_cannot_be_launched_is_refused(changes, error, match):
    with pytest.raises(error, match=match):
        plan_of(Phase.DECODE, [(8, ONE)], **changes)


def test_there_are_no_more_requests_in_flight_than_the_terms_have_tokens_for_a_step():
    """vLLM refuses to start otherwise."""
    [node] = plan_of(
        Phase.AGGREGATED,
        [(8, Layout(tp=1, pp=4, dp=1))],
        terms=terms(model=ModelTerms(path="/m", max_num_batched_tokens=2048)),
    ).nodes
    assert (flags(node)["--max-num-seqs"], flags(node)["--max-num-batched-tokens"]) == ("2048", "2048")


def test_an_unknown_model_and_nodes_in_each_others_way_are_refused():
    other = terms()
    with pytest.raises(InputError, match="qwen3-32b bf16"):
        plan_of(Phase.DECODE, [(8, ONE)], terms=type(other)(device=other.device, models={("x", "y"): CPU}))
    with pytest.raises(InputError, match="overlap on h"):
        plan_of(Phase.AGGREGATED, [(4, ONE), (4, ONE)], places=places(["c0", "c1"], host="h"))
    with pytest.raises(InputError, match="given twice"):
        plan_of(Phase.AGGREGATED, [(4, ONE), (4, ONE)], places=places(["c0", "c1"], node="n"))
    with pytest.raises(ValueError, match="one per node"):
        plan_of(Phase.AGGREGATED, [(4, ONE), (4, ONE)], layouts=[[ONE]])


@pytest.mark.parametrize(("variant", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_an_engine_computes_in_what_the_variant_says(variant, dtype):
    """A model of 32 bits in bfloat16 gives other tokens, and its capacity another speed."""
    tiny = package_models()["tiny-chat"]
    (node,) = plan_of(
        Phase.AGGREGATED,
        [(8, Layout(tp=1, pp=1, dp=1))],
        template=replace(template(Phase.AGGREGATED, [(8, ["c0"])]), model="tiny-chat", variant=variant),
        shape=tiny,
        terms=EngineTerms(device=Device.CUDA, models={("tiny-chat", variant): ModelTerms(path="/models/t")}),
    ).nodes
    assert flags(node)["--dtype"] == dtype
