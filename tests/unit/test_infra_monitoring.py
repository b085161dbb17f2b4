"""Dashboard and alert rules ask for metrics that exist, with labels that these have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from tasks.fleet_metrics import METRICS

INFRA = Path(__file__).resolve().parents[2] / "infra"
RULES = [
    rule
    for group in yaml.safe_load((INFRA / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((INFRA / "grafana" / "coral.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
LEGENDS = [(target["expr"], target["legendFormat"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\bcoral_\w+", expression))


def labels_of(expression: str) -> set[str]:
    """Labels that every metric of the expression has."""
    return set.intersection(*({"fleet", *METRICS[name][1]} for name in metrics_of(expression)))


@pytest.mark.parametrize("expression", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_query_parses_and_asks_for_what_is_exported(expression):
    promql_parser.parse(expression.replace("$fleet", ".*"))
    names = metrics_of(expression)
    assert names
    assert names <= set(METRICS)
    matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    grouped = {
        label.strip() for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression) for label in group.split(",")
    }
    assert matched | grouped <= set.union(*({"fleet", *METRICS[name][1]} for name in names))


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_every_alert_says_what_is_wrong_and_what_to_do(rule):
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert {"summary", "action"} == set(rule["annotations"])
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    by = re.search(r"\bby \(([^)]*)\)", rule["expr"])
    given = {label.strip() for label in by.group(1).split(",")} if by else labels_of(rule["expr"])
    assert used <= given


def test_alerts_have_names_of_their_own_and_panels_a_place_of_their_own():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert all(panel["description"] for panel in DASHBOARD["panels"])


@pytest.mark.parametrize(("expression", "legend"), LEGENDS)
def test_legends_name_labels_that_are_there(expression, legend):
    by = re.search(r"\bby \(([^)]*)\)", expression)
    given = {label.strip() for label in by.group(1).split(",")} if by else labels_of(expression)
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= given


def test_every_metric_is_shown_or_alerted_on():
    used = set().union(*(metrics_of(text) for text in [*QUERIES, *(rule["expr"] for rule in RULES)]))
    assert set(METRICS) - used == {"coral_run_time_seconds"}


def test_prometheus_reads_the_rules_and_asks_where_the_command_listens():
    config = yaml.safe_load((INFRA / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["alerts.yaml"]
    assert [job["static_configs"][0]["targets"] for job in config["scrape_configs"]] == [["127.0.0.1:9464"]]
