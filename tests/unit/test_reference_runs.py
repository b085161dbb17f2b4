"""Reference data that is cut short, empty or another file: an error that names file and line, never a ledger of less."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from coral_core.errors import DataGapError, InputError
from tasks.fit_factors import fit_tables
from tasks.reference_runs import RUNS, read_layer_time_rows, read_serving_runs

COLUMNS = (
    *("mode", "model_path", "system", "gemm_quant_mode", "precision", "tp_size", "isl", "osl"),
    *("concurrency", "batch_size", "backend", "silicon_ttft_ms", "silicon_tpot_ms"),
)
ROW = "agg,Qwen/Qwen3-32B,h100_sxm,fp8,fp8,1,1024,1024,16,,{engine},90,20"


def written(folder: Path, text: str, name: str = RUNS) -> Path:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(text.encode("latin-1"))
    return folder


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    text = f"{','.join(COLUMNS)}\n{ROW.format(engine='vllm')}\n"
    [run] = read_serving_runs(written(tmp_path, text)).runs
    assert (run.point.shape.name, run.point.variant) == ("qwen3-32b", "fp8")
    assert run.ttft_s == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "serving_runs_h100_h200.csv:1: has no columns"),
        (f"{','.join(COLUMNS)}\n", "serving_runs_h100_h200.csv: has no rows"),
        (f"{','.join(COLUMNS)}\nagg,Qwen/Qw", "serving_runs_h100_h200.csv:2: fewer cells than columns"),
        (f"{','.join(COLUMNS)}\n{ROW.format(engine='vllm')},7\n", "serving_runs_h100_h200.csv:2: more cells"),
        ("a,b\n1,2\n", "serving_runs_h100_h200.csv:1: has no column 'mode'"),
        ("\xff\xfe,\n1,2\n", "serving_runs_h100_h200.csv: cannot be read"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_serving_runs(written(tmp_path, text))


def test_another_files_columns_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, "model,node\na,b\n", "perf/helix_layer_times.csv")
    with pytest.raises(InputError, match=r"helix_layer_times\.csv:1: has no column 'phase'"):
        read_layer_time_rows(folder)


def test_nothing_is_fitted_to_nothing(tmp_path: Path) -> None:
    text = f"{','.join(COLUMNS)}\n{ROW.format(engine='sglang')}\n"
    with pytest.raises(DataGapError, match="no run of vLLM on H100 or H200 to fit to"):
        fit_tables(written(tmp_path, text), as_of=date(2026, 1, 1))
