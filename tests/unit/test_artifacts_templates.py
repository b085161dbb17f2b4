from __future__ import annotations

import dataclasses
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from artifacts.schemas import TEMPLATE_SCHEMA, checked_columns, require_template_schema
from artifacts.templates import row_to_template, template_columns, template_rows, template_table
from coral_core.domain.templates import CapacitySource, Placement, ServingTemplate, Stage, template_id
from coral_core.domain.workload import Phase, Slo
from coral_core.errors import InputError, StoreError
from tests.fakes.artifact_cases import CONFIGS, capacity_table, placements, rows_of


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("slo", [Slo(ttft_s=1, tpot_s=0.05), Slo(ttft_s=0.1 + 0.2, tpot_s=1e-7)])
def test_rows_have_the_ids_of_their_placements(phase, slo):
    capacity = capacity_table(model="modèle-é", phase=phase, slo=slo)
    rows = template_table(capacity, placements(capacity, 400, seed=3)).to_pylist()
    for row in rows:
        template = row_to_template(row)
        assert template.template_id == template_id(
            model="modèle-é", variant="bf16", phase=phase, slo=slo, placement=template.placement
        )


def test_rows_say_what_the_placements_say():
    capacity = capacity_table()
    placed = placements(capacity, 200, seed=5)
    table = template_table(capacity, placed)
    table.validate(full=True)
    assert table.schema == TEMPLATE_SCHEMA
    for i, row in enumerate(table.to_pylist()):
        stages = range(placed.n_stages[i])
        assert row["stage_layers"] == [placed.stage_layers[i, s] for s in stages]
        for s in stages:
            wanted = Counter({c: int(k) for c, k in zip(CONFIGS, placed.stage_counts[i, s], strict=True) if k})
            assert Counter(row["stage_nodes"][s]) == wanted
            for name, layout in zip(row["stage_nodes"][s], row["stage_layouts"][s], strict=True):
                index = capacity.layout[len(stages) - 1, CONFIGS.index(name), placed.stage_layers[i, s] - 1]
                assert layout == capacity.layouts[index]
        used = [c for c, k in zip(range(len(CONFIGS)), placed.counts[i], strict=True) if k]
        assert dict(zip(row["node_configs"], row["node_counts"], strict=True)) == {
            CONFIGS[c]: placed.counts[i, c] for c in used
        }
        assert row["node_configs"] == sorted(row["node_configs"])
        assert row["n_nodes"] == placed.counts[i].sum()
        assert row["throughput_tokens_per_s"] == placed.throughput[i]
        assert row["throughput_requests_per_s"] is None
        assert row["source"] == CapacitySource.worst(capacity.sources[c] for c in used)
        assert row["error_frac"] == max(capacity.error_frac[c] for c in used)
        assert row["proven"] == placed.proven[i]


def test_aggregated_rows_carry_requests():
    capacity = capacity_table(phase=Phase.AGGREGATED)
    table = template_table(capacity, placements(capacity, 5))
    assert table["throughput_tokens_per_s"].null_count == 5
    assert table["throughput_requests_per_s"].null_count == 0


def test_an_unknown_error_stays_unknown():
    capacity = capacity_table(error_frac=(0.1, None, 0.2, 0.3, 0.0))
    placed = placements(capacity, 100)
    errors = template_table(capacity, placed)["error_frac"].to_pylist()
    for counts, error in zip(placed.counts, errors, strict=True):
        known = [capacity.error_frac[c] for c in np.flatnonzero(counts)]
        assert error == (None if None in known else max(known))
    assert None in errors


def test_no_placements_give_an_empty_table():
    capacity = capacity_table()
    table = template_table(capacity, placements(capacity, 0))
    assert table.num_rows == 0
    assert table.schema == TEMPLATE_SCHEMA
    assert len(template_columns(table, CONFIGS)) == 0


def test_many_configurations_do_not_overflow_the_identity():
    # 40 configurations at up to 3 nodes each: 4^40 combinations are more than 64 bits hold.
    configs = tuple(f"c{i}" for i in range(40))
    capacity = capacity_table(configs=configs, layers=12)
    placed = placements(capacity, 60, seed=1)
    counts = placed.stage_counts.copy()
    counts[0, 0] = 3
    placed = dataclasses.replace(placed, stage_counts=counts, counts=counts.sum(axis=1).astype(np.int16))
    for row in template_table(capacity, placed).to_pylist():
        template = row_to_template(row)
        identity = {"model": "m", "variant": "bf16", "phase": Phase.DECODE, "slo": capacity.slo}
        assert template.template_id == template_id(**identity, placement=template.placement)


def test_a_hundred_thousand_rows_take_about_a_second():
    capacity = capacity_table(layers=64, max_stages=6, configs=tuple(f"c{i}" for i in range(20)))
    small = placements(capacity, 2000)
    repeated = {
        field.name: np.concatenate([getattr(small, field.name)] * 50)
        for field in dataclasses.fields(small)
        if isinstance(getattr(small, field.name), np.ndarray)
    }
    placed = dataclasses.replace(small, **repeated)
    started = time.process_time()
    assert template_table(capacity, placed).num_rows == 100_000
    assert time.process_time() - started < 4  # about 0.5 s here; the bound is for busy machines


