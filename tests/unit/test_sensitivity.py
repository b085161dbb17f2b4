"""The sweep over N_max and rho is what single builds and a plain search over their templates say."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import count
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from artifacts.evaluations import latest_sensitivity, list_evaluations
from artifacts.library import open_library
from artifacts.store import open_store
from coral_core.cli.entry import run
from coral_core.config.resolve import on_demand_prices, resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from coral_core.report.page import Figure
from coral_core.report.sensitivity_report import sensitivity_chart, sensitivity_figure
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario
from tasks.sensitivity import SensitivityPoint, sensitivity

NAMES = count()


def resolved():
    return resolve_scenario(load_scenario("tiny"))


def point(**changes) -> SensitivityPoint:
    values = {
        "model": "m",
        "phase": "prefill",
        "n_max": 6,
        "rho": 12.0,
        "combinations": 20,
        "templates": 10,
        "solve_core_s": 0.5,
        "solve_s": 0.7,
        "best_per_usd": 100.0,
        "best_nodes": "1xL4",
        "best_region": "r",
    }
    return SensitivityPoint(**values | changes)


def test_each_point_is_the_library_of_its_limits():
    scenario = resolved()
    prices = on_demand_prices(scenario)
    names = [config.name for config in scenario.configs]
    points = list(sensitivity(scenario, models=["qwen3-32b", "phi-4"], n_max=[3], rho=[3.0, 12.0]))
    assert [(p.model, p.n_max, p.rho) for p in points] == [
        (model, n_max, rho) for model in ("qwen3-32b", "phi-4") for n_max in (3,) for rho in (3.0, 12.0)
    ]
    for found in points:
        spec = replace(build_spec_from_scenario(scenario), n_max=found.n_max, rho=found.rho)
        spec = replace(spec, models=tuple(m for m in spec.models if m.shape.name == found.model))
        store = open_store(f"memory://sensitivity-{next(NAMES)}")
        manifest = build_library(spec, store, InlineExecutor())
        rows = open_library(store, "tiny").read(phases=[Phase.PREFILL]).to_pylist()
        assert found.templates == len(rows)
        worth = {
            (region, json.dumps([row["node_configs"], row["node_counts"]])): row["throughput_tokens_per_s"]
            / sum(
                prices[r, names.index(config)] * n
                for config, n in zip(row["node_configs"], row["node_counts"], strict=True)
            )
            for row in rows
            for r, region in enumerate(scenario.scenario.regions)
        }
        assert found.best_per_usd == pytest.approx(max(worth.values(), default=None))
        assert found.combinations * 2 == manifest.statistics["combinations"]
        if worth:
            assert found.best_region in {
                key[0] for key, value in worth.items() if np.isclose(value, max(worth.values()))
            }


def test_more_nodes_or_memory_are_never_worth_less():
    points = list(
        sensitivity(resolved(), models=["qwen3-32b"], n_max=[1, 2, 3], rho=[2.0, 4.0, 12.0], phase=Phase.DECODE)
    )
    worth = np.array([p.best_per_usd or 0.0 for p in points]).reshape(3, 3)
    templates = np.array([p.combinations for p in points]).reshape(3, 3)
    for values in (worth, templates):
        assert (np.diff(values, axis=0) >= 0).all()
        assert (np.diff(values, axis=1) >= 0).all()
    assert worth.max() > 0


def test_gpus_that_cannot_be_had_are_in_no_template():
    (found,) = sensitivity(resolved(), models=["gpt-oss-20b"], n_max=[2], rho=[12.0], sold_out=["A10G"])
    (ample,) = sensitivity(resolved(), models=["gpt-oss-20b"], n_max=[2], rho=[12.0])
    assert "A10G" not in found.best_nodes
    assert 0 < found.templates < ample.templates
    (without_best,) = sensitivity(resolved(), models=["gpt-oss-20b"], n_max=[2], rho=[12.0], sold_out=["L40S"])
    assert "L40S" in ample.best_nodes
    assert "L40S" not in without_best.best_nodes
    assert without_best.templates < found.templates


def test_a_limit_that_leaves_nothing_is_a_point_without_a_best():
    (found,) = sensitivity(resolved(), models=["qwen3-32b"], n_max=[1], rho=[0.5])
    assert (found.combinations, found.templates, found.best_per_usd, found.best_nodes) == (0, 0, None, "")


@pytest.mark.parametrize(("models", "phase"), [(["llama-3-70b"], Phase.PREFILL), (["phi-4"], Phase.AGGREGATED)])
def test_what_the_scenario_does_not_serve_is_named(models, phase):
    with pytest.raises(InputError, match="does not serve"):
        next(sensitivity(resolved(), models=models, n_max=[1], rho=[12.0], phase=phase))


def test_the_chart_shows_and_says_where_the_published_setting_stands():
    points = [
        asdict(point(n_max=n_max, rho=rho, best_per_usd=10.0 * n_max, templates=n_max))
        for n_max in (5, 6, 8)
        for rho in (6.0, 12.0)
    ]
    root = ET.fromstring(sensitivity_chart([*points, asdict(point(model="other", n_max=5))]))
    description = root.find("{http://www.w3.org/2000/svg}desc").text
    assert "m prefill: the best template gives 80 per USD/h at N_max 8" in description
    assert "the published setting gives 75.0% of it, from 6 templates" in description
    text = "".join(root.itertext())
    for word in ("rho 12", "N_max (nodes)", "core seconds", "tokens/s per USD/h", "published", "other prefill"):
        assert word in text


def test_a_model_without_any_template_is_said_and_not_drawn():
    nothing = asdict(point(model="huge", templates=0, best_per_usd=None, best_nodes=""))
    text = sensitivity_chart([nothing, asdict(point(n_max=5, phase="aggregated"))])
    assert "huge: no template at any setting." in text
    assert "huge prefill" not in text
    assert "requests/s per USD/h" in text
    assert sensitivity_figure([nothing]) is None
    found = sensitivity_figure([nothing, asdict(point())])
    assert isinstance(found, Figure)
    assert len(found.charts) == 3
    assert "huge: no template at any setting." in found.caption
    with pytest.raises(InputError, match="nothing to draw"):
        sensitivity_chart([nothing])


def test_the_command_prints_a_table_json_and_a_chart_and_records(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chart = tmp_path / "chart.svg"
    arguments = ["evaluate", "sensitivity", "--scenario", "tiny", "--model", "phi-4", "--n-max", "1", "--n-max", "2"]
    assert run([*arguments, "--rho", "12", "--chart", str(chart), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert [(p["model"], p["n_max"], p["rho"]) for p in points] == [("phi-4", 1, 12.0), ("phi-4", 2, 12.0)]
    ET.fromstring(chart.read_text(encoding="utf-8"))
    store = open_store(str(tmp_path / ".coral" / "store"))
    assert latest_sensitivity(store, "tiny") == points
    assert list_evaluations(store, "tiny") == []
    assert "sensitivity.json" in store.get("evaluations/tiny/index.md").decode()
    recorded = store.list_keys("evaluations")
    assert run([*arguments, "--rho", "12", "--dry-run"]) == 0
    assert store.list_keys("evaluations") == recorded
    shown = capsys.readouterr().out
    assert "2xL40S" in shown
    assert "predicted" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such"], "does not serve no-such"),
        (["--model", "phi-4", "--n-max", "0"], "0 nodes cannot hold a model"),
        (["--model", "phi-4", "--rho", "-1"], "rho"),
        (["--model", "phi-4", "--sold-out", "H1000"], "H1000"),
        (
            ["--model", "phi-4", "--sold-out", "L4", "--sold-out", "L40S", "--sold-out", "A10G"],
            "no configuration is left",
        ),
        (["--model", "phi-4", "--chart", "no-such-folder/chart.svg"], "no such folder"),
        (["--model", "phi-4", "--n-max", "1", "--rho", "0.1", "--chart", "chart.svg"], "nothing to draw"),
    ],
)
def test_wrong_limits_are_named(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["evaluate", "sensitivity", "--scenario", "tiny", *arguments]) == 2
    assert message in capsys.readouterr().err
