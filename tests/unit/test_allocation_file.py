from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from coral_core.allocation.ilp import solve_allocation
from coral_core.config.allocation_file import allocation_result_to_json, read_allocation_file
from coral_core.domain.allocation import AllocationOptions
from coral_core.domain.workload import Phase
from coral_core.errors import InputError

GOOD = {
    "regions": {"r0": {"c0": {"available": 4, "price_usd_per_h": 1.2}}, "r1": {}},
    "templates": [
        {"id": "t", "model": "m", "phase": "decode", "nodes": {"c0": 2}, "throughput_tokens_per_s": 100.0},
        {"id": "a", "model": "n", "phase": "aggregated", "nodes": {"c1": 1}, "throughput_requests_per_s": 2},
    ],
    "demand": [
        {"model": "m", "phase": "decode", "tokens_per_s": 1000.0},
        {"model": "n", "phase": "aggregated", "requests_per_s": 4.0},
        {"model": "o", "phase": "prefill", "tokens_per_s": 0},
    ],
    "running": [{"template": "t", "region": "r0", "count": 1}],
    "churn_k": 0.1,
    "options": {"pd_same_region": False, "gap_frac": 1e-6},
}


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "problem.json"

    def to_file(content):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return to_file


def test_the_format_of_the_issue(write):
    (problem,), was_list = read_allocation_file(write(GOOD))
    assert not was_list
    assert problem.configs == ("c0", "c1")
    assert problem.available.tolist() == [[4, 0], [0, 0]]
    assert np.isnan(problem.price_usd_per_h).tolist() == [[False, True], [True, True]]
    assert problem.templates.phases == (Phase.DECODE, Phase.AGGREGATED)
    assert problem.options == AllocationOptions()
    answer = allocation_result_to_json(solve_allocation(problem))
    assert answer == {
        "status": "optimal",
        "cost_usd_per_h": pytest.approx(4.8),
        "churn_usd_per_h": pytest.approx(0.24),
        "objective_usd_per_h": pytest.approx(5.04),
        "bound_usd_per_h": pytest.approx(5.04),
        "gap_frac": 0.0,
        "instances": [{"template": "t", "region": "r0", "count": 2}],
        "shortfall": [
            {"model": "m", "phase": "decode", "tokens_per_s": 800.0, "frac": 0.8},
            {"model": "n", "phase": "aggregated", "requests_per_s": 4.0, "frac": 1.0},
            {"model": "o", "phase": "prefill", "tokens_per_s": 0.0, "frac": 0.0},
        ],
    }
    assert json.loads(json.dumps(answer)) == answer


def test_defaults(write):
    doc = {key: GOOD[key] for key in ("regions", "templates", "demand")}
    (problem,), _ = read_allocation_file(write([doc]))
    assert (problem.running, problem.churn_k, problem.options) == ((), 0.0, AllocationOptions())
    row = problem.demand[0]
    assert (row.weight, row.min_instances, row.max_instances) == (1.0, 0, None)


@pytest.mark.parametrize("doc", [[], [GOOD, GOOD]])
def test_a_list_stays_a_list(write, doc):
    problems, was_list = read_allocation_file(write(doc))
    assert was_list
    assert len(problems) == len(doc)


def test_nothing_at_all_is_a_plan_of_nothing(write):
    (problem,), _ = read_allocation_file(write({"regions": {}, "templates": [], "demand": []}))
    result = solve_allocation(problem)
    assert (result.status, result.objective_usd_per_h, result.instances) == ("optimal", 0.0, ())


def test_a_floor_that_cannot_be_met_is_stated(write):
    doc = copy.deepcopy(GOOD)
    doc["demand"][0]["min_instances"] = 3
    answer = allocation_result_to_json(solve_allocation(read_allocation_file(write(doc))[0][0]))
    assert answer["floor_deficit"] == [{"model": "m", "phase": "decode", "instances": 1}]


