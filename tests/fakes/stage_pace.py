"""Pace of emulated nodes: a template's layout beside the best chain on stock vLLM, and the decodes of a layout's steps.

Both runtimes run the same device (`slow_worker`). Scenarios of `stage_driver`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams
from vllm.v1.executor import multiproc_executor

from tests.fakes.slow_worker import Device, set_devices
from tests.fakes.stage_engine import LAYOUTS, Engine, Stages, prompt_of

WORKER = "tests.fakes.slow_worker.SlowWorker"
LAYERS = 8
BATCH = 4
PROMPT_TOKENS = 8
ANSWER_TOKENS = 18
PACE_REQUESTS = 48
PACE_STAGES: Stages = [(4, {"a": 2, "b": 1}), (4, {"c": 1, "d": 1, "e": 1})]
LAYER_MS = {"a": 30.0, "b": 60.0, "c": 60.0, "d": 60.0, "e": 60.0}
CHAIN = {"a": 4, "b": 2, "c": 2}
"""Layers of the best chain of these nodes."""


def pace(model: str, port: int) -> dict[str, Any]:
    """Tokens/s of a (2,3) layout of unequal nodes, whose steps hold BATCH requests at most."""
    devices = {name: Device(layer_ms=layer_ms, batch=BATCH) for name, layer_ms in LAYER_MS.items()}
    set_devices([[devices[name] for name in own] for _, own in PACE_STAGES])
    nodes = {name: {"max_num_seqs": BATCH} for name in devices}
    engine = Engine(model, port, PACE_STAGES, nodes=nodes, layout={"silence_s": 15.0}, worker_cls=WORKER)
    measured = paced(engine, [ANSWER_TOKENS] * PACE_REQUESTS)
    engine.settle()
    rates = (sum(BATCH / devices[name].step_s(layers, BATCH, BATCH) for name in own) for layers, own in PACE_STAGES)
    return measured | {
        "predicted_tokens_per_s": min(rates),
        "chain_predicted_tokens_per_s": 1000 * BATCH / best_chain_ms(),
        "left_behind": engine.left_behind(),
    }


def chain(model: str, port: int, most_requests: int = 0) -> dict[str, Any]:
    """Tokens/s of the best chain of the same nodes on stock vLLM's own pipeline.

    vLLM bounds the requests that run, not those of a step. By itself the scenario sets what suits the device best: BATCH
    requests for each step in flight, admitted BATCH at a time, so that no step holds more. `most_requests`: run so many instead.
    """
    del port
    stage_ms = {name: layers * LAYER_MS[name] for name, layers in CHAIN.items()}
    assert max(stage_ms.values()) == best_chain_ms()
    os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, CHAIN.values()))
    set_devices([[Device(layer_ms=LAYER_MS[name], batch=BATCH)] for name in CHAIN])
    # As on GPUs; spawned workers would import vLLM again.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    engine = Engine(
        model,
        0,
        pipeline_parallel_size=len(CHAIN),
        distributed_executor_backend="mp",
        worker_cls=WORKER,
        max_num_seqs=most_requests or BATCH * len(CHAIN),
        max_num_batched_tokens=max(most_requests, BATCH * PROMPT_TOKENS),
    )
    measured = paced(engine, [ANSWER_TOKENS] * PACE_REQUESTS)
    engine.core.model_executor.shutdown()
    return measured


def best_chain_ms() -> float:
    """The time per step of the slowest stage of the best chain, one node per stage, any of the nodes, any whole split."""
    costs = list(LAYER_MS.values())
    times = sorted({layers * cost for cost in costs for layers in range(1, LAYERS + 1)})
    return next(time_ms for time_ms in times if sum(int(time_ms // cost) for cost in costs) >= LAYERS)


RUNNING = 16
STAGE_MS = 80.0
"""Of a stage for its part of a step of RUNNING / stages requests, in a layout whose stages are in balance."""


def decodes(name: str, cost: str) -> Callable[[str, int], dict[str, Any]]:
    """Tokens/s and TPOT of RUNNING requests that come all at once, where a step costs the same whatever it holds, or by its tokens."""

    def scenario(model: str, port: int) -> dict[str, Any]:
        stages = LAYOUTS[name]
        share = RUNNING / len(stages)
        devices = [
            [
                Device(layer_ms=2 * STAGE_MS / LAYERS)
                if cost == "step"
                else Device(layer_ms=0.0, token_ms=STAGE_MS / layers / share * sum(own.values()) / weight)
                for weight in own.values()
            ]
            for layers, own in stages
        ]
        set_devices(devices)
        options = {"max_num_seqs": RUNNING, "max_num_batched_tokens": 256, "worker_cls": WORKER}
        engine = Engine(model, port, stages, layout={"silence_s": 15.0}, **options)
        answers = [12 + 7 * number % 24 for number in range(2 * RUNNING)]
        measured = paced(engine, answers)
        engine.settle()
        # Whole steps of a share of the requests, the stages side by side.
        whole = max(
            device.step_s(layers, share * weight / sum(own.values()), share * weight / sum(own.values()))
            for (layers, own), nodes in zip(stages, devices, strict=True)
            for weight, device in zip(own.values(), nodes, strict=True)
        )
        prompts = PROMPT_TOKENS / (sum(answers) / len(answers)) if cost == "token" else 0.0
        return measured | {
            "predicted_tokens_per_s": share / whole / (1 + prompts),
            "predicted_tpot_s": len(stages) * whole * (1 + prompts),
        }

    return scenario


def paced(engine: Engine, answers: list[int]) -> dict[str, Any]:
    """Requests that all come now: tokens/s between a fifth and four fifths of all tokens, and the mean time per token after the first."""
    for number, tokens in enumerate(answers):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.add(f"r{number}", (prompt_of(number) * PROMPT_TOKENS)[:PROMPT_TOKENS], params)
    samples = [(time.monotonic(), 0)]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for _ in engine.steps():
        now = time.monotonic()
        samples.append((now, sum(map(len, engine.tokens.values()))))
        for request_id in engine.tokens:
            first.setdefault(request_id, now)
            if request_id in engine.ends:
                last.setdefault(request_id, now)
    steady = [sample for sample in samples if 0.2 <= sample[1] / sum(answers) <= 0.8]
    (began, before), (ended, after) = steady[0], steady[-1]
    each = [(last[f"r{number}"] - first[f"r{number}"]) / (tokens - 1) for number, tokens in enumerate(answers)]
    return {"measured_tokens_per_s": (after - before) / (ended - began), "measured_tpot_s": sum(each) / len(each)}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    "pace": pace,
    "chain": chain,
    **{f"decodes-{name}-{cost}": decodes(name, cost) for name in ("1x2", "2-1", "2-3") for cost in ("step", "token")},
}
