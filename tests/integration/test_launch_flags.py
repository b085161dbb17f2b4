"""Every flag and variable of launch plans is one that vLLM knows, and is read as it was meant."""

from __future__ import annotations

import json
import subprocess

from coral_core.domain.launch import Device, ModelTerms, Runtime
from coral_core.domain.workload import Phase
from coral_core.perf.search import Layout
from tests.fakes.launch_cases import places, plan_of, template, terms

PARSE = """
import importlib.metadata, json, sys
from coral_core.engine.plugin.serve import answering_for_vllm
importlib.metadata.version = answering_for_vllm(importlib.metadata.version)
from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
known = set(envs.environment_variables) | {"OMP_NUM_THREADS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "UCX_TLS", "CORAL_KV_KEY_FILE"}
read = []
for argv, env in json.load(sys.stdin):
    read.append({
        "unknown_variables": sorted(set(env) - known),
        "values": {name: str(value) for name, value in vars(parser.parse_args(argv)).items()},
    })
print("READ" + json.dumps(read))
"""


def test_vllm_reads_every_flag_and_knows_every_variable(engine_python, repository):
    one, two, four = Layout(tp=1, pp=1, dp=1), Layout(tp=2, pp=1, dp=2), Layout(tp=2, pp=2, dp=1)
    cpu = ModelTerms(path="/m", dtype="float32", kv_cache_memory_bytes=64 << 20, block_size_tokens=32, max_num_seqs=16)
    plans = [
        plan_of(Phase.AGGREGATED, [(5, four), (3, four)]),
        plan_of(Phase.PREFILL, [(8, two)]),
        plan_of(Phase.DECODE, [(8, one)], terms=terms(Device.CPU, cpu)),
        plan_of(Phase.AGGREGATED, [(6, one), (2, one)], terms=terms(Device.CPU, cpu)),
        plan_of(Phase.AGGREGATED, [(8, one)], terms=terms(Device.CUDA, ModelTerms(path="m", quantization="fp8"))),
    ]
    both = {"runtimes": tuple(Runtime), "key_file": "/key"}
    wide = {
        "template": template(Phase.PREFILL, [(8, ["c0", "c1"])]),
        "layouts": [[one, one]],
        "places": places(["c0", "c1"]),
    }
    plans += [
        plan_of(Phase.DECODE, [(5, one), (3, one)], terms=terms(Device.CPU, cpu, **both)),
        plan_of(Phase.PREFILL, [(8, one)], terms=terms(**both), throughputs=[1.0, 2.0], **wide),
    ]
    nodes = [node for plan in plans for node in plan.nodes if "serve" in node.argv]
    asked = json.dumps([[list(node.argv[node.argv.index("serve") + 1 :]), dict(node.env)] for node in nodes])
    done = subprocess.run(
        [engine_python, "-c", PARSE],
        cwd=repository,
        input=asked,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.partition("READ")[2])
    assert [item["unknown_variables"] for item in read] == [[]] * len(nodes)
    for node, item in zip(nodes, read, strict=True):
        values = item["values"]
        for flag, value in zip(node.argv, node.argv[1:], strict=False):
            if flag.startswith("--") and not value.startswith(("--", "{")):
                meant = "-1" if value == "auto" else value  # as long as there is room
                assert values[flag.removeprefix("--").replace("-", "_")].strip("[]'") == meant, flag
        assert values["headless"] == str(not node.serves)
    assert [item["values"]["enforce_eager"] for item in read] == ["False"] * 3 + ["True"] * 3 + ["False"] + [
        "True"
    ] * 2 + ["False"]
    assert "recompute" in read[2]["values"]["kv_transfer_config"]
    assert "CoralKVConnector" in read[-1]["values"]["kv_transfer_config"]
    assert "'throughput': 2.0" in read[-1]["values"]["additional_config"]
    assert (read[-1]["values"]["async_scheduling"], read[-1]["values"]["enable_prefix_caching"]) == ("False", "False")