BAD = [
    (("regions", "r0", "c0", "available"), -1, "regions.r0.c0.available"),
    (("regions", "r0", "c0", "available"), 1.5, "regions.r0.c0.available"),
    (("regions", "r0", "c0", "available"), True, "regions.r0.c0.available"),
    (("regions", "r0", "c0", "available"), "4", "regions.r0.c0.available"),
    (("regions", "r0", "c0", "available"), 10**30, "regions.r0.c0.available"),
    (("regions", "r0", "c0", "price_usd_per_h"), -0.5, "regions.r0.c0.price_usd_per_h"),
    (("regions", "r0", "c0", "price_usd_per_h"), None, "regions.r0.c0.price_usd_per_h"),
    (("regions", "r0", "c0", "spot"), 1, "regions.r0.c0.spot"),
    (("regions", "r0", ""), {"available": 1, "price_usd_per_h": 1}, "regions.r0"),
    (("templates", 0, "throughput_tokens_per_s"), -1, "templates[0].throughput_tokens_per_s"),
    (("templates", 0, "throughput_tokens_per_s"), None, "templates[0].throughput_tokens_per_s"),
    (("templates", 0, "throughput_requests_per_s"), 1, "templates[0].throughput_requests_per_s"),
    (("templates", 1, "throughput_tokens_per_s"), 1, "templates[1].throughput_tokens_per_s"),
    (("templates", 0, "nodes"), {}, "templates[0].nodes"),
    (("templates", 0, "nodes"), {"c0": 0}, "templates[0].nodes"),
    (("templates", 0, "nodes"), {"c0": 1.0}, "templates[0].nodes.c0"),
    (("templates", 0, "phase"), "both", "templates[0].phase"),
    (("templates", 1, "id"), "t", "templates[1]"),
    (("templates", 0, "id"), "", "templates[0].id"),
    (("templates", 1, "model"), "m", "demand[0]"),
    (("demand", 0, "tokens_per_s"), -3, "demand[0].tokens_per_s"),
    (("demand", 0, "tokens_per_s"), None, "demand[0]"),
    (("demand", 1, "requests_per_s"), None, "demand[1]"),
    (("demand", 1, "tokens_per_s"), 5, "demand[1].tokens_per_s"),
    (("demand", 0, "requests_per_s"), 0, "demand[0].requests_per_s"),
    (("demand", 0, "tokens_per_s"), 5e-324, "demand[0].tokens_per_s: 5e-324 is below"),
    (("regions",), {}, "regions: no region to rent nodes in"),
    (("preferences",), [{"config": "c0", "price_factor": 1e15}] * 30, "preferences: together they make the price of 'c0'"),
    (("demand", 0, "weight"), -1, "demand[0].weight"),
    (("demand", 0, "min_instances"), -1, "demand[0].min_instances"),
    (("demand", 0, "max_instances"), False, "demand[0].max_instances"),
    (("demand", 2), {"model": "m", "phase": "decode", "tokens_per_s": 1}, "demand[2]"),
    (("demand", 2), {"model": "m", "phase": "aggregated", "requests_per_s": 1}, "demand[2]"),
    (("demand", 2), {"model": "q", "phase": "decode", "tokens_per_s": 1, "min_instances": 2, "max_instances": 1}, "demand[2].max"),
    (("running", 0, "region"), "r9", "running[0].region"),
    (("running", 0, "count"), -1, "running[0].count"),
    (("churn_k",), -0.1, "churn_k"),
    (("options", "gap_frac"), 1, "options.gap_frac"),
    (("options", "time_limit_s"), 0, "options.time_limit_s"),
    (("options", "solver"), "cplex", "options.solver"),
    (("options", "fast"), True, "options.fast"),
    (("options", "pd_same_region"), 1, "options.pd_same_region"),
    (("extra",), 1, "extra"),
    (("demand",), None, "demand"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "place"), BAD, ids=[f"{'.'.join(map(str, p))}={v!r:.40}" for p, v, _ in BAD])
def test_bad_values_name_their_place(write, path, value, place):
    doc = copy.deepcopy(GOOD)
    node = doc
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    file = write([GOOD, doc])
    with pytest.raises(InputError) as caught:
        read_allocation_file(file)
    text = str(caught.value)
    assert f"{file}[1]: {place}" in text
    assert "\n" not in text
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match=f": {place.replace('[', '.').replace(']', '.')}"):
        read_allocation_file(write(doc))


def test_running_twice_is_refused(write):
    doc = copy.deepcopy(GOOD)
    doc["running"] *= 2
    with pytest.raises(InputError, match=r"running\[1\].*twice"):
        read_allocation_file(write(doc))


def test_a_running_template_that_is_gone_is_legal(write):
    doc = copy.deepcopy(GOOD)
    doc["running"] = [{"template": "gone", "region": "r0", "count": 3}]
    result = solve_allocation(read_allocation_file(write(doc))[0][0])
    assert result.cost_usd_per_h == pytest.approx(4.8)


TEXT = json.dumps(GOOD)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ":1:1: not JSON"),
        ('{"regions": {},\n "templates": [}', ":2:16: not JSON"),
        ("[1]", "[0]: a problem must be a JSON object"),
        ("3", "a problem must be a JSON object"),
        (TEXT.replace("1.2", "NaN"), "NaN is not a number"),
        (TEXT.replace("1.2", "-Infinity"), "-Infinity is not a number"),
        (TEXT.replace("1.2", "1e999"), "regions.r0.c0.price_usd_per_h: input should be a finite number"),
        (TEXT.replace('"available": 4', '"available": 4, "available": 5'), ": regions.r0.c0.available: the key appears"),
        (f'[{TEXT.replace(chr(34) + "id" + chr(34), chr(34) + "id" + chr(34) + ": 1, " + chr(34) + "id" + chr(34))}]', ": [0].templates[0].id: the key appears"),
        (TEXT.replace('"available": 4', '"available": ' + "9" * 5000), "not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_not_json_is_refused(write, text, expected):
    with pytest.raises(InputError) as caught:
        read_allocation_file(write(text))
    assert expected in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_allocation_file(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_allocation_file(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InputError, match="not UTF-8"):
        read_allocation_file(binary)
