"""`coral reallocate --dry-run`, `coral fleet` and `coral teardown` on a rehearsal."""

from __future__ import annotations

import io
import json
import shutil

import pytest

from artifacts.leases import take_lease
from artifacts.library import open_library
from artifacts.store import open_store
from coral_core.cli.entry import run
from coral_core.clock import SystemClock
from coral_core.config.resolve import resolve_scenario
from coral_core.config.scenario import load_scenario
from coral_core.config.settings import load_settings
from tasks.apply import Patience, carry_out, open_job, take
from tasks.executor import InlineExecutor
from tasks.library import build_library, build_spec_from_scenario
from tasks.reallocate import Wish, goal_of, plan_from, record_plan, see
from tests.fakes.two_regions import two_regions


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    resolved = resolve_scenario(load_scenario(two_regions(folder, 1)))
    build_library(build_spec_from_scenario(resolved), open_store(str(folder / "store")), InlineExecutor(processes=1))
    return folder / "store"


@pytest.fixture
def coral(library, tmp_path, monkeypatch, capsys):
    """Run a command line in a folder with the scenario's library; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(library, tmp_path / ".coral" / "store")

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def scenario(tmp_path):
    return two_regions(tmp_path, 1)


@pytest.fixture
def acted(coral, scenario):
    """A fleet that a run has made."""
    job = open_job(load_settings(), fleet="blue", patience=Patience(poll_s=0.05), holder="a test")
    resolved = resolve_scenario(load_scenario(scenario))
    snapshot = open_library(job.store, "two-regions")
    wish = Wish(resolved=resolved, snapshot=snapshot, max_nodes=20, max_usd_per_h=20.0)
    lease, seen = take(job), see(job, wish)
    stored = record_plan(job, plan_from(job, wish, seen))
    carry_out(job, lease, goal_of(job, wish, stored, seen, mode="apply"))
    lease.give_back()
    return stored


def test_a_dry_run_lists_steps_and_costs(coral, scenario, tmp_path):
    code, out, _ = coral("reallocate", "--scenario", scenario, "--dry-run", "--json")
    document = json.loads(out)
    assert code == 0
    assert [line.split()[0] for line in document["steps"]] == ["start", "start"]
    assert (document["cost_now_usd_per_h"], document["cost_planned_usd_per_h"]) == (0.0, pytest.approx(3.2192))
    assert document["plan"]["kind"] == "predicted"
    code, out, _ = coral("reallocate", "--scenario", scenario, "--dry-run", "--max-usd-per-h", "50")
    assert "dry run: 2 steps, from 0.00 USD/h (measured) to 3.22 USD/h (predicted), a change of +3.22 USD/h" in out
    assert out.count("- start ") == 2
    assert not (tmp_path / ".coral" / "store" / "plans").exists()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (["--max-nodes", "-1"], "--max-nodes"),
        (["--max-usd-per-h", "nan"], "--max-usd-per-h"),
        (["--fleet", "No Good"], "--fleet"),
    ],
)
def test_wrong_options_are_named(coral, scenario, options, where):
    code, _, err = coral("reallocate", "--scenario", scenario, *options)
    assert code == 2
    assert where in err


def test_status_diff_and_history_of_a_fleet(coral, acted):
    code, out, _ = coral("fleet", "status", "blue", "--json")
    status = json.loads(out)
    assert (code, status["kind"], status["unhealthy"], status["lease"]) == (0, "measured", 0, None)
    assert status["cost_usd_per_h"] == pytest.approx(status["planned_usd_per_h"])
    assert all(row["running"] == row["wanted"] == 1 for row in status["counts"])
    code, out, err = coral("fleet", "status", "blue")
    assert "Fleet blue on fake (account 111111111111): 3.22 USD/h (measured), 3.22 USD/h planned; apply of" in out
    assert "note: no serving side is connected" in err

    code, out, _ = coral("fleet", "diff", "blue", "--json")
    assert (code, json.loads(out)["steps"]) == (0, [])
    assert "the fleet is the plan" in coral("fleet", "diff", "blue")[1]

    code, out, _ = coral("fleet", "history", "blue", "--json")
    (row,) = json.loads(out)
    assert (code, row["mode"], row["outcome"], row["failures"]) == (0, "apply", "converged", [])
    assert "converged" in coral("fleet", "history", "blue")[1]
    assert json.loads(coral("fleet", "diff", "blue", "--at", row["time"], "--json")[1])["plan"] == row["time"]


def test_a_sick_fleet_and_a_lease_are_shown(coral, acted, tmp_path):
    path = tmp_path / ".coral" / "rehearsal" / "cloud.json"
    state = json.loads(path.read_text())
    state["machines"][0]["halted"] = True
    path.write_text(json.dumps(state))
    store = open_store(str(tmp_path / ".coral" / "store"))
    take_lease(store, "blue", holder="the night shift", terms=Patience().lease, clock=SystemClock())
    _, out, _ = coral("fleet", "status", "blue")
    assert "one of its nodes was stopped" in out
    assert "lease: the night shift since" in out
    _, out, _ = coral("fleet", "diff", "blue")
    assert {line.split()[1] for line in out.splitlines() if line.startswith("- ")} >= {"start", "stop"}
    code, _, err = coral("teardown", "blue", "--yes")
    assert code == 7
    assert "fleet blue is being changed by the night shift since" in err


def test_what_is_not_there_is_named(coral):
    code, out, _ = coral("fleet", "status", "green")
    assert (code, "nothing runs and nothing is wanted" in out) == (0, True)
    assert "no plan yet" in out
    code, _, err = coral("fleet", "diff", "green")
    assert (code, "the fleet has no plan" in err) == (2, True)
    assert json.loads(coral("fleet", "history", "green", "--json")[1]) == []
    code, _, err = coral("teardown", "green", "--yes")
    assert (code, "has never rented anything" in err) == (2, True)
    code, _, err = coral("fleet", "diff", "green", "--at", "yesterday")
    assert (code, "is not a time of the store" in err) == (2, True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_teardown_shows_asks_and_releases_all(coral, acted, monkeypatch):
    code, out, _ = coral("teardown", "blue", "--dry-run", "--json")
    planned = json.loads(out)
    assert (code, planned["regions"]) == (0, ["us-east-1", "us-west-2"])
    assert sum(line.startswith("stop ") for line in planned["steps"]) == 2

    code, out, err = coral("teardown", "blue")
    assert (code, "give --yes" in err) == (2, True)
    assert "Teardown of fleet blue in us-east-1, us-west-2" in out
    monkeypatch.setattr("sys.stdin", Terminal("no\n"))
    code, _, err = coral("teardown", "blue")
    assert (code, "not confirmed: nothing was changed" in err) == (2, True)
    assert json.loads(coral("fleet", "status", "blue", "--json")[1])["cost_usd_per_h"] > 0

    monkeypatch.setattr("sys.stdin", Terminal("blue\n"))
    code, out, _ = coral("teardown", "blue")
    assert (code, "converged: nothing is left in us-east-1, us-west-2" in out) == (0, True)
    status = json.loads(coral("fleet", "status", "blue", "--json")[1])
    assert (status["cost_usd_per_h"], status["planned_usd_per_h"], status["instances"]) == (0.0, 0.0, [])
    code, out, _ = coral("teardown", "blue", "--yes", "--json", "--region", "eu-west-2")
    assert (code, json.loads(out)["outcome"]) == (0, "converged")
    rows = json.loads(coral("fleet", "history", "blue", "--json")[1])
    assert [row["mode"] for row in rows] == ["apply", "teardown", "teardown"]
