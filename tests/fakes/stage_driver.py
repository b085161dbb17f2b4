"""Runs the stage runtime with real vLLM, in the engine's environment: `python stage_driver.py MODEL SCENARIO...`, a JSON line each.

In the environment of `stage_internals.ENVIRONMENT`. vLLM is imported once; every scenario is a fork of that, its nodes are forks again, and all of them end with it.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq
from vllm.config import KVTransferConfig

from coral_core.engine.plugin import stage_wire
from coral_core.engine.plugin.on_cpu import end_with_parent
from coral_core.engine.plugin.stage_wire import Hub, Inbox, Link, Outbox, Wire, keys_for, wait_for
from tests.fakes import stage_pace, stage_parts, stage_pause
from tests.fakes.stage_engine import (
    LAYOUTS,
    REQUESTS,
    Engine,
    Stages,
    add_all,
    add_special,
    params_of,
    prompt_of,
)
from tests.fakes.stage_internals import INTERNALS, digest

LIMIT_S = 420
"""A scenario takes a minute at most; the rest is for a machine that is busy, or stands still for a while."""


def plain(model: str, port: int) -> dict[str, Any]:
    """What a single engine says."""
    engine = Engine(model, port)
    add_all(engine, 2 * REQUESTS)
    add_special(engine)
    engine.run()
    return {"tokens": engine.tokens, "prompt_logprobs": engine.prompt_logprobs}


def layout(name: str) -> Callable[[str, int], dict[str, Any]]:
    """A layout under load, short of blocks, some requests aborted: tokens, preemptions, blocks left behind."""

    def scenario(model: str, port: int) -> dict[str, Any]:
        engine = Engine(model, port, LAYOUTS[name], blocks_of_8_layers=17, layout={"silence_s": 15.0})
        add_all(engine)
        if name == "1-2-1":
            add_special(engine)
        aborted = ["r2", "r9", "r20", "r31"]
        for number in engine.steps():
            if number in {3, 12, 25, 40}:
                engine.engine.abort_request([aborted[{3: 0, 12: 1, 25: 2, 40: 3}[number]]])
        engine.settle()
        return {
            "tokens": engine.tokens,
            "aborted": [request for request in aborted if request not in engine.ends],
            "prompt_logprobs": engine.prompt_logprobs,
            "preemptions": engine.metric("vllm:num_preemptions"),
            "left_behind": engine.left_behind(),
            "hops": engine.core.model_executor.hops(),
            "blocks": engine.core.model_executor._pipeline.pools.blocks,
        }

    return scenario


def kills(model: str, port: int, seed: int = 0) -> dict[str, Any]:
    """Nodes of a (2,3) layout are killed one after another under load until a stage has none left."""
    dice = random.Random(seed)
    stages = LAYOUTS["2-3"]
    status = Path(os.environ["STAGE_DRIVER_FOLDER"]) / f"status-{port}.json"
    engine = Engine(model, port, stages, blocks_of_8_layers=40, layout={"silence_s": 15.0, "status_file": str(status)})
    pipeline = engine.core.model_executor._pipeline
    left = [set(own) for _, own in stages]
    rounds: list[dict[str, Any]] = []
    while all(left):
        victim = dice.choice(sorted(set().union(*left)))
        # The instance is to live on as long as it can: a stage's last node dies when nothing else is left.
        while any(own == {victim} for own in left) and any(len(own) > 1 for own in left):
            victim = dice.choice(sorted(set().union(*left)))
        left = [own - {victim} for own in left]
        at = dice.randrange(1, 40)
        engine.tokens, engine.ends = {}, {}
        add_all(engine)
        killed_at, error, bound, failed_s = 0.0, None, set(), 0.0
        try:
            for number in engine.steps():
                if number >= at and not killed_at:
                    bound = {
                        r for r, path in pipeline.bindings.paths.items() if victim in path and r in pipeline._known
                    }
                    bound -= {r for r in bound if r.rsplit("-", 1)[0] in engine.ends}
                    os.kill(engine.pids[victim], signal.SIGKILL)
                    killed_at = time.monotonic()
                if killed_at and not failed_s and any(end == "error" for end, _ in engine.ends.values()):
                    failed_s = time.monotonic() - killed_at
            if not killed_at:
                os.kill(engine.pids[victim], signal.SIGKILL)
                killed_at = time.monotonic()
                engine.add("late", prompt_of(99), params_of(99))
                engine.run()
            engine.settle()
        except Exception as failure:  # noqa: BLE001 - what it says is the result
            error = f"{type(failure).__name__}: {failure}"
            failed_s = time.monotonic() - killed_at
        time.sleep(1.0)  # the hub writes the status when it notices
        rounds.append(
            {
                "victim": victim,
                "at": at,
                "tokens": engine.tokens,
                "ends": engine.ends,
                "bound": sorted(request.rsplit("-", 1)[0] for request in bound),
                "error": error,
                "failed_s": failed_s,
                "left_behind": engine.left_behind() if error is None else {},
                "status": json.loads(status.read_text()),
            }
        )
    return {"rounds": rounds}


def prefill_decode(model: str, port: int) -> dict[str, Any]:
    """Prefill in (2,1) stages, decode in (1,2,1) of another split: every KV cache goes from the nodes of one path to those of another."""
    key_file = Path(os.environ["STAGE_DRIVER_FOLDER"]) / "fleet.key"
    key_file.write_text("0123456789abcdef" * 4)
    extra = {"key_file": str(key_file), "host": "127.0.0.1"}

    def engine(port: int, stages: Stages, role: str) -> Engine:
        config = KVTransferConfig(
            kv_connector="CoralKVConnector",
            kv_connector_module_path="coral_core.engine.plugin.kv_connector",
            kv_role=role,
            kv_connector_extra_config=extra,
            kv_load_failure_policy="fail",
        )
        # Prefill's activations are encrypted, decode's signed.
        layout = {"key_file": str(key_file), "silence_s": 15.0, "encrypt": role == "kv_producer"}
        return Engine(model, port, stages, kv_transfer_config=config, layout=layout)

    decode_stages: Stages = [(2, {"u": 1}), (5, {"v": 1, "w": 2}), (1, {"x": 1})]
    prefill = engine(port, LAYOUTS["2-1"], "kv_producer")
    decode = engine(free_port(), decode_stages, "kv_consumer")
    for number in range(REQUESTS):
        params = params_of(number)
        params.max_tokens = 1
        params.extra_args = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        prefill.add(f"r{number}", prompt_of(number), params)
    for _ in prefill.steps():
        pass
    for number in range(REQUESTS):
        params = params_of(number)
        params.extra_args = {"kv_transfer_params": prefill.offers[f"r{number}"]}
        decode.add(f"r{number}", prompt_of(number), params)
    for _ in decode.steps():
        if prefill.core.scheduler.has_requests():
            prefill.core.step_fn()
    until = time.monotonic() + 10.0
    while prefill.core.scheduler.has_requests() and time.monotonic() < until:
        prefill.core.step_fn()
    decode.settle()
    return {
        "tokens": decode.tokens,
        "aborted": [],
        "preemptions": 0,
        "external_tokens": decode.metric("vllm:external_prefix_cache_hits"),
        "prompt_tokens": sum(len(prompt_of(number)) for number in range(REQUESTS)),
        "left_behind": {**{f"p.{k}": v for k, v in prefill.left_behind().items()}, **decode.left_behind()},
        "hops": decode.core.model_executor.hops(),
        "blocks": decode.core.model_executor._pipeline.pools.blocks,
    }


def two_gpus(model: str, port: int) -> dict[str, Any]:
    """A stage of a node with tensor parallelism over two ranks beside one with a single rank."""
    engine = Engine(model, port, LAYOUTS["2-1"], nodes={"b": {"tp": 2}}, layout={"silence_s": 30.0})
    add_all(engine)
    engine.run()
    return {"tokens": engine.tokens, "aborted": [], "preemptions": 0, "left_behind": engine.left_behind()}


def refusals(model: str, port: int) -> dict[str, Any]:
    """What the executor says to options that it would not serve rightly."""
    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    kv = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    one = {"layers": 4, "nodes": [{"name": "a", "local": True}]}
    said: dict[str, str] = {}
    cases: dict[str, dict[str, Any]] = {
        "tensor parallel": {"tensor_parallel_size": 2},
        "speculative": {"speculative_config": draft},
        "lora": {"enable_lora": True},
        "connector": {"kv_transfer_config": kv},
        "layers": {"additional_config": {"coral_stages": {"stages": [one]}}},
        "no layout": {"additional_config": {}},
        "network": {
            "additional_config": {
                "coral_stages": {"stages": [one, {**one, "nodes": [{"name": "b"}]}], "listen": "192.0.2.1:80"}
            }
        },
    }
    for name, options in cases.items():
        try:
            Engine(model, port, LAYOUTS["1x2"], no_nodes=True, **options)
            said[name] = ""
        except Exception as error:  # noqa: BLE001 - what it says is the result
            said[name] = str(error)
    return {"said": said}


def stranger(model: str, port: int) -> dict[str, Any]:
    """A hub with the fleet's key hears members, and nobody with another key or none; a member ends after its engine has."""
    folder = Path(os.environ["STAGE_DRIVER_FOLDER"])
    files = {"none": None, "other": folder / "other.key", "own": folder / "own.key"}
    for name in ("other", "own"):
        (folder / f"{name}.key").write_text(name.ljust(64, "."))
    # Before this process has threads.
    members = {name: fork_member(port, name, key_file) for name, key_file in files.items()}
    heard = dict.fromkeys(files, False)
    hub = Hub(
        host="127.0.0.1",
        port=port,
        keys=keys_for("127.0.0.1", str(files["own"])),
        nodes=files,
        silence_s=60.0,
        on_lost=lambda *_: None,
    )
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        try:
            heard[hub.events.get(timeout=1.0)[0]] = True
            until = min(until, time.monotonic() + 4.0)  # for those that should not be heard
        except queue.Empty:
            continue
    hub.close()
    secret = b"s" * 32
    pull, address = Wire(None).bound(zmq.PULL, "127.0.0.1", 0, clear=True)
    inbox = Inbox(pull, secret)
    wire = Wire(None)
    boxes = {
        name: Outbox(wire, {"h": address}, key)
        for name, key in {"own": secret, "other": b"x" * 32, "none": b""}.items()
    }
    for name, outbox in boxes.items():
        outbox.send("h", [(1, name, 1)], {"rows": torch.ones(1, 2)})
    garbage = wire.connected(zmq.PUSH, address)
    garbage.send_multipart([b"not", b"even", b"rows"])
    until = time.monotonic() + 30.0
    while not inbox.rows and time.monotonic() < until:
        wait_for([pull], 1.0)
        inbox.read()
    time.sleep(1.0)
    inbox.read()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(members["own"], 0)[1])
    for name in ("none", "other"):
        os.kill(members[name], signal.SIGKILL)
    return {"heard": heard, "orphan_exit": exit_code, "rows_from": [name for _, name in inbox.rows]}


