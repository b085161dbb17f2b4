"""The commands of profiles and ledgers: what they take, refuse, show and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coral_core.cli.entry import run
from coral_core.errors import DataGapError, StoreUnreachableError
from coral_core.perf.profile import Profile
from flows.profile_gpus import Profiled

CSV = """phase,tp,requests,tokens,layer_ms,fixed_ms,cv_frac
prefill,1,1,500,25,1,0.01
prefill,1,1,1000,45,1,0.01
decode,1,1,1000,9,1,
decode,1,16,1000,12,1,0.03
"""


def imported(file: Path, store: Path, *more: str) -> int:
    asked = ["profile", "import", str(file), "--model", "meta-llama/Llama-3.3-70B-Instruct", "--config", "g6.xlarge"]
    return run(
        [*asked, "--engine", "vllm", "--version", "0.32.0", "--source", "test", "--store", f"file://{store}", *more]
    )


def test_import_show_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    file.write_text(CSV, encoding="utf-8")
    assert imported(file, store, "--dry-run") == 0
    assert "4 times of llama-3-70b on g6.xlarge: checked, not stored" in capsys.readouterr().out
    assert imported(file, store, "--flag", "--enforce-eager", "--json") == 0
    key = json.loads(capsys.readouterr().out)["key"]
    url = ["--store", f"file://{store}"]
    assert run(["profile", "list", *url, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["key"], row["flags"], row["kind"]) == (key, ["--enforce-eager"], "measured")
    assert run(["profile", "list", *url]) == 0
    assert key in capsys.readouterr().out.splitlines()
    chart = tmp_path / "chart.svg"
    assert run(["profile", "show", key, *url, "--chart", str(chart)]) == 0
    assert "(measured)" in capsys.readouterr().out
    assert chart.read_text(encoding="utf-8").startswith("<svg")
    assert run(["profile", "show", key, *url, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["layer_s"] for point in points] == pytest.approx([0.025, 0.045, 0.009, 0.012])
    assert run(["profile", "compare", key, *url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["phase"], row["n"]) for row in rows} == {("prefill", 2), ("decode", 2)}
    assert run(["profile", "compare", key, key, *url, "--json"]) == 0
    assert all(row["p90_abs_error_frac"] == 0 for row in json.loads(capsys.readouterr().out)["rows"])
    assert run(["profile", "compare", key, *url]) == 0
    assert "estimates (predicted) against" in capsys.readouterr().out
    assert run(["profile", "show", "profiles/none", *url]) == 2
    assert "unknown profile 'profiles/none'" in capsys.readouterr().err


def test_a_run_says_what_its_profile_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Profiled(
        keys={"a": "profiles/a", "b": "profiles/b"}, refused={"a": 7, "b": 0}, unfinished={}, spent_usd=1.0
    )
    monkeypatch.setattr("flows.profile_gpus.profile_gpus", lambda _: ended)
    asked = ["profile", "run", "--model", "tiny-chat", "--config", "a", "--engine-file", str(tmp_path / "engine.yaml")]
    assert run(asked) == 0
    said = capsys.readouterr()
    assert "b: measured, stored as profiles/b" in said.out
    assert "a: 7 kinds of step are not in it" in said.err
    assert "b: 0" not in said.err
    assert run([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == {"a": 7, "b": 0}


def test_what_is_not_in_a_table_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    file.write_text("phase,tp,requests,tokens,layer_ms\ndecode,1,1,1000,9\n", encoding="utf-8")
    assert imported(file, store, "--json") == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert run(["profile", "show", key, "--store", f"file://{store}", "--json"]) == 0
    [point] = json.loads(capsys.readouterr().out)["points"]
    assert (point["fixed_s"], point["samples"], point["cv_frac"]) == (None, None, None)
    assert run(["profile", "show", key, "--store", f"file://{store}"]) == 0
    assert "None" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CSV.replace("phase,", "kind,"), "times.csv:1: columns are kind"),
        (CSV.replace("decode,1,16", "decode,x,16"), "times.csv:5: tp is 'x', must be a number"),
        (CSV.replace("decode,1,16", "both,1,16"), "times.csv:5: phase is 'both'"),
        (CSV.replace(",0.03", ""), "times.csv:5: 6 cells, 7 are due"),
        (CSV.replace("1000,12,", "1000,nan,"), "times.csv:5: layer_ms is 'nan', must be a finite number"),
        (CSV.replace("1000,12,", "1000,-12,"), "times.csv:5: layer_ms is '-12', must be a finite number, not below 0"),
        (CSV.replace("1000,12,", "1000,0,"), "times.csv:5: layer_s is 0.0"),
        (CSV.replace("decode,1,16", f"decode,{'9' * 400},16"), "must be a finite number"),
        (CSV.replace("decode,1,16", "decode,1,1"), "times.csv:4 and 5: decode at TP 1, 1 requests of 1000 tokens is"),
        (CSV.replace("1000,12,", "1000,6,"), "times.csv:4 and 5: decode at TP 1 falls from"),
        (CSV.replace("12,1,0.03", "12,60000,0.03"), "times.csv:5: the fixed part of a step takes 6e+04 ms, over 10"),
        (
            CSV.replace("12,1,0.03", "12,1,3"),
            "times.csv:5: cv_frac is 3, must be at most 1 (it is a share: 0.05 for 5%",
        ),
        (
            CSV.replace("cv_frac", "samples").replace("0.03", "1" + 24 * "0").replace("0.01", "7"),
            "times.csv:5: samples is 1000000000000000000000000, must be at least 1 and at most 1e+09",
        ),
        (
            CSV.replace("1000,12,", "1000,0.01,"),
            "times.csv:5: a layer takes 0.01 ms, but L4's peaks allow no less",
        ),
        ("", "times.csv:1: columns are"),
    ],
)
def test_bad_tables_are_refused_with_their_rows(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.csv"
    file.write_text(text, encoding="utf-8")
    assert imported(file, tmp_path / "store") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_layer_time_tables_are_taken_with_what_they_do_not_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, store = tmp_path / "table.csv", tmp_path / "store"
    rows = ["model,node,phase,x,time_ms_per_layer,x_meaning", "m,l4,prompt,500,25,tokens", "m,l4,decode,4,9,requests"]
    file.write_text("\n".join(rows), encoding="utf-8")
    assert imported(file, store) == 2
    assert "say whose rows count: --rows-of, --node and --context" in capsys.readouterr().err
    whose = ["--rows-of", "m", "--node", "l4", "--context", "800"]
    assert imported(file, store, *whose[:-1], "nan") == 2
    assert "--context: is nan, must be a number above 0" in capsys.readouterr().err
    assert imported(file, store, *whose, "--json") == 0
    assert json.loads(capsys.readouterr().out)["points"] == 2
    assert imported(file, store, *whose[:3], "l9", *whose[4:]) == 4
    capsys.readouterr()
    file.write_text("\n".join([rows[0], rows[2], rows[1], "m,l4,decode,2,0.001,requests"]), encoding="utf-8")
    assert imported(file, store, *whose) == 2
    assert "table.csv:4: a layer takes 0.001 ms" in capsys.readouterr().err  # its line, whatever the order


def test_a_configuration_of_another_catalogue_is_told_from_one_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    file.write_text("phase,tp,requests,tokens,layer_ms\ndecode,1,1,64,9\n", encoding="utf-8")
    asked = ["profile", "import", str(file), "--model", "tiny-chat", "--engine", "vllm", "--version", "1"]
    url = ["--store", f"file://{store}"]
    assert run([*asked, "--source", "x", "--config", "local-large", *url]) == 2
    assert "in catalogue aws-real 'local-large' (--catalog local has it)" in capsys.readouterr().err
    assert run([*asked, "--source", "x", "--config", "mine", *url]) == 2
    assert "other catalogues: paper-core, paper-extended, local, or a scenario's file)" in capsys.readouterr().err
    assert run([*asked, "--source", "x", "--config", "local-large", "--catalog", "local", *url, "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert run(["profile", "compare", key, *url]) == 2
    assert "--catalog local has it" in capsys.readouterr().err
    assert run(["profile", "compare", key, "--catalog", "local", *url]) == 0
    assert "1 estimated" in capsys.readouterr().out


def test_a_scenario_lends_its_own_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store, scenario = tmp_path / "times.csv", tmp_path / "store", tmp_path / "mine.yaml"
    own = {"gpu": "L40S", "gpu_count": 5, "nic_gbit_per_s": 10, "source": "our rack", "as_of": "2026-11-01"}
    model = {"model": "phi-4", "requests_per_s": 1, "slo": {"ttft_s": 1, "tpot_s": 0.1}}
    model["lengths"] = {"mean_input_tokens": 100, "mean_output_tokens": 100}
    document = {
        "name": "mine",
        "description": "d",
        "catalog": "paper-core",
        "regions": ["us-east-2"],
        "models": [model],
    }
    rack = {"rack": {**own, "price_usd_per_h": {"us-east-2": 1.0}}}
    scenario.write_text(json.dumps({**document, "own_configs": rack}), encoding="utf-8")
    file.write_text("phase,tp,requests,tokens,layer_ms\ndecode,1,1,64,9\n", encoding="utf-8")
    asked = ["profile", "import", str(file), "--model", "phi-4", "--engine", "vllm", "--version", "1", "--source", "x"]
    url = ["--store", f"file://{store}"]
    assert run([*asked, "--config", "rack", *url]) == 2
    assert "or a scenario's file" in capsys.readouterr().err
    assert run([*asked, "--config", "rack", "--catalog", str(scenario), *url, "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert key.startswith("profiles/phi-4/rack/")
    assert run(["profile", "compare", key, "--catalog", str(scenario), *url]) == 0
    assert run([*asked, "--config", "racks", "--catalog", str(scenario), *url]) == 2
    assert "did you mean rack" in capsys.readouterr().err
    file.write_text("phase,tp,requests,tokens,layer_ms\ndecode,5,1,64,9\n", encoding="utf-8")
    assert run([*asked, "--config", "rack", "--catalog", str(scenario), "--flag", "-e", *url, "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert run(["profile", "compare", key, "--catalog", str(scenario), *url]) == DataGapError.exit_code
    assert "no all-reduce of 5 x L40S is known" in capsys.readouterr().err


def test_a_comparison_says_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    url = ["--store", f"file://{store}"]
    keys = []
    for flag, rows in (
        ("--a", ["decode,1,1,1000,9", "decode,1,8,1000,10", "decode,1,16,1000,12"]),
        ("--b", ["decode,1,1,1000,9", "decode,1,12,1000,11"]),
        ("--c", ["prefill,1,1,1000,45"]),
    ):
        file.write_text("\n".join(["phase,tp,requests,tokens,layer_ms", *rows]), encoding="utf-8")
        assert imported(file, store, "--flag", flag, "--json") == 0
        keys.append(json.loads(capsys.readouterr().out)["key"])
    assert run(["profile", "compare", keys[0], keys[1], *url, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["sources"] == {"measured": 1, "interpolated": 1, "extrapolated": 1}
    assert run(["profile", "compare", keys[0], keys[2], *url]) == 4
    assert "no decode times" in capsys.readouterr().err
    file.write_text("phase,tp,requests,tokens,layer_ms\ndecode,1,1,1000,9\n", encoding="utf-8")
    asked = ["profile", "import", str(file), "--model", "llama-3.1-8b", "--config", "g6.xlarge", "--engine", "vllm"]
    assert run([*asked, "--version", "1", "--source", "test", *url, "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["key"]
    assert run(["profile", "compare", keys[0], other, *url]) == 2
    assert "layers of llama-3.1-8b say nothing of those of llama-3-70b" in capsys.readouterr().err


def test_fit_needs_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "fit", "--data", str(tmp_path), "--out", str(tmp_path / "none")]) == 2
    assert run(["profile", "fit", "--data", str(tmp_path)]) == 4
    assert "there is no" in capsys.readouterr().err


def test_fit_writes_the_tables(reference_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "fit", "--data", str(reference_data), "--out", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == set(document["tables"])
    assert {row["what"] for row in document["factors"]} >= {"kernel_overhead_s", "H100 mxfp4 peak_frac"}


def test_own_measurements_have_a_ledger_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    file.write_text(CSV, encoding="utf-8")
    assert imported(file, store) == 0
    runs = tmp_path / "runs.csv"
    header = "model,dtype,gpu,tp,input_tokens,output_tokens,concurrency,ttft_s,tpot_s\n"
    rows = "openai/gpt-oss-120b,,h100_sxm,2,1024,1024,16,0.09,0.008\ngpt-oss-120b,,H100,2,1024,1,16,0.09,0\n"
    runs.write_text(f"{header}{rows}", encoding="utf-8")
    capsys.readouterr()
    url = ["--store", f"file://{store}"]
    assert run(["ledger", "--runs", str(runs), "--profiles", *url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {(row["model"], row["gpu"], row["phase"], row["metric"]): row["n"] for row in document["entries"]}
    assert found == {
        ("gpt-oss-120b", "H100", "aggregated", "ttft_s"): 2,
        ("gpt-oss-120b", "H100", "aggregated", "tpot_s"): 1,  # one output token has no time per further one
        ("llama-3-70b", "L4", "prefill", "layer_time_s"): 2,
        ("llama-3-70b", "L4", "decode", "layer_time_s"): 2,
    }
    assert all(row["target_median_frac"] is None for row in document["targets"])
    assert run(["ledger", "--runs", str(runs)]) == 0
    assert "own runs, vllm on H100" in capsys.readouterr().out
    for text, message in (
        (f"{header}gpt-oss-120b,,H100,2.5,1024,1024,16,1,0.008\n", "runs.csv:2: tp is '2.5', must be a whole number"),
        ("a,b\n", "runs.csv:1: columns are a,b"),
        (f"{header}x\n", "runs.csv:2: 1 cells, 9 are due"),
        (f"{header}gpt-oss-120b,,H100,2,1024,1024,16,nan,0.008\n", "runs.csv:2: ttft_s is 'nan'"),
        (
            f"{header}gpt-oss-120b,,H100,2,1024,1024,16,1,1e-320\n",
            "runs.csv:2: tpot_s is '1e-320', must be a number from",
        ),
        (f"{header}nobody,,H100,2,1024,1024,16,1,0.008\n", "runs.csv:2: unknown model 'nobody'"),
        (f"{header}gpt-oss-120b,,H100,3,1024,1024,16,1,0.008\n", "runs.csv:2.tp: gpt-oss-120b cannot be split"),
    ):
        runs.write_text(text, encoding="utf-8")
        assert run(["ledger", "--runs", str(runs)]) == 2
        assert message in capsys.readouterr().err


def test_own_runs_without_a_prediction_are_counted_and_the_others_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs.csv"
    header = "model,dtype,gpu,tp,input_tokens,output_tokens,concurrency,ttft_s,tpot_s\n"
    rows = "deepseek-v3,,H100,1,1024,1024,16,1,0.1\nQwen/Qwen3-32B-FP8,,H100,1,1024,1024,16,0.1,0.02\n"
    runs.write_text(f"{header}{rows}", encoding="utf-8-sig")
    assert run(["ledger", "--runs", str(runs), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["model"] for row in document["entries"]} == {"qwen3-32b"}
    [(reason, count)] = document["left_out"].items()
    assert (count, "deepseek-v3 in fp8 does not fit 1 x H100" in reason) == (1, True)
    assert run(["ledger", "--runs", str(runs)]) == 0
    assert "note: left out, deepseek-v3 in fp8 does not fit 1 x H100" in capsys.readouterr().out
    runs.write_text(f"{header}deepseek-v3,,H100,1,1024,1024,16,nan,0.1\n", encoding="utf-8")
    assert run(["ledger", "--runs", str(runs)]) == 2
    assert "runs.csv:2: ttft_s is 'nan'" in capsys.readouterr().err


def test_what_would_be_of_no_use_or_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    file.write_text(CSV, encoding="utf-8")
    asked = ["profile", "import", str(file), "--model", "llama-3-70b", "--config", "g6.xlarge", "--source", "test"]
    assert run([*asked, "--engine", "vllm", "--version", " ", "--dry-run"]) == 2
    assert "--version: is empty" in capsys.readouterr().err
    assert imported(file, store, "--json") == 0
    key = json.loads(capsys.readouterr().out)["key"]
    url = ["--store", f"file://{store}"]
    assert run(["profile", "show", key, *url, "--chart", str(tmp_path / "none" / "x.svg")]) == 2
    assert "no such folder" in capsys.readouterr().err
    for command in (["profile", "show", key, "--chart"], ["ledger", "--profiles", "--markdown"]):
        assert run([*command, "/dev/full", *url]) == 2  # a disk without room, once the long work is done
        assert "/dev/full: cannot be written: No space left on device" in capsys.readouterr().err
    assert run(["ledger", "--profiles", "--store", f"file://{tmp_path / 'empty'}", "--json"]) == 4
    assert "there is nothing to compare" in capsys.readouterr().err
    assert run(["ledger", "--profiles", "--store", f"file://{store}", "--markdown", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_profiles_of_what_is_not_known_here_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    file.write_text(CSV, encoding="utf-8")
    assert imported(file, store) == 0
    monkeypatch.setattr("tasks.ledger_own.catalog_names", lambda: ("local",))  # as where an own catalogue has gone
    capsys.readouterr()
    assert run(["ledger", "--profiles", "--store", f"file://{store}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["entries"] == []
    assert document["left_out"] == {"profile of llama-3-70b in bf16 on g6.xlarge, which is not known here": 1}


def test_a_damaged_profile_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    file.write_text(CSV, encoding="utf-8")
    assert imported(file, store, "--json") == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert imported(file, store, "--flag", "--enforce-eager") == 0
    path = store / key
    path.write_bytes(path.read_bytes()[:-10])
    capsys.readouterr()
    assert run(["profile", "list", "--store", f"file://{store}", "--json"]) == 6
    out, err = capsys.readouterr()
    assert [row["flags"] for row in json.loads(out)] == [["--enforce-eager"]]
    assert f"{key}: is no profile" in err
    assert "remove it: the one before it then counts" in err
    assert run(["ledger", "--profiles", "--store", f"file://{store}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["n"] for row in document["entries"]} == {2}  # the other profile's points of each phase
    [(reason, count)] = document["left_out"].items()
    assert (count, f"{key}: is no profile" in reason, "remove it" in reason) == (1, True, True)

    def silent(*_: object) -> Profile:
        raise StoreUnreachableError("does not answer", where="the store")

    monkeypatch.setattr("tasks.ledger_own.read_profile", silent)
    assert run(["ledger", "--profiles", "--store", f"file://{store}", "--json"]) == StoreUnreachableError.exit_code


def test_tables_as_other_programs_write_them_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "times.csv", tmp_path / "store"
    text = CSV.replace("prefill", "Prefill").replace("\n", "\r\n")
    file.write_bytes(f"{text}\r\n".encode("utf-8-sig"))
    assert imported(file, store, "--dry-run") == 0
    file.write_text(CSV.replace("cv_frac", "fixed_ms", 1), encoding="utf-8")
    assert imported(file, store, "--dry-run") == 2
    file.write_text("", encoding="utf-8")
    assert imported(file, store, "--dry-run") == 2
    assert "columns are none" in capsys.readouterr().err


def test_the_ledger_is_written_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reference_data: Path
) -> None:
    page, tables = tmp_path / "ledger.html", tmp_path / "ledger.md"
    assert run(["ledger", "--data", str(reference_data), "--report", str(page), "--markdown", str(tables)]) == 0
    shown = capsys.readouterr().out
    assert "Entries, the worst first (predicted against measured)" in shown
    assert "no model is scored with costs fitted to its own runs" in shown
    html, text = page.read_text(encoding="utf-8"), tables.read_text(encoding="utf-8")
    assert "TPOT: median error (predicted against measured)" in html
    assert html.count("<svg") >= 5
    assert "…" not in html  # every bar's name is whole
    assert "| serving, vLLM on H100 and H200 | TPOT | 336 |" in text
    assert run(["ledger", "--data", str(reference_data), "--markdown", str(tmp_path / "none" / "x.md")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_own_ledgers_claim_no_folds() -> None:
    from coral_core.report.ledger_report import ledger_charts, ledger_notes, ledger_page, ledger_tables
    from tasks.ledger import Compared, ledger_document

    one = Compared(
        group="own runs", engine="", model="m", gpu="X", phase="decode", metric="tpot_s", predicted=1.2, measured=1.0
    )
    document = ledger_document([one], {"not known": 2}, 0, held_out=False)
    assert ledger_notes(document)[1:] == ["predicted with the factors that ship", "left out, not known: 2"]
    assert "other people's runs" not in ledger_page(document, time="now")
    assert "the runs and profiles that were given" in ledger_page(document, time="now")
    groups, entries = ledger_tables(document)
    assert groups.rows == [("own runs", "TPOT", 1, "20.0%", "20.0%", "-", "-")]
    assert entries.rows[0][:6] == ("m", "X", "decode", "TPOT", "kernels", 1)
    assert entries.rows[0][-1] == "+20%"
    [chart] = ledger_charts(document)
    assert chart.bars[0].parts["median error"] == pytest.approx(20)