@pytest.mark.parametrize(
    ("field", "change", "law"),
    [
        ("stage_layers", lambda a: a + 1, "layers of the stages"),
        ("counts", lambda a: a + 1, "nodes of the stages"),
        ("throughput", lambda a: a * np.nan, "throughput is positive"),
        ("throughput", lambda a: a * 0, "throughput is positive"),
        ("proven", lambda a: a[:-1], "proven has shape"),
    ],
)
def test_a_contradictory_placement_is_a_bug(field, change, law):
    capacity = capacity_table()
    placed = placements(capacity, 4)
    with pytest.raises(ValueError, match=law):
        template_table(capacity, dataclasses.replace(placed, **{field: change(getattr(placed, field))}))


def test_a_stage_without_nodes_or_layout_is_a_bug():
    capacity = capacity_table(max_stages=1)
    placed = placements(capacity, 3)
    empty = np.zeros_like(placed.stage_counts)
    with pytest.raises(ValueError, match="every stage has a node"):
        template_table(
            capacity, dataclasses.replace(placed, stage_counts=empty, counts=empty.sum(axis=1).astype(np.int16))
        )
    without = dataclasses.replace(capacity, layout=np.full_like(capacity.layout, -1))
    with pytest.raises(ValueError, match="no layout"):
        template_table(without, placed)


def test_columns_have_the_counts_in_the_order_asked_for():
    capacity = capacity_table(phase=Phase.PREFILL)
    table = rows_of(capacity, 50, seed=2)
    order = ("unused", *reversed(CONFIGS))
    columns = template_columns(table, order)
    for i, row in enumerate(table.to_pylist()):
        template = row_to_template(row)
        assert columns.ids[i] == template.template_id
        assert columns.models[i] == "m"
        assert columns.phases[i] is Phase.PREFILL
        assert columns.throughput[i] == template.throughput
        assert [int(k) for k in columns.nodes[i]] == [template.placement.combination.get(c, 0) for c in order]


def test_columns_refuse_unknown_configurations_doubles_and_missing_throughput():
    table = rows_of(capacity_table(), 20)
    with pytest.raises(InputError, match=r"2xA100, Z"):
        template_columns(table, [c for c in CONFIGS if c not in {"Z", "2xA100"}])
    with pytest.raises(InputError, match="comes twice"):
        template_columns(pa.concat_tables([table, table.slice(3, 1)]), CONFIGS)
    nothing = pa.nulls(20, pa.float64())
    lacking = table.set_column(
        table.schema.get_field_index("throughput_tokens_per_s"), "throughput_tokens_per_s", nothing
    )
    with pytest.raises(StoreError, match="no throughput"):
        template_columns(lacking, CONFIGS)


def test_templates_become_rows():
    placement = Placement(stages=(Stage(layers=3, nodes=("b", "a", "a")), Stage(layers=5, nodes=("c",))))
    template = ServingTemplate(
        template_id="d-0",
        model="m",
        variant="fp8",
        phase=Phase.DECODE,
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        placement=placement,
        throughput_tokens_per_s=5.0,
        throughput_requests_per_s=None,
        method="ilp",
        source=CapacitySource.MEASURED,
    )
    (row,) = template_rows([template]).to_pylist()
    assert row["node_configs"] == ["a", "b", "c"]
    assert row["node_counts"] == [2, 1, 1]
    assert row_to_template(row) == template


def test_schema_checks_name_what_differs():
    require_template_schema(TEMPLATE_SCHEMA.with_metadata({b"any": b"thing"}), where="x")
    with pytest.raises(StoreError, match=r"here: .*differs in proven "):
        require_template_schema(pa.schema(list(TEMPLATE_SCHEMA)[:-1]), where="here")
    with pytest.raises(StoreError, match="order of columns"):
        require_template_schema(pa.schema(list(reversed(list(TEMPLATE_SCHEMA)))), where="here")
    assert checked_columns(["model", "model"]) == ["model"]
    with pytest.raises(InputError, match="'throughput'"):
        checked_columns(["model", "throughput"])


def test_only_the_bound_of_the_phase_names_a_template():
    placement = Placement(stages=(Stage(layers=8, nodes=("a",)),))

    def named(phase, ttft_s, tpot_s):
        slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
        return template_id(model="m", variant="bf16", phase=phase, slo=slo, placement=placement)

    assert named(Phase.PREFILL, 1.0, 0.05) == named(Phase.PREFILL, 1.0, 0.06)
    assert named(Phase.PREFILL, 1.0, 0.05) != named(Phase.PREFILL, 1.1, 0.05)
    assert named(Phase.DECODE, 1.0, 0.05) == named(Phase.DECODE, 2.0, 0.05)
    assert named(Phase.DECODE, 1.0, 0.05) != named(Phase.DECODE, 1.0, 0.06)
    assert named(Phase.AGGREGATED, 1.0, 0.05) != named(Phase.AGGREGATED, 1.0, 0.06)
