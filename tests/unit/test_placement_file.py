import json

import numpy as np
import pytest

from coral_core.config.placement_file import placement_result_to_json, read_placement_file
from coral_core.domain.placement import PlacementResult, PlacementStatus
from coral_core.errors import InputError
from coral_core.placement.lattice import LatticePlacement

GOOD = {
    "layers": 3,
    "nodes": ["a", "b"],
    "capacity_tokens_per_s": {
        "1": {"a": [3, 2, 1], "b": [5.5, 4, 0]},
        "2": {"a": [2, 2, 2], "b": [9, 8, 7]},
    },
}


def written(tmp_path, document):
    path = tmp_path / "in.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def changed(**changes):
    return {**json.loads(json.dumps(GOOD)), **changes}


def with_row(row, *, key="2", name="b"):
    document = changed()
    document["capacity_tokens_per_s"][key][name] = row
    return document


def refused(tmp_path, document):
    path = written(tmp_path, document)
    with pytest.raises(InputError) as caught:
        read_placement_file(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert caught.value.exit_code == 2
    return text.removeprefix(str(path))


def test_one_problem(tmp_path):
    problems, was_list = read_placement_file(written(tmp_path, GOOD))
    assert not was_list
    assert problems[0].layers == 3
    assert problems[0].nodes == ("a", "b")
    np.testing.assert_array_equal(problems[0].capacity_tokens_per_s[1]["b"], [5.5, 4, 0])


def test_a_list_and_an_empty_list(tmp_path):
    problems, was_list = read_placement_file(written(tmp_path, [GOOD, GOOD]))
    assert was_list
    assert len(problems) == 2
    assert read_placement_file(written(tmp_path, [])) == ([], True)


def test_more_stages_than_layers_are_due_but_never_used(tmp_path):
    document = {"layers": 1, "nodes": ["a", "a"], "capacity_tokens_per_s": {"1": {"a": [2]}, "2": {"a": [9]}}}
    (problem,), _ = read_placement_file(written(tmp_path, document))
    assert LatticePlacement().solve(problem).throughput_tokens_per_s == 4


def test_a_table_may_know_more_types_than_the_nodes_use(tmp_path):
    (problem,), _ = read_placement_file(written(tmp_path, with_row([1, 1, 0], name="spare")))
    assert LatticePlacement().solve(problem).status is PlacementStatus.OPTIMAL


@pytest.mark.parametrize(
    ("document", "place", "what"),
    [
        (with_row([1, 2, 0]), "capacity_tokens_per_s.2.b[1]", "'b' increases from 1.0 at layer 1 to 2.0 at layer 2"),
        (with_row([1, 0, 0.5], name="spare"), "capacity_tokens_per_s.2.spare[2]", "increases"),
        (with_row([1, 0]), "capacity_tokens_per_s.2.b", "2 numbers instead of 3"),
        (with_row([]), "capacity_tokens_per_s.2.b", "0 numbers instead of 3"),
        (with_row([1, -1, -1]), "capacity_tokens_per_s.2.b[1]", "greater than or equal to 0"),
        (with_row([1, "0", 0]), "capacity_tokens_per_s.2.b[1]", "number"),
        (with_row([1, True, 0]), "capacity_tokens_per_s.2.b[1]", "number"),
        (with_row([1, None, 0]), "capacity_tokens_per_s.2.b[1]", "number"),
        (with_row([10**400, 1, 0]), "capacity_tokens_per_s.2.b[0]", ""),
        (with_row([1e16, 1, 0]), "capacity_tokens_per_s.2.b[0]", "less than or equal to"),
        (with_row({"1": 2}), "capacity_tokens_per_s.2.b", "list"),
        (changed(layers=0), "layers", "greater than or equal to 1"),
        (changed(layers=-3), "layers", "greater than or equal to 1"),
        (changed(layers=3.0), "layers", "integer"),
        (changed(layers=True), "layers", "integer"),
        (changed(layers="3"), "layers", "integer"),
        (changed(layers=10**30), "layers", "less than or equal to"),
        (changed(layers=4), "capacity_tokens_per_s.1.a", "3 numbers instead of 4"),
        (changed(nodes=[]), "nodes", "at least 1"),
        (changed(nodes="ab"), "nodes", "list"),
        (changed(nodes=["a", ""]), "nodes[1]", "at least 1 character"),
        (changed(nodes=["a", 7]), "nodes[1]", "string"),
        (changed(nodes=["a", "x"]), "capacity_tokens_per_s.1", "node 'x' (nodes[1]) has no capacity"),
        (changed(nodes=["a"]), "capacity_tokens_per_s", "'2' is not a number of stages from 1 to 1"),
        (changed(nodes=["a", "b", "b"]), "capacity_tokens_per_s", "the table for 3 stages is missing"),
        (changed(capacity_tokens_per_s={}), "capacity_tokens_per_s", "the table for 1 stages is missing"),
        (changed(extra=1), "extra", "not permitted"),
        ({"layers": 3, "nodes": ["a"]}, "capacity_tokens_per_s", "required"),
        (7, "", "must be a JSON object"),
        ("null", "", "must be a JSON object"),
    ],
)
def test_what_is_wrong_and_where_in_one_problem_and_in_a_list(tmp_path, document, place, what):
    if document != "null":
        in_list = refused(tmp_path, [GOOD, document])
        assert in_list.startswith(f"[1]: {place}".rstrip(": "))
    text = refused(tmp_path, document)
    assert text.startswith(f": {place}".rstrip(": "))
    assert what in text


@pytest.mark.parametrize("key", ["0", "01", "two", "1.0", "-1", ""])
def test_an_unknown_number_of_stages_is_named(tmp_path, key):
    document = changed()
    document["capacity_tokens_per_s"][key] = document["capacity_tokens_per_s"]["1"]
    assert repr(key) in refused(tmp_path, document)


def test_a_near_miss_of_a_node_name_gets_a_suggestion(tmp_path):
    document = json.loads(json.dumps(GOOD).replace('"a"', '"1xL40S"').replace('["1xL40S", "b"]', '["1xL4OS", "b"]'))
    assert "did you mean 1xL40S?" in refused(tmp_path, document)


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ('{"layers": 3,\n "nodes": [}', ":2:12", "not JSON"),
        ("", ":1:1", "not JSON"),
        (json.dumps(GOOD).replace("5.5", "NaN"), "", "NaN"),
        (json.dumps(GOOD).replace("5.5", "Infinity"), "", "Infinity"),
        (json.dumps(GOOD).replace("5.5", "-Infinity"), "", "-Infinity"),
        (json.dumps(GOOD).replace("5.5", "1e999"), "", "capacity_tokens_per_s.1.b[0]"),
        (json.dumps(GOOD).replace("5.5", "9" * 5000), "", ""),
        (json.dumps(GOOD).replace('"layers": 3', '"layers": 3, "layers": 3'), ": layers", "twice"),
        (json.dumps(GOOD).replace('{"a"', '{"b": [1, 1, 1], "a"'), ": capacity_tokens_per_s.1.b", "twice"),
        (json.dumps(GOOD)[:-10], ":1:", "not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused(tmp_path, text, place, what):
    message = refused(tmp_path, text)
    assert message.startswith(place)
    assert what in message


def test_a_missing_file_and_one_that_is_not_text(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_placement_file(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read_placement_file(tmp_path / "bytes.json")


def test_the_answer_in_the_published_form(tmp_path):
    (problem,), _ = read_placement_file(written(tmp_path, GOOD))
    answer = placement_result_to_json(LatticePlacement().solve(problem))
    # Two stages: a holds 1 or 2 layers at 2 tokens/s, b more.
    assert answer == {
        "status": "optimal",
        "throughput_tokens_per_s": 2.0,
        "stages": answer["stages"],
        "method": "lattice",
    }
    assert sum(stage["layers"] for stage in answer["stages"]) == 3
    assert sorted(node for stage in answer["stages"] for node in stage["nodes"]) == ["a", "b"]
    assert json.loads(json.dumps(answer)) == answer


def test_an_infeasible_answer_has_no_stages():
    result = PlacementResult(
        status=PlacementStatus.INFEASIBLE, throughput_tokens_per_s=0.0, placement=None, method="ilp"
    )
    assert placement_result_to_json(result) == {
        "status": "infeasible",
        "throughput_tokens_per_s": 0.0,
        "stages": [],
        "method": "ilp",
    }
