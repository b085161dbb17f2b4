"""`coral placement solve` and `coral allocation solve`: the fixed formats, through the real command."""

from __future__ import annotations

import io
import json
import sys

import pytest

from coral_core.cli.entry import run

PLACEMENT = {
    "layers": 4,
    "nodes": ["a", "b"],
    "capacity_tokens_per_s": {
        "1": {"a": [10, 8, 6, 0], "b": [5, 4, 3, 2]},
        "2": {"a": [9, 7, 5, 0], "b": [4, 3, 2, 1]},
    },
}
ALLOCATION = {
    "regions": {"r0": {"c0": {"available": 4, "price_usd_per_h": 1.2}}},
    "templates": [{"id": "t", "model": "m", "phase": "decode", "nodes": {"c0": 2}, "throughput_tokens_per_s": 100.0}],
    "demand": [{"model": "m", "phase": "decode", "tokens_per_s": 150.0}],
}


@pytest.fixture
def solve(tmp_path, capsys):
    def call(command, document, *options):
        path = tmp_path / "problem.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        code = run([command, "solve", str(path), *options])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("method", ["lattice", "ilp"])
def test_placement_by_either_method(solve, method):
    code, out, _ = solve("placement", PLACEMENT, "--method", method, "--json")
    answer = json.loads(out)
    assert code == 0
    # One stage of both: 4 layers at 0 + 2; two stages: a holds 3 at 5, b holds 1 at 4.
    assert answer["throughput_tokens_per_s"] == pytest.approx(4)
    assert sorted((stage["layers"], *stage["nodes"]) for stage in answer["stages"]) == [(1, "b"), (3, "a")]
    assert answer["status"] == "optimal"
    assert answer["method"] == method


def test_a_list_is_answered_in_order(solve):
    hopeless = {**PLACEMENT, "capacity_tokens_per_s": {s: {"a": [0] * 4, "b": [0] * 4} for s in ("1", "2")}}
    code, out, _ = solve("placement", [hopeless, PLACEMENT], "--json")
    answers = json.loads(out)
    assert code == 0
    assert [answer["status"] for answer in answers] == ["infeasible", "optimal"]
    assert answers[0]["throughput_tokens_per_s"] == 0


def test_placement_table_for_people(solve):
    code, out, _ = solve("placement", PLACEMENT)
    assert code == 0
    assert "optimal" in out


def test_placement_faults_name_item_and_place(solve):
    rising = json.loads(json.dumps(PLACEMENT))
    rising["capacity_tokens_per_s"]["2"]["b"] = [1, 2, 3, 4]
    code, out, err = solve("placement", [PLACEMENT, rising], "--json")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "[1]" in err
    assert "b" in err
    assert "layer" in err


def test_allocation_answer_has_the_fixed_keys(solve):
    code, out, _ = solve("allocation", ALLOCATION, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["status"] == "optimal"
    assert answer["cost_usd_per_h"] == pytest.approx(4.8)
    assert answer["instances"] == [{"template": "t", "region": "r0", "count": 2}]
    assert answer["shortfall"] == [{"model": "m", "phase": "decode", "tokens_per_s": 0.0, "frac": 0.0}]
    assert {"churn_usd_per_h", "objective_usd_per_h", "bound_usd_per_h", "gap_frac"} <= set(answer)


def test_shortfall_is_stated_and_fails_only_on_request(solve):
    scarce = {**ALLOCATION, "demand": [{"model": "m", "phase": "decode", "tokens_per_s": 400.0}]}
    code, out, _ = solve("allocation", scarce, "--json")
    assert code == 0
    assert json.loads(out)["shortfall"][0]["frac"] == pytest.approx(0.5)
    code, out, err = solve("allocation", scarce, "--json", "--require-full")
    assert code == 3
    assert json.loads(out)
    assert "not fully met" in err
    code, _, err = solve("allocation", scarce)
    assert code == 0
    assert "50.00%" in err


@pytest.mark.parametrize("text", ["", "[", "{}", "null", "NaN", '{"regions": {}, "regions": {}}'])
@pytest.mark.parametrize("command", ["placement", "allocation"])
def test_malformed_files_are_one_line_and_exit_code_2(solve, command, text):
    code, out, err = solve(command, text, "--json")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("command", "document"), [("placement", PLACEMENT), ("allocation", ALLOCATION)])
def test_a_dash_reads_standard_input(monkeypatch, capsys, command, document):
    def answer(*arguments, data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = run([command, "solve", *arguments])
        return code, *capsys.readouterr()

    code, out, _ = answer("-", "--json", data=json.dumps([document]).encode())
    assert code == 0
    assert [item["status"] for item in json.loads(out)] == ["optimal"]
    code, out, err = answer("--json", "-", data=b"[{}]")
    assert (code, out) == (2, "")
    assert err.startswith("coral: standard input[0]: ")
    code, out, err = answer("-", data=b"\xff")
    assert (code, out) == (2, "")
    assert "not UTF-8" in err


@pytest.mark.parametrize("command", ["placement", "allocation"])
def test_a_misspelt_option_is_not_taken_for_a_file(capsys, command):
    assert run([command, "solve", "--jsn"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert '"--jsn"' in err
    assert "unknown option" in err


def test_an_unproven_placement_is_answered_with_exit_code_3(solve, monkeypatch):
    from coral_core.placement.ilp import IlpPlacement

    monkeypatch.setattr(
        "coral_core.placement.methods.placement_method",
        lambda name, **_: IlpPlacement(preference="highs", time_limit_s=1e-6),
    )
    nodes = [f"n{i}" for i in range(4)]
    rows = {name: [100.0 / (1 + (3 * i + j) % 7 * 0.01 + j) for j in range(12)] for i, name in enumerate(nodes)}
    rows = {name: sorted(row, reverse=True) for name, row in rows.items()}
    problem = {"layers": 12, "nodes": nodes, "capacity_tokens_per_s": {str(s): rows for s in range(1, 5)}}
    code, out, err = solve("placement", problem, "--method", "ilp", "--json")
    assert json.loads(out)["status"] == "unproven"
    assert code == 3
    assert "not proven" in err
