"""The ledger on the reference data: the aims it is kept for, and that no model is scored by its own runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coral_core.perf.factors import load_engine_costs, load_factors
from coral_core.perf.prediction import COMPARED
from coral_core.perf.serving import kernel_times, latencies
from tasks.fit_factors import changes, fit_tables
from tasks.ledger import _LATENCY_TP, Observed, _layer_times, _serving, compare, error_rows, is_target, ledger
from tasks.ledger import _unpredictable as unpredictable
from tasks.reference_runs import read_latency_rows, read_serving_runs
from tests.fakes.perf_cases import AS_OF

NAMES = ((True, "own"), (False, "others"))
KEYS = {"model", "gpu", "phase", "metric", "n", "median_abs_error_frac", "p90_abs_error_frac"}


def test_medians_stay_within_the_aims(reference_data: Path) -> None:
    document = ledger(reference_data)
    aimed = {(row["group"], row["metric"]): row for row in document["targets"] if row["met"] is not None}
    assert len(aimed) == 4
    assert all(row["met"] for row in aimed.values())
    found = {metric: row["median_abs_error_frac"] for (_, metric), row in aimed.items()}
    # What was measured when the factors were fitted; worse means that a change cost accuracy.
    assert found["tpot_s"] < 0.095
    assert found["ttft_s"] < 0.15
    assert found["layer_time_s"] < 0.07
    assert found["latency_s"] < 0.12
    counted = {metric: row["n"] for (_, metric), row in aimed.items()}
    assert counted == {"tpot_s": 336, "ttft_s": 336, "layer_time_s": 1221, "latency_s": 55}
    assert document["queue_bound_runs_left_out"] > 0


def test_entries_are_whole_and_the_worst_comes_first(reference_data: Path) -> None:
    rows = ledger(reference_data)["entries"]
    assert all(set(row) >= KEYS for row in rows)
    medians = [row["median_abs_error_frac"] for row in rows]
    assert medians == sorted(medians, reverse=True)
    keys = [(row["model"], row["gpu"], row["phase"], row["metric"], row["engine"]) for row in rows]
    assert len(set(keys)) == len(keys)
    # Other engines are apart, with entries of their own.
    assert {row["engine"] for row in rows} >= {"vllm", "trtllm", "sglang"}


def test_a_models_runs_do_not_enter_the_costs_it_is_scored_with(reference_data: Path) -> None:
    runs = [run for run in read_serving_runs(reference_data).runs if is_target(run) and not run.queue_bound]
    model = "kimi-k2.5"
    others = [run for run in runs if run.point.shape.name != model]
    everything, without = (Observed.of(rows, load_factors()).costs(without=model) for rows in (runs, others))
    assert everything == without
    assert Observed.of(runs, load_factors()).costs() != everything


def test_the_ledger_predicts_a_model_from_the_runs_of_others_alone(reference_data: Path) -> None:
    """Had this model been three times as slow, its own predictions would be the same, and those of others not."""
    runs = [run for run in read_serving_runs(reference_data).runs if is_target(run) and not run.queue_bound]
    model = "kimi-k2.5"
    slowed = [
        replace(run, ttft_s=3 * run.ttft_s, tpot_s=3 * run.tpot_s) if run.point.shape.name == model else run
        for run in runs
    ]
    before, after = (
        {name: [item.predicted for item in _serving(rows) if (item.model == model) == own] for own, name in NAMES}
        for rows in (runs, slowed)
    )
    assert before["own"] == after["own"]
    assert before["others"] != after["others"]


def test_layer_times_take_their_factor_from_the_other_model(reference_data: Path, tmp_path: Path) -> None:
    lines = (reference_data / "perf" / "helix_layer_times.csv").read_text(encoding="utf-8").splitlines()
    rows = [line.split(",") for line in lines]
    for cells in rows[1:]:
        if cells[0] == "llama2_70b":
            cells[4] = str(3 * float(cells[4]))
    (tmp_path / "perf").mkdir()
    (tmp_path / "perf" / "helix_layer_times.csv").write_text("\n".join(map(",".join, rows)), encoding="utf-8")
    before, after = _layer_times(reference_data), _layer_times(tmp_path)
    assert len(before) == len(after) == 1221
    for one, two in zip(before, after, strict=True):
        assert two.predicted == pytest.approx(one.predicted * (1 if one.model == "llama2_70b" else 3))


def test_the_shipped_tables_are_what_the_fit_makes(reference_data: Path) -> None:
    tables = fit_tables(reference_data, as_of=AS_OF)
    for row in changes(tables):
        assert row["shipped"] is not None, row
        # Fitting starts from shipped kernels, so rounding moves the engine's costs a little.
        assert row["fitted"] == pytest.approx(row["shipped"], rel=0.03, abs=0.02), row
    shipped = Path(__file__).resolve().parents[2] / "coral_core" / "perf" / "data" / "errors.csv"
    made, kept = (
        [line.split(",")[:4] for line in text.splitlines()] for text in (tables["errors.csv"], shipped.read_text())
    )
    assert made == kept


def test_error_bars_hold_nine_of_ten_comparisons(reference_data: Path) -> None:
    compared, _, _ = compare(reference_data)
    for row in error_rows(compared):
        errors = [
            abs(item.error_frac)
            for item in compared
            if (item.gpu, item.phase, item.metric) == (row["gpu"], row["phase"], row["metric"])
            and item.engine in {"", "vllm", "vllm 2023", "tgi"}
        ]
        assert len(errors) == row["n"]
        assert np.mean(np.array(errors) <= row["p90_abs_error_frac"]) == pytest.approx(0.9, abs=0.02)


def test_the_fit_beats_the_costs_it_starts_from(reference_data: Path) -> None:
    runs = [run for run in read_serving_runs(reference_data).runs if is_target(run) and not run.queue_bound]
    times = kernel_times([run.point for run in runs], load_factors())
    _, tpot_s = latencies(times, load_engine_costs())
    measured = np.array([run.tpot_s for run in runs])
    assert np.median(np.abs(tpot_s / measured - 1)) < 0.08


def test_predictions_know_what_was_compared_on_each_gpu(reference_data: Path) -> None:
    runs = [run for run in read_serving_runs(reference_data).runs if run.engine == "vllm" and not run.queue_bound]
    points = [(run.point.gpu.name, run.point) for run in runs if not unpredictable(run.point)]
    loads = [(gpu, p.tp, p.input_tokens, p.output_tokens, p.concurrency) for gpu, p in points]
    for row in read_latency_rows(reference_data):
        tp = next(tp for name, tp in _LATENCY_TP.items() if row.name.startswith(name))
        loads.append(("A10G", tp, row.input_tokens, row.output_tokens, row.concurrency))
    assert {gpu for gpu, *_ in loads} == set(COMPARED)
    for gpu, known in COMPARED.items():
        tps, *lengths = (list(column) for column in zip(*(load[1:] for load in loads if load[0] == gpu), strict=True))
        assert known.tps == tuple(tp for tp in sorted(set(tps)) if tps.count(tp) > 1)
        ends = [(min(column), max(column)) for column in lengths]
        assert ends == [known.input_tokens, known.output_tokens, known.concurrency]
