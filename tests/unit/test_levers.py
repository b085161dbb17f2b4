"""The lever table: what each lever changes and leaves alone, the same nodes for all where supply is scarce, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import tasks.levers
from artifacts.store import open_store
from coral_core.cli.entry import run
from coral_core.config.scenario import Scenario, load_scenario
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, NoSolutionError
from coral_core.report.lever_report import lever_charts, lever_markdown, lever_notes, lever_page, lever_tables
from tasks.executor import InlineExecutor
from tasks.levers import (
    ASSUMED_SPOT,
    SETS,
    Lever,
    LeverRun,
    _supply,
    full_scenario,
    lever_methods,
    lever_table,
    lever_text,
)
from tasks.policy_plans import plan_epochs
from tasks.template_source import fresh_library
from tests.fakes.evaluation_cases import micro, resolved


def scenario_of(folder, *changes) -> Scenario:
    return load_scenario(str(micro(folder, *changes)))


@cache
def store():
    return open_store("memory://levers")


def snapshots_of(scenario):
    return {
        method: fresh_library(full_scenario(scenario, method), store(), InlineExecutor())
        for method in lever_methods(scenario)
    }


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    scenario = scenario_of(tmp_path_factory.mktemp("levers"))
    found = lever_table(scenario, snapshots_of(scenario), LeverRun(rates=(4.0, 30.0), seeds=(0,), simulated_s=2.0))
    return json.loads(json.dumps(found, allow_nan=False))


def row_of(document, name, *, rate=4.0, supply="ample"):
    (row,) = [
        row for row in document["rows"] if (row["name"], row["requests_per_s"], row["supply"]) == (name, rate, supply)
    ]
    return row


def test_every_set_has_a_row_at_each_rate_and_supply(document):
    assert len(document["rows"]) == 2 * 2 * len(SETS)
    assert len({lever_text(levers) for levers in SETS}) == len(SETS)
    assert [row["name"] for row in document["rows"][: len(SETS)]] == [lever_text(levers) for levers in SETS]
    assert not [row for row in document["rows"] if "failed" in row]
    assert all(0 <= row["goodput_frac"] <= 1 + 1e-9 for row in document["rows"])


def test_more_choices_never_cost_more_at_ample_supply(document):
    for rate in (4.0, 30.0):
        cost = {
            frozenset(row["levers"]): row["cost_usd_per_h"]
            for row in document["rows"]
            if row["requests_per_s"] == rate and row["supply"] == "ample"
        }
        gap = 1 + 2e-3
        for less, usd_per_h in cost.items():
            for more, other in cost.items():
                if less <= more:
                    assert other <= usd_per_h * gap, (less, more)


def test_more_choices_never_serve_less_of_scarce_supply_but_where_nodes_move_to_spot(document):
    for rate in (4.0, 30.0):
        missing = {
            frozenset(row["levers"]): row["shortfall_frac"]  # one model: what is not met is minimised alone
            for row in document["rows"]
            if row["requests_per_s"] == rate and row["supply"] == "scarce" and "spot" not in row["levers"]
        }
        assert len(missing) == 8
        for less, frac in missing.items():
            assert all(other <= frac + 1e-6 for more, other in missing.items() if less <= more)


def test_rows_use_only_what_they_may(document):
    for row in document["rows"]:
        for lever, used in (
            (Lever.MIXED, "mixed_instances"),
            (Lever.AGGREGATED, "aggregated_instances"),
            (Lever.VARIANTS, "quantised_instances"),
            (Lever.SPOT, "spot_instances"),
        ):
            if lever not in row["levers"]:
                assert row[used] == 0, (row["name"], used)
    assert row_of(document, "homo_joint + spot", rate=30.0)["spot_instances"] > 0
    assert row_of(document, "homo_joint + variants", rate=30.0)["quantised_instances"] > 0


def test_ratios_are_to_homo_joint_at_the_same_rate_and_supply(document):
    for row in document["rows"]:
        base = row_of(document, "homo_joint", rate=row["requests_per_s"], supply=row["supply"])
        if base["cost_usd_per_h"] > 0:
            assert row["ratio_to_homo_joint"] == pytest.approx(row["cost_usd_per_h"] / base["cost_usd_per_h"])
    assert row_of(document, "homo_joint")["ratio_to_homo_joint"] == 1


def test_all_rows_have_the_same_headroom_and_aggregated_service_the_smaller_of_both_phases(tmp_path):
    scenario = scenario_of(
        tmp_path,
        (
            "{max_utilization_frac: {prefill: 0.6, decode: 0.6}}",
            "{max_utilization_frac: {prefill: 0.6, decode: 0.5}, slo_frac: {prefill: 0.4}}",
        ),
    )
    capacity = full_scenario(scenario, "lattice").scenario.capacity
    assert capacity.max_utilization_frac_of("phi-4", Phase.AGGREGATED) == 0.5
    assert capacity.slo_frac_of("phi-4", Phase.AGGREGATED) == 0.4
    assert capacity.slo_frac_of("phi-4", Phase.DECODE) == 1.0
    stated = scenario_of(
        tmp_path,
        ("{max_utilization_frac: {prefill: 0.6, decode: 0.6}}", "{max_utilization_frac: {aggregated: 0.9}}"),
    )
    assert full_scenario(stated, "lattice").scenario.capacity.max_utilization_frac_of("phi-4", Phase.AGGREGATED) == 0.9


def test_the_library_of_all_rows_holds_every_variant_phase_and_market(tmp_path):
    full = full_scenario(scenario_of(tmp_path), "lattice-free")
    assert full.models[0].variants == ("bf16", "fp8")
    assert full.models[0].phases == tuple(Phase)
    assert full.scenario.library.method == "lattice-free"
    assert full.spot is not None
    assert full.spot.sources == (ASSUMED_SPOT.source,)
    own = full_scenario(scenario_of(tmp_path, ("model: phi-4", "model: phi-4\n    variants: [int4, bf16]")), "lattice")
    assert own.models[0].variants == ("int4", "bf16")
    assert full_scenario(load_scenario("aws-real"), "lattice").scenario.spot.from_catalog
    assert lever_methods(scenario_of(tmp_path, ("rho: 12", "rho: 12, method: ilp"))) == ("ilp", "lattice-free")


def test_scarce_nodes_are_as_many_with_a_spot_market_as_without(tmp_path):
    full = replace(resolved(tmp_path), spot=None)
    with_spot = full_scenario(full.scenario, "lattice")
    nodes = np.array([[5, 4, 1], [0, 3, 2]])
    apart = _supply(with_spot, nodes)[0]
    assert apart.shape == (2, 6)
    at = [[config.name for config in with_spot.configs].index(name) for name in with_spot.spot.configs]
    together = apart[:, :3].copy()
    together[:, at] += apart[:, 3:]
    sold = ~np.isnan(with_spot.spot.price_usd_per_h)
    assert (together == nodes).all()
    assert (apart[:, 3:] == np.where(sold, nodes[:, at] // 2, 0)).all()
    assert (_supply(full, nodes)[0] == nodes).all()


def test_a_row_that_fails_says_why_and_the_others_stay(tmp_path, monkeypatch):
    def failing(source, policy):
        if source.resolved.spot is not None:
            raise NoSolutionError("the solver gave up", where="here")
        return plan_epochs(source, policy)

    monkeypatch.setattr(tasks.levers, "plan_epochs", failing)
    scenario = scenario_of(tmp_path)
    run_of = LeverRun(rates=(4.0,), supplies=("ample",), seeds=(), simulated_s=15.0)
    found = lever_table(scenario, snapshots_of(scenario), run_of)
    failed = [row["name"] for row in found["rows"] if "failed" in row]
    assert failed == [lever_text(levers) for levers in SETS if Lever.SPOT in levers]
    at = [row["name"] for row in found["rows"]].index(failed[0])
    assert lever_tables(found)[0].rows[at][1] is None
    assert lever_charts(found)[0].bars[at].parts == {}
    assert lever_markdown(found).count("| failed |") == len(failed)
    notes = lever_notes(found)
    assert any("the solver gave up" in note for note in notes)
    assert "nothing was simulated" in notes


def test_the_table_is_shown_on_the_terminal_in_markdown_and_as_a_page(document):
    tables = lever_tables(document)
    assert [table.title for table in tables][:2] == [
        "4 requests/s of each model, ample supply",
        "4 requests/s of each model, scarce supply",
    ]
    text = lever_markdown(document)
    assert text.count("| homo_joint |") == 2
    assert "**scarce supply**" in text
    row = row_of(document, "mixed replicas + spot", rate=30.0)
    assert f"{row['cost_usd_per_h']:,.2f}" in text
    assert "simulated" in text
    assert "predicted" in text
    unproven = {**document, "rows": [{**row, "status": "gap", "gap_frac": 0.25}]}
    assert any("mixed replicas + spot, 30 requests/s, ample (25.0%)" in note for note in lever_notes(unproven))
    assert not any("not proven" in note for note in lever_notes({**document, "rows": []}))
    page = lever_page(document, time="2026-05-01")
    assert page.count('<svg class="chart"') == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": (0.0,)}, "--rates"),
        ({"rates": (float("nan"),)}, "--rates"),
        ({"rates": ()}, "--rates"),
        ({"supplies": ()}, "--supply"),
        ({"simulated_s": -1.0}, "--minutes"),
        ({"memory_frac": float("inf")}, "--memory-frac"),
        ({"seeds": (-1,)}, "--seeds"),
    ],
)
def test_settings_without_a_meaning_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        LeverRun(**change)


def test_measured_layer_times_are_refused():
    with pytest.raises(InputError, match="one variant"):
        full_scenario(load_scenario("helix-64"), "lattice")


def test_the_command_prints_json_and_writes_files(tmp_path, capsys):
    path = micro(tmp_path)
    out, page = tmp_path / "table.md", tmp_path / "page.html"
    command = ["evaluate", "levers", str(path), "--rates", "4", "--supply", "ample", "--no-simulate"]
    command += ["--store", "memory://levers-command", "--markdown", str(out), "--report", str(page), "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["scenario"], len(found["rows"])) == ("micro", len(SETS))
    assert "goodput_frac" not in found["rows"][0]
    assert "homo_joint" in out.read_text()
    assert "<svg" in page.read_text()


def test_the_command_prints_tables(tmp_path, capsys):
    command = ["evaluate", "levers", str(micro(tmp_path)), "--rates", "4", "--supply", "scarce", "--no-simulate"]
    assert run([*command, "--store", "memory://levers-tables"]) == 0
    out = capsys.readouterr().out
    assert "4 requests/s of each model, scarce supply" in out
    assert "mixed replicas + all others" in out
    assert run([*command, "--markdown", str(tmp_path / "missing" / "x.md")]) == 2
