"""The bench of a library counts what the build did, and never takes a time-out for agreement."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from artifacts.store import open_store
from coral_core.cli import bench as bench_cli
from coral_core.domain.placement import PlacementStatus
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, SolverError
from tasks import bench_library as bench_module
from tasks.bench_library import SampleSpec, bench_library, compare_methods, sample_combinations
from tasks.executor import InlineExecutor
from tasks.library import build_library, capacity_tables
from tests.fakes.ray_build import small_spec

REQUIRED = {"combinations", "templates_kept", "core_s_per_combination", "wall_s", "peak_memory_bytes", "ilp_sample"}


def bench(sample=6, **changes):
    spec = small_spec(n_max=2, **changes)
    return bench_library("small", spec, workers=1, sample=SampleSpec(size=sample, time_limit_s=600.0))


def cheating(monkeypatch, factor=1.0, status=None):
    """Integer programs whose optimum is another than the true one, their placements unchecked."""
    honest = bench_module.IlpPlacement

    class Cheating(honest):
        def solve(self, problem):
            result = super().solve(problem)
            throughput = result.throughput_tokens_per_s * factor
            return replace(result, throughput_tokens_per_s=throughput, status=status or result.status)

    monkeypatch.setattr(bench_module, "IlpPlacement", Cheating)
    monkeypatch.setattr(bench_module, "verify_placement", lambda *_: None)


def test_the_report_says_what_the_build_did():
    report = bench()
    manifest = build_library(small_spec(n_max=2), open_store("memory://bench"), InlineExecutor())
    document = report.to_json()
    assert document.keys() >= REQUIRED
    assert document["ilp_sample"].keys() >= {"n", "same_optimum", "speedup_ratio"}
    assert report.templates_kept == manifest.rows
    assert report.combinations == manifest.statistics["combinations"]
    assert report.by_shard.keys() == {f"{m} {p}" for m in ("small", "large") for p in ("prefill", "decode")}
    for groups in (report.by_phase, report.by_shard):
        for name in ("combinations", "templates_kept", "dominated", "with_idle_nodes", "infeasible"):
            assert sum(getattr(group, name) for group in groups.values()) == pytest.approx(
                {**manifest.statistics, "templates_kept": manifest.rows}[name]
            )
    group = report.by_phase["decode"]
    assert group.core_s_per_combination == group.solve_core_s / group.combinations
    assert 0 < group.solve_core_s <= group.shard_core_s <= report.build_core_s
    assert report.wall_s > 0
    assert report.peak_memory_bytes > 10 * 2**20
    assert report.stored_bytes == pytest.approx(sum(record.bytes for record in manifest.present), rel=0.01)


def test_the_sample_agrees_and_its_ratio_is_of_core_seconds():
    report = bench(sample=8)
    found = report.ilp_sample
    assert (found.n, found.same_optimum, found.unproven, found.different) == (8, 8, 0, 0)
    assert found.speedup_ratio == pytest.approx(found.ilp_core_s_per_combination / report.core_s_per_combination)
    assert set(found.ilp_core_s_by_nodes) == {1, 2}


def test_a_library_may_be_benched_without_a_sample():
    found = bench(sample=0).ilp_sample
    assert (found.n, found.ilp_core_s_per_combination, found.speedup_ratio, found.ilp_core_s_by_nodes) == (
        0,
        None,
        None,
        {},
    )


def test_the_sample_is_even_over_models_phases_and_numbers_of_nodes():
    spec = small_spec()
    chosen = sample_combinations(spec, SampleSpec(size=24, seed=3))
    strata = Counter((table.model, table.phase, int(counts.sum())) for table, counts in chosen)
    assert len(strata) == 2 * 2 * 3
    assert set(strata.values()) == {2}
    assert len({(t.model, t.phase, tuple(c.tolist())) for t, c in chosen}) == 24
    again = sample_combinations(spec, SampleSpec(size=24, seed=3))
    assert [c.tolist() for _, c in again] == [c.tolist() for _, c in chosen]
    other = sample_combinations(spec, SampleSpec(size=24, seed=4))
    assert [c.tolist() for _, c in other] != [c.tolist() for _, c in chosen]


def test_a_sample_larger_than_all_takes_all():
    spec = small_spec(n_max=2)
    chosen = sample_combinations(spec, SampleSpec(size=10_000))
    assert len(chosen) == bench(sample=0).combinations


@pytest.mark.parametrize(
    ("factor", "status", "expected"),
    [
        (1.0, None, (True, False)),
        (1.0 - 1e-9, None, (True, False)),
        (0.99, None, (False, False)),
        (1.01, None, (False, True)),
        (0.5, PlacementStatus.UNPROVEN, (None, False)),
        (1.0, PlacementStatus.UNPROVEN, (None, False)),
        (1.01, PlacementStatus.UNPROVEN, (None, True)),
    ],
)
def test_what_counts_as_agreement(monkeypatch, factor, status, expected):
    cheating(monkeypatch, factor, status)
    table = next(t for t in capacity_tables(small_spec()) if t.phase is Phase.DECODE)
    found = compare_methods((table, np.array([1, 1, 1], dtype=np.int16)), time_limit_s=600.0, solver="highs")
    assert (found.same, found.is_better_by_ilp) == expected
    assert found.n_nodes == 3
    assert found.ilp_core_s > 0


def test_disagreement_and_time_outs_are_counted_apart(monkeypatch):
    cheating(monkeypatch, 0.9)
    found = bench().ilp_sample
    assert (found.same_optimum, found.unproven, found.different) == (0, 0, 6)
    cheating(monkeypatch, 1.0, PlacementStatus.UNPROVEN)
    found = bench().ilp_sample
    assert (found.same_optimum, found.unproven, found.different) == (0, 6, 0)


def test_a_placement_that_does_not_hold_what_it_states_ends_the_bench(monkeypatch):
    def refuse(*_):
        raise SolverError("not what it states")

    monkeypatch.setattr(bench_module, "verify_placement", refuse)
    with pytest.raises(SolverError, match="not what it states"):
        bench()


def test_the_command_prints_tables_and_fails_on_disagreement(monkeypatch, capsys):
    monkeypatch.setattr("tasks.library.build_spec_from_scenario", lambda *_, **__: small_spec(n_max=2))
    assert bench_cli.library(sample=4, workers=1) == 0
    out = capsys.readouterr().out
    assert "same optimum 4" in out
    assert "small prefill" in out
    assert "us per combination and core" in out
    cheating(monkeypatch, 0.9)
    assert bench_cli.library(sample=2, workers=1, as_json=True) == SolverError.exit_code
    assert "disagree on 2" in capsys.readouterr().err


def test_growth_builds_every_smaller_library_and_is_drawn(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tasks.library.build_spec_from_scenario", lambda *_, **__: small_spec(n_max=2))
    chart = tmp_path / "chart.svg"
    assert bench_cli.library(sample=0, workers=1, growth=True, chart=chart, as_json=True) == 0
    sizes = json.loads(capsys.readouterr().out)["growth"]
    assert [size["n_max"] for size in sizes] == [1, 2]
    assert sizes[0]["combinations"] < sizes[1]["combinations"]
    drawn = ET.fromstring(chart.read_text(encoding="utf-8"))
    words = " ".join(drawn.itertext())
    assert "Library of tiny: time against size (measured)" in words
    assert f"At N_max 2: {sizes[1]['combinations']} combinations" in words


def test_a_chart_is_refused_before_the_work_where_it_cannot_be_made(tmp_path):
    with pytest.raises(InputError, match=r"--chart: there is only one size to draw.*add --growth"):
        bench_cli.library(chart=tmp_path / "chart.svg")
    with pytest.raises(InputError, match="no such folder"):
        bench_cli.library(growth=True, chart=tmp_path / "none" / "chart.svg")
    with pytest.raises(InputError, match="is a folder"):
        bench_cli.library(growth=True, chart=tmp_path)
