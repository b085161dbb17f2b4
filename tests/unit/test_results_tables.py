"""Changed assumptions are planned one at a time, the plain greedy baseline is its formula, and results become Markdown."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from artifacts.store import open_store
from coral_core.cli.entry import run
from coral_core.config.policies import scenario_policies
from coral_core.config.resolve import allocation_problem
from coral_core.config.scenario import load_scenario
from coral_core.domain.allocation import TemplateColumns
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.report.results_tables import assumptions_table, published_markdown, results_markdown
from tasks.assumptions import ASSUMPTIONS, POLICIES, ROUNDED, ROUNDED_SINGLE, AssumptionRun, assumption_rows
from tasks.assumptions import rounded_up_usd_per_h as rounded_up
from tasks.evaluate import evaluate
from tasks.executor import InlineExecutor
from tasks.template_source import fresh_library
from tests.fakes.evaluation_cases import micro, resolved, source_of

FAST = ("coral", "coral_paper", "homo_joint", "homo")


@cache
def store():
    return open_store("memory://assumptions")


def snapshot(scenario):
    return fresh_library(scenario, store(), InlineExecutor())


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    scenario = load_scenario(str(micro(tmp_path_factory.mktemp("assumptions"))))
    found = list(assumption_rows(scenario, snapshot, AssumptionRun(policies=FAST)))
    return {row["assumption"]: row for row in json.loads(json.dumps(found, allow_nan=False))}


def cost(rows, name, policy="coral"):
    return rows[name]["cost_usd_per_h"][policy]


def test_each_change_has_a_row_and_moves_costs_the_way_it_must(rows):
    assert list(rows) == list(ASSUMPTIONS)
    assert not [row for row in rows.values() if "failed" in row]
    gap = 1 + 2e-3
    stated = cost(rows, "as stated")
    for cheaper in ("no headroom", "prefill and decode in any region", "rates x 0.25", "bounds x 2"):
        assert cost(rows, cheaper) <= stated * gap, cheaper
    for dearer in ("equal split for all", "first region only", "rates x 4", "rates x 16", "n_max 1"):
        assert cost(rows, dearer) >= stated / gap, dearer
    assert cost(rows, "no headroom, rates x 0.25") <= cost(rows, "no headroom") * gap
    assert cost(rows, "no headroom, bounds x 0.5") >= cost(rows, "no headroom") / gap
    assert cost(rows, "rates x 16") > cost(rows, "rates x 4") > stated


def test_costs_beside_coral_are_ratios_and_no_policy_beats_the_bound_of_its_templates(rows):
    for row in rows.values():
        costs = row["cost_usd_per_h"]
        if costs["coral"] is None:
            continue
        for name, usd_per_h in costs.items():
            if usd_per_h is not None:
                assert row["ratios"][name] == pytest.approx(usd_per_h / costs["coral"])
        assert costs["homo_joint"] <= costs["homo"] * (1 + 2e-3)


def test_the_plain_greedy_baseline_is_its_formula(tmp_path):
    found = problem_of(tmp_path)
    # T/p: 100/1, 250/2, 330/3 for decode: the second is best, and 1,000 tokens/s take four of it
    assert rounded_up(found) == pytest.approx((1 + found.churn_k) * (4 * 2.0 + 2 * 1.0))
    # of single nodes the first: ten of it
    assert rounded_up(found, single=True) == pytest.approx((1 + found.churn_k) * (10 * 1.0 + 2 * 1.0))
    no_prefill = replace(found, templates=columns(prefill=False))
    assert rounded_up(no_prefill) is None
    asked = tuple(replace(row, tokens_per_s=0.0) if row.phase is Phase.PREFILL else row for row in found.demand)
    assert rounded_up(replace(no_prefill, demand=asked)) == pytest.approx((1 + found.churn_k) * 8.0)


def columns(*, prefill=True):
    rows = [("d1", Phase.DECODE, 1, 100.0), ("d2", Phase.DECODE, 2, 250.0), ("d3", Phase.DECODE, 3, 330.0)]
    rows += [("p1", Phase.PREFILL, 1, 100.0)] if prefill else []
    nodes = np.zeros((len(rows), 3), dtype=np.int64)
    nodes[:, 0] = [count for _, _, count, _ in rows]
    return TemplateColumns(
        ids=tuple(row[0] for row in rows),
        models=("phi-4",) * len(rows),
        phases=tuple(row[1] for row in rows),
        nodes=nodes,
        throughput=np.array([row[3] for row in rows]),
    )


def problem_of(folder):
    problem = allocation_problem(resolved(folder), columns())
    price = np.array([[1.5, math.nan, 1.0], [1.0, 2.0, math.nan]])  # what a template has no node of need not be sold
    wanted = {Phase.DECODE: 1000.0, Phase.PREFILL: 200.0}
    demand = tuple(replace(row, tokens_per_s=wanted[row.phase]) for row in problem.demand)
    return replace(problem, price_usd_per_h=price, demand=demand)


def test_what_cannot_be_changed_is_refused_or_said(tmp_path):
    scarce = load_scenario("paper-core-scarce")
    with pytest.raises(InputError, match="random_walk"):
        list(assumption_rows(scarce, snapshot, AssumptionRun()))
    with pytest.raises(InputError, match="n_max 1"):
        AssumptionRun(names=("n_max 11",))
    with pytest.raises(InputError, match="homo"):
        AssumptionRun(policies=("homoo",))
    (row,) = assumption_rows(
        load_scenario(str(micro(tmp_path, ("ttft_s: 1.2, tpot_s: 0.25", "ttft_s: 0.00001, tpot_s: 0.25")))),
        snapshot,
        AssumptionRun(names=("as stated",), policies=("coral",)),
    )
    assert row.get("failed") or row["cost_usd_per_h"]["coral"] is None
    trace = load_scenario(str(micro(tmp_path)))
    models = (trace.models[0].model_copy(update={"requests_per_s": None}),)
    (row,) = assumption_rows(trace.model_copy(update={"models": models}), snapshot, AssumptionRun(names=("rates x 4",)))
    assert "rate of a trace" in row["failed"]


def test_tables_say_what_the_documents_say(rows, tmp_path):
    document = {
        "kind": "assumptions",
        "scenario": "micro",
        "rows": [*rows.values(), {"assumption": "x", "failed": "why"}],
    }
    names, cells = assumptions_table(document)
    assert ROUNDED in " ".join(names)
    assert ROUNDED_SINGLE in " ".join(names)
    assert cells[0][:2] == ("as stated", f"{cost(rows, 'as stated'):,.2f}")
    assert cells[-1][1] == "failed"
    scenario = resolved(tmp_path)
    found = evaluate(source_of(scenario), scenario_policies(scenario, ["coral", "homo"]), [0]).document
    published = {**found["ratios"]["coral"]["homo"], "published": {"cost_ratio": 1.62, "goodput_ratio": None}}
    shown = {**found, "ratios": {"coral": {"homo": published}}, "failed": {"cauchy": "no"}}
    text = results_markdown([shown, document])
    assert "- x: why" in text
    line = next(line for line in text.splitlines() if line.startswith("| micro | homo |"))
    assert "| 1.62 |" in line
    assert f"| {published['cost_ratio']:.2f} |" in line
    assert "| micro | cauchy | failed |" in published_markdown([shown])
    with pytest.raises(InputError, match="no result"):
        results_markdown([{"kind": "else"}])


def test_the_commands_print_json_tables_and_markdown(tmp_path, capsys):
    path, out = micro(tmp_path), tmp_path / "out.json"
    command = ["evaluate", "assumptions", str(path), "--only", "as stated", "--policies", "homo_joint"]
    assert run([*command, "--store", "memory://assumptions-command", "--json"]) == 0
    out.write_text(capsys.readouterr().out)
    assert run(["evaluate", "tables", str(out)]) == 0
    assert "| as stated |" in capsys.readouterr().out
    assert run([*command, "--store", "memory://assumptions-table"]) == 0
    assert "one assumption changed" in capsys.readouterr().out
    assert run(["evaluate", "assumptions", str(path), "--only", "nothing"]) == 2
    assert run(["evaluate", "tables"]) == 2
    assert run(["evaluate", "tables", str(tmp_path / "missing.json")]) == 2
    out.write_text("[]")
    assert run(["evaluate", "tables", str(out)]) == 2
    assert set(FAST) < set(POLICIES)
