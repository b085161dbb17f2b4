"""Steps of real vLLM as they are profiled: which requests are in those that are timed."""

from __future__ import annotations

import json
import os
import subprocess

PROGRAM = """
import importlib.metadata, json, sys
from coral_core.engine.plugin.profile_steps import Timed, own_output
from coral_core.engine.plugin.serve import answering_for_vllm

def decoding_in_timed_steps(timed, requests, tokens):
    scheduler, steps = timed.engine.engine_core.engine_core.scheduler, []
    schedule = scheduler.schedule
    def watched(*given, **named):
        found = schedule(*given, **named)
        steps.append(list(found.num_scheduled_tokens.values()))
        return found
    scheduler.schedule = watched
    try:
        timed.measure("decode", requests, tokens, SAMPLES)
    except ValueError as error:
        return str(error)
    finally:
        scheduler.schedule = schedule
    return [step for step in steps if step][-SAMPLES:]

if __name__ == "__main__":
    SAMPLES, out = 5, own_output()
    importlib.metadata.version = answering_for_vllm(importlib.metadata.version)
    flags = ["--max-model-len", "512", "--max-num-batched-tokens", "256", "--max-num-seqs", "8", "--block-size", "32"]
    flags += ["--kv-cache-memory-bytes", str(64 << 20), "--dtype", "float32", "--enforce-eager"]
    from vllm.v1.engine.llm_engine import LLMEngine
    made, begun = LLMEngine.from_engine_args, []
    LLMEngine.from_engine_args = lambda arguments: begun.append(arguments.async_scheduling) or made(arguments)
    timed = Timed(["--model", sys.argv[1], *flags], 2)
    asked = {"few": (2, 32), "many": (8, 320), "long": (1, 510), "again": (8, 16)}
    found = {name: decoding_in_timed_steps(timed, *shot) for name, shot in asked.items()}
    print(json.dumps({**found, "ahead": begun}), file=out)
"""


def test_all_requests_decode_in_every_timed_step_however_many_steps_their_prompts_take(
    engine_python, tiny_model, repository
):
    done = subprocess.run(
        [engine_python, "-c", PROGRAM, tiny_model],
        cwd=repository,
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["few"] == 5 * [[1, 1]]
    assert found["many"] == 5 * [[1] * 8]  # ten steps of prompts: who came first waits for the last
    assert "do not decode in one step" in found["long"]  # the model's context is at its end before
    assert found["again"] == 5 * [[1] * 8]
    assert found["ahead"] == [False]  # an engine that schedules ahead, as GPUs' do, makes no whole steps
