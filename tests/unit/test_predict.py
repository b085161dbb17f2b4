"""Predictions of serving latencies: refusals, what they say of themselves, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coral_core.catalog import load_models
from coral_core.catalog.hardware import load_gpus
from coral_core.catalog.model_ids import gpu_by_any_name, model_by_any_name, variant_by_dtype, variant_by_name
from coral_core.cli.entry import run
from coral_core.domain.workload import Phase
from coral_core.errors import CoralError, DataGapError, InputError, NoSolutionError
from coral_core.perf.errors import ErrorBar, capacity_error, load_errors
from coral_core.perf.factors import expert_kind, load_factors
from coral_core.perf.fit import fit_terms
from coral_core.perf.prediction import Bar, prediction
from coral_core.perf.serving import ServingPoint, predict, running_requests


def point(**changes: object) -> ServingPoint:
    base = ServingPoint(
        shape=load_models()["gpt-oss-120b"],
        variant="mxfp4",
        gpu=load_gpus()["H100"],
        tp=2,
        input_tokens=1024,
        output_tokens=1024,
        concurrency=16,
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # the names are checked at run time


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"input_tokens": math.nan}, InputError, "input tokens: nan is not a number of at least 1"),
        ({"output_tokens": 0.0}, InputError, "output tokens: 0.0 is not"),
        ({"concurrency": -3}, InputError, "concurrency: -3 is not"),
        ({"tp": 3}, InputError, "tp: gpt-oss-120b cannot be split over 3 GPUs"),
        ({"input_tokens": 1e300}, InputError, r"input tokens: 1e\+300 is more than 1e\+09"),
        ({"concurrency": 10**30}, InputError, r"concurrency: 1e\+30 is more than"),
        ({"tp": 5}, InputError, r"\(it can over 1, 2, 4, 8, 16\)"),
        ({"gpu": load_gpus()["T4"]}, InputError, r"T4 has no kernels for mxfp4 \(it has for: bf16\)"),
        ({"tp": 16}, DataGapError, "tp: no all-reduce of 16 x H100 is known"),
        ({"variant": "int9"}, InputError, "has no variant 'int9'"),
        ({"gpu": load_gpus()["T4"]}, InputError, "dtype: T4 has no kernels for mxfp4"),
        ({"tp": 1, "variant": "bf16"}, NoSolutionError, "does not fit 1 x H100"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], error: type[CoralError], text: str) -> None:
    with pytest.raises(error, match=text):
        predict(point(**changes))


def test_prompts_of_others_slow_tokens_and_long_prompts_take_several_steps() -> None:
    alone, shared = predict(point(concurrency=1)), predict(point(concurrency=32))
    assert shared.tpot_s > alone.tpot_s
    short, long = predict(point(concurrency=1)), predict(point(concurrency=1, input_tokens=65536))
    assert long.ttft_s > 10 * short.ttft_s


def test_steps_take_no_more_prompt_tokens_than_their_budget() -> None:
    # 100 requests of 8192 in and 64 out need 200 prompts per 64 steps, more than one a step: only some can run.
    crowded = point(input_tokens=8192, output_tokens=64, concurrency=100)
    assert running_requests(crowded) == 65
    assert predict(crowded).ttft_s > predict(replace(crowded, concurrency=65)).ttft_s


def test_a_prediction_says_what_it_rests_on() -> None:
    known = prediction(point())
    assert known.extrapolated == ()
    assert not known.queue_bound
    assert known.tpot is not None
    assert known.tpot.error.n > 100
    low, high = known.tpot.bounds(known.latencies.tpot_s)
    assert high is not None
    assert low < known.latencies.tpot_s < high
    assert known.ttft.basis.startswith(f"{known.ttft.error.n} runs on H100")
    far = prediction(point(gpu=load_gpus()["L40S"], tp=8, input_tokens=200_000, concurrency=2))
    assert "no serving runs on L40S" in far.extrapolated
    assert any("longer than the 131072" in reason for reason in far.extrapolated)
    assert any("2 concurrency" in reason for reason in far.extrapolated)
    assert far.tpot is not None
    assert far.tpot.basis.startswith("no runs on L40S: the worst of other GPUs")
    assert far.tpot.error.p90_frac == max(bar.p90_frac for bar in load_errors().values() if bar.metric == "tpot_s")
    whole = prediction(point(gpu=load_gpus()["A10G"], tp=8))
    assert "(whole latencies)" in whole.ttft.basis
    assert any("only whole latencies were compared on A10G" in reason for reason in whole.extrapolated)
    mxfp4 = prediction(point(gpu=load_gpus()["A100-80"], tp=4))
    assert "no kernels of mxfp4 experts on A100-80" in mxfp4.extrapolated


def test_a_prediction_beyond_what_was_compared_on_its_gpu_says_so() -> None:
    mistral = point(shape=load_models()["llama-3.1-8b"], variant="bf16", gpu=load_gpus()["A10G"])
    said = prediction(mistral).extrapolated
    assert "TP 2, compared on A10G at 1, 4" in said
    assert "1024 output tokens, compared at 6 to 102" in said
    assert "16 concurrency, compared at 1 to 8" in said
    assert prediction(replace(mistral, tp=4, output_tokens=100, concurrency=4)).extrapolated == said[:1]


def test_one_output_token_has_no_time_per_further_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert prediction(point(output_tokens=1)).tpot is None
    asked = ["predict", "--model", "openai/gpt-oss-120b", "--gpu", "H100", "--tp", "2", "--output-tokens", "1"]
    assert run([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ttft_s"] > 0
    assert {document[f"tpot_{what}"] for what in ("s", "p90_range_s", "error")} == {None}
    assert run(asked) == 0
    assert "per further token" not in capsys.readouterr().out


def test_errors_above_the_whole_have_no_upper_bound() -> None:
    error = ErrorBar(
        gpu="x", phase="aggregated", metric="ttft_s", n=3, median_frac=0.5, p90_frac=1.5, p90_slower_frac=0.0
    )
    assert Bar(error=error, basis="").bounds(1.0) == (0.4, None)


def test_capacities_have_error_bars_where_something_was_measured() -> None:
    for phase in Phase:
        assert capacity_error("L40S", phase) is None
        for name in ("H100", "H200", "A10G", "L4", "T4"):
            found = capacity_error(name, phase)
            assert found is not None
            assert found.gpu == name
            assert 0 < found.median_frac <= found.p90_frac
    prefill, decode = capacity_error("L4", Phase.PREFILL), capacity_error("L4", Phase.DECODE)
    assert prefill is not None
    assert decode is not None
    assert (prefill.phase, decode.phase) == ("prefill", "decode")


def test_experts_take_the_kernel_of_their_weights_or_that_of_16_bits() -> None:
    models, factors, gpus = load_models(), load_factors(), load_gpus()
    kinds = {
        name: expert_kind(models["gpt-oss-120b" if name == "mxfp4" else "qwen3-30b"].variants[name])
        for name in ("bf16", "fp8", "int4", "mxfp4")
    }
    assert kinds == {"bf16": "full", "fp8": "fp8", "int4": "int4", "mxfp4": "mxfp4"}
    fp8 = models["qwen3-30b"].variants["fp8"]
    assert factors.expert_kernel(gpus["A100-80"], fp8) == factors.experts["A100-80", "full"]
    assert factors.expert_kernel(gpus["H100"], fp8) == factors.experts["H100", "fp8"]
    with pytest.raises(DataGapError, match="no expert kernel of GPU H100 is known"):
        replace(factors, experts={}).expert_kernel(gpus["H100"], fp8)


def test_models_and_gpus_go_by_the_names_others_give_them() -> None:
    models, gpus = load_models(), load_gpus()
    for name, expected in {
        "openai/gpt-oss-120b": "gpt-oss-120b",
        "Qwen/Qwen3-30B-A3B": "qwen3-30b",
        "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
        "deepseek-ai/DeepSeek-R1": "deepseek-v3",
        "meta-llama/Llama-3.3-70B-Instruct": "llama-3-70b",
        "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
        "phi-4": "phi-4",
    }.items():
        assert model_by_any_name(models, name).name == expected
    with pytest.raises(InputError, match="unknown model 'nobody/nothing'"):
        model_by_any_name(models, "nobody/nothing")
    assert gpu_by_any_name(gpus, "h200_sxm").name == "H200"
    assert gpu_by_any_name(gpus, "rtx_pro_6000_server").name == "RTX-PRO-6000"
    with pytest.raises(InputError, match="unknown GPU 'H900'"):
        gpu_by_any_name(gpus, "H900")
    assert variant_by_dtype(models["gpt-oss-120b"], "fp4") == "mxfp4"
    assert variant_by_dtype(models["kimi-k2.5"], "int4_wo") == "int4-experts"
    assert variant_by_dtype(models["qwen3-32b"], "fp8_block") == "fp8"
    assert variant_by_dtype(models["qwen3-32b"], "bfloat16") == "bf16"
    assert variant_by_dtype(models["kimi-k2.5"], None) == "int4-experts"
    with pytest.raises(InputError, match="dtype: model phi-4 has no variant 'mxfp4'"):
        variant_by_dtype(models["phi-4"], "mxfp4")


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("Qwen/Qwen3-32B", None, "bf16"),
        ("Qwen/Qwen3-32B-FP8", None, "fp8"),
        ("Qwen/Qwen3-32B-FP8", "bf16", "bf16"),
        ("Qwen/Qwen3-32B-AWQ", None, "int4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", None, "fp8"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", None, "fp8"),
        ("openai/gpt-oss-20b", "MXFP4", "mxfp4"),
        ("openai/gpt-oss-20b", None, "mxfp4"),
        ("qwen3-32b", "FP8", "fp8"),
        ("qwen3-32b", "auto", "bf16"),
    ],
)
def test_ids_say_their_dtype_unless_one_is_asked_for(name: str, dtype: str | None, expected: str) -> None:
    assert variant_by_name(load_models(), name, dtype) == expected


def test_a_dtype_that_an_id_says_is_not_dropped_where_it_is_unknown() -> None:
    with pytest.raises(InputError, match="has no variant 'int8'"):
        variant_by_name(load_models(), "nobody/Qwen3-32B-INT8", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100-sxm", "H100"),
        ("A100-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("Tesla T4", "T4"),
        ("H200-141GB", "H200"),
        ("A10G-24GB", "A10G"),
    ],
)
def test_gpus_go_by_what_drivers_and_shops_call_them(name: str, expected: str) -> None:
    assert gpu_by_any_name(load_gpus(), name).name == expected


@pytest.mark.parametrize("name", ["A100", "H100-40GB", "H100-NVL", "H100 PCIe", "V100", "", "80GB"])
def test_a_gpu_that_may_be_another_one_is_not_guessed(name: str) -> None:
    with pytest.raises(InputError, match="unknown GPU"):
        gpu_by_any_name(load_gpus(), name)


@pytest.mark.parametrize("option", ["--tp", "--concurrency"])
def test_the_command_rounds_no_counts(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "--model", "llama-3.1-8b", "--gpu", "H100", option, "1.5"]) == 2
    assert "'1.5' is not a whole number" in capsys.readouterr().err


def test_terms_are_found_again_and_none_goes_below_its_bound() -> None:
    rng = np.random.default_rng(5)
    terms = rng.uniform(0.1, 2, (200, 3))
    truth = np.array([0.5, 2.0, 0.0])
    assert fit_terms(terms, terms @ truth, least=np.zeros(3)) == pytest.approx(truth, abs=1e-9)
    bounded = fit_terms(terms, terms @ truth, least=np.array([0.0, 0.0, 0.3]))
    assert np.all(bounded >= [0.0, 0.0, 0.3])
    assert bounded[2] == 0.3


def test_the_command_says_the_same_for_people_and_machines(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "--model", "openai/gpt-oss-120b", "--gpu", "H100", "--tp", "2"]
    assert run([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = predict(point())
    assert document["ttft_s"] == expected.ttft_s
    assert document["tpot_s"] == expected.tpot_s
    assert document["kind"] == "predicted"
    known = prediction(point()).tpot
    assert known is not None
    assert document["tpot_error"]["n"] == known.error.n
    assert run([*asked, "--input-tokens", "100"]) == 0
    shown = capsys.readouterr().out
    assert "(predicted)" in shown
    assert "no high" not in shown
    assert run([*asked[:3], "--gpu", "B200"]) == 0
    assert "no high: errors there reach 100%" in capsys.readouterr().out
    assert "extrapolated: 100 input tokens, compared at 1024 to 8192" in shown
    assert run([*asked, "--input-tokens", "8192", "--output-tokens", "64", "--concurrency", "100"]) == 0
    assert "65 of 100 requests run at a time: the others wait" in capsys.readouterr().out
    assert run(["predict", "--model", "llama-3-70b", "--gpu", "L40S"]) == 3
    assert "does not fit 1 x L40S" in capsys.readouterr().err


def test_the_ledger_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CORAL_REFERENCE_DATA", raising=False)
    assert run(["ledger"]) == 4
    assert "reference data does not ship with Coral" in capsys.readouterr().err
    assert run(["ledger", "--data", str(tmp_path / "none")]) == 4
    assert run(["ledger", "--data", str(tmp_path)]) == 4
    assert "there is no serving_runs_h100_h200.csv" in capsys.readouterr().err
