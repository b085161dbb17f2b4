"""Laws of what is stored: round trips, exactness, and the algebra of differences."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.canonical import canonical_json
from artifacts.diff import LibraryDiff, diff_templates
from artifacts.keys import parse_time, slo_text, time_text
from artifacts.templates import row_to_template, template_rows, template_table
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage, template_id
from coral_core.domain.workload import Phase, Slo
from tests.fakes.artifact_cases import capacity_table, placements

positive = st.floats(min_value=1e-9, max_value=1e9, allow_nan=False)
names = st.text("abcXYZ019.-_é", min_size=1, max_size=8)
slos = st.builds(Slo, ttft_s=positive, tpot_s=positive)


@st.composite
def templates(draw) -> ServingTemplate:
    phase = draw(st.sampled_from(Phase))
    stage = st.builds(
        Stage,
        layers=st.integers(1, 200),
        nodes=st.lists(names, min_size=1, max_size=4).map(tuple),
    )
    placement = Placement(stages=tuple(draw(st.lists(stage, min_size=1, max_size=5))))
    identity = {"model": draw(names), "variant": draw(names), "phase": phase, "slo": draw(slos), "placement": placement}
    throughput = draw(positive)
    is_aggregated = phase is Phase.AGGREGATED
    return ServingTemplate(
        template_id=template_id(**identity),
        **identity,
        throughput_tokens_per_s=None if is_aggregated else throughput,
        throughput_requests_per_s=throughput if is_aggregated else None,
        method=draw(names),
        source=draw(st.sampled_from(CapacitySource)),
        error_frac=draw(st.none() | st.floats(0, 1)),
    )


@given(st.lists(templates(), max_size=4))
def test_templates_survive_rows_and_rows_survive_templates(given_templates):
    table = template_rows(given_templates)
    table.validate(full=True)
    again = [row_to_template(row) for row in table.to_pylist()]
    assert again == given_templates
    assert template_rows(again).equals(table)


@given(st.integers(0, 10**6), slos, st.sampled_from(Phase), st.integers(1, 12), st.integers(1, 4))
def test_ids_of_bulk_rows_are_those_of_the_domain(seed, slo, phase, layers, max_stages):
    capacity = capacity_table(phase=phase, slo=slo, layers=layers, max_stages=max_stages)
    for row in template_table(capacity, placements(capacity, 12, seed=seed)).to_pylist():
        template = row_to_template(row)
        assert template.slo == slo
        assert template.placement.layers == layers
        assert template.template_id == template_id(
            model="m", variant="bf16", phase=phase, slo=slo, placement=template.placement
        )


# A template's id says its model and phase, hence they are functions of it here too.
PHASES = [phase.value for phase in Phase]
versions = st.dictionaries(st.integers(0, 12), st.sampled_from([1.0, 1.5, 2.0, 1e-3, 1e6]), max_size=10)


def table_of(version: dict[int, float]) -> pa.Table:
    phases = [PHASES[i % 3] for i in version]
    values = list(version.values())
    by_unit = [
        [v if (p == "aggregated") == wanted else None for v, p in zip(values, phases, strict=True)] for wanted in (0, 1)
    ]
    return pa.table(
        {
            "template_id": pa.array([f"t{i}" for i in version], pa.string()),
            "model": pa.array([f"m{i % 2}" for i in version], pa.string()),
            "phase": pa.array(phases, pa.string()),
            "throughput_tokens_per_s": pa.array(by_unit[0], pa.float64()),
            "throughput_requests_per_s": pa.array(by_unit[1], pa.float64()),
        }
    )


def ids(table: pa.Table) -> set[str]:
    found = table["template_id"].to_pylist()
    assert len(found) == len(set(found))
    return set(found)


def parts(diff: LibraryDiff) -> tuple[set[str], set[str], set[str], set[str]]:
    return ids(diff.added), ids(diff.removed), ids(diff.changed), ids(diff.unchanged)


@given(versions)
def test_nothing_differs_from_itself(version):
    diff = diff_templates(table_of(version), table_of(version))
    assert diff.is_empty
    assert diff.to_arrow().num_rows == 0
    assert ids(diff.unchanged) == {f"t{i}" for i in version}
    assert sum(row.unchanged for row in diff.summary()) == len(version)
    assert all(row.ratio_median is None and row.added == row.removed == row.changed == 0 for row in diff.summary())


@given(versions, versions)
def test_a_difference_is_what_sets_say_and_turns_around(a, b):
    there, back = diff_templates(table_of(a), table_of(b)), diff_templates(table_of(b), table_of(a))
    added, removed, changed, unchanged = parts(there)
    assert added == {f"t{i}" for i in b.keys() - a.keys()}
    assert removed == {f"t{i}" for i in a.keys() - b.keys()}
    assert changed == {f"t{i}" for i in a.keys() & b.keys() if a[i] != b[i]}
    assert unchanged == {f"t{i}" for i in a.keys() & b.keys() if a[i] == b[i]}
    assert parts(back) == (removed, added, changed, unchanged)
    assert there.to_arrow().num_rows == len(added) + len(removed) + len(changed)
    for forth, returned in zip(there.summary(), back.summary(), strict=True):
        assert (forth.model, forth.phase) == (returned.model, returned.phase)
        assert (forth.added, forth.removed) == (returned.removed, returned.added)
        if forth.changed:
            assert forth.ratio_min == pytest.approx(1 / returned.ratio_max)
            assert forth.ratio_max == pytest.approx(1 / returned.ratio_min)
            assert forth.ratio_min <= forth.ratio_median <= forth.ratio_max


@given(versions, versions, st.floats(0, 0.6))
def test_a_tolerance_only_moves_from_changed_to_unchanged(a, b, tolerance_frac):
    exact, loose = (
        diff_templates(table_of(a), table_of(b)),
        diff_templates(table_of(a), table_of(b), tolerance_frac=tolerance_frac),
    )
    assert ids(loose.changed) <= ids(exact.changed)
    assert ids(loose.changed) | ids(loose.unchanged) == ids(exact.changed) | ids(exact.unchanged)
    for row in loose.changed.to_pylist():
        low, high = sorted([row["throughput_before"], row["throughput_after"]])
        assert high - low > tolerance_frac * high


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_stored_json_is_exact_and_does_not_know_the_order_of_keys(value):
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(dict(reversed(value.items()))) == data
    assert canonical_json(json.loads(data)) == data


@given(st.integers(10**5, 2 * 10**11), st.integers(0, 10**6 - 1), st.integers(-720, 720))
def test_times_in_keys_are_exact_and_sort(unix_s, microseconds, offset_min):
    start = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=unix_s, microseconds=microseconds)
    time = start.astimezone(timezone(timedelta(minutes=offset_min)))
    assert parse_time(time_text(time)) == time
    later = time + timedelta(microseconds=1)
    assert time_text(time) < time_text(later)
    assert parse_time(time_text(time)).tzinfo is UTC


@given(slos, slos)
def test_slos_in_keys_are_told_apart(one, other):
    assert (slo_text(one) == slo_text(other)) == (one == other)
    assert math.isclose(float(slo_text(one).removeprefix("ttft").split("s-tpot")[0]), one.ttft_s, rel_tol=0)