def fork_member(port: int, name: str, key_file: Path | None) -> int:
    """A node that only says hello, to a hub that may come later; it waits less long for its engine than others."""
    pid = os.fork()
    if not pid:
        end_with_parent()
        stage_wire.ENGINE_SILENCE_S = 3.0
        keys = keys_for("127.0.0.1", str(key_file) if key_file else None)
        link = Link(wire=Wire(keys), address=f"tcp://127.0.0.1:{port}", name=name)
        for _ in range(120):
            link.send("hello", {})
            time.sleep(1.0)
        os._exit(0)
    return pid


def internals(model: str, port: int) -> dict[str, Any]:
    """Digests of the parts of vLLM that the runtime is built on."""
    return {
        "vllm": importlib.import_module("vllm.version").__version__,
        "digests": {name: digest(name) for name in INTERNALS},
    }


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": plain,
    **{name: layout(name) for name in LAYOUTS},
    "kills": kills,
    **stage_pace.SCENARIOS,
    **stage_pause.SCENARIOS,
    "prefill-decode": prefill_decode,
    "two-gpus": two_gpus,
    "refusals": refusals,
    "stranger": stranger,
    "parts": stage_parts.parts,
    "internals": internals,
}


def free_port() -> int:
    """One that nobody has, and that the system gives nobody by itself."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def main() -> None:
    end_with_parent()
    if os.getppid() == 1:  # it ended while this one imported
        return
    model, *names = sys.argv[1:]
    results = os.fdopen(os.dup(1), "w")  # vLLM logs to the standard output
    os.dup2(2, 1)
    for name in names:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        end_with_parent()
        began = time.monotonic()
        try:
            signal.alarm(LIMIT_S)
            which, _, seed = name.partition(":")
            result = SCENARIOS[which](model, free_port(), *([int(seed)] if seed else []))
        except BaseException:  # noqa: BLE001 - the parent goes on with the next scenario
            result = {"failed": traceback.format_exc()}
        wall_s, cores = time.monotonic() - began, os.times()
        print(
            json.dumps({"scenario": name, "wall_s": wall_s, "user_s": cores.user, **result}), file=results, flush=True
        )
        os._exit(0)


if __name__ == "__main__":
    main()
