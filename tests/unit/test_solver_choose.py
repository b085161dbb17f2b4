import builtins
import subprocess
import sys

import numpy as np
import pytest

from coral_core.errors import InputError, SolverError
from coral_core.solver import gurobi
from coral_core.solver.builder import ProgramBuilder
from coral_core.solver.choose import choose_solver, solver_status
from coral_core.solver.highs import HighsSolver
from coral_core.solver.program import SolveOptions, SolverInfo

RESTRICTED = SolverInfo(name="gurobi", installed=True, version="13", licensed=True, size_limit=2000)


def sized(columns: int, rows: int, lower=-np.inf, upper=1.0):
    builder = ProgramBuilder(name="sized")
    builder.add_columns("x", columns)
    builder.add_rows("r", rows, rows=range(rows), columns=0, lower=lower, upper=upper)
    return builder.build()


def with_info(monkeypatch, **changes):
    from dataclasses import replace

    monkeypatch.setattr(gurobi, "gurobi_info", lambda: replace(RESTRICTED, **changes))


def test_auto_takes_gurobi_only_where_its_licence_allows_the_size(monkeypatch):
    with_info(monkeypatch)
    assert choose_solver(sized(2000, 2000)).name == "gurobi"
    assert choose_solver(sized(2001, 1)).name == "highs"
    assert choose_solver(sized(1, 2001)).name == "highs"
    # A row bounded on both sides takes two constraints, an equality one, a free row none.
    assert choose_solver(sized(1, 1001, lower=0.0)).name == "highs"
    assert choose_solver(sized(1, 2000, lower=1.0)).name == "gurobi"
    assert choose_solver(sized(1, 3000, upper=np.inf)).name == "gurobi"


def test_a_full_licence_takes_any_size_and_none_takes_nothing(monkeypatch):
    with_info(monkeypatch, size_limit=None)
    assert choose_solver(sized(5000, 1), "gurobi").name == "gurobi"
    with_info(monkeypatch, licensed=False, size_limit=None, note="no licence")
    assert choose_solver(sized(1, 1)).name == "highs"
    with pytest.raises(SolverError, match="no licence"):
        choose_solver(sized(1, 1), "gurobi")


def test_an_explicit_gurobi_that_cannot_says_so_with_a_fix(monkeypatch):
    with_info(monkeypatch, note="restricted licence")
    with pytest.raises(SolverError, match=r"2001 columns.*restricted licence.*highs"):
        choose_solver(sized(2001, 1), "gurobi")


def test_highs_is_always_there():
    assert isinstance(choose_solver(sized(5000, 10), "highs"), HighsSolver)


def test_an_unknown_preference_is_an_input_error():
    with pytest.raises(InputError, match="cplex"):
        choose_solver(sized(1, 1), "cplex")


def test_status_lists_both_solvers():
    by_name = {info.name: info for info in solver_status()}
    assert by_name["highs"].licensed
    assert by_name["highs"].version
    assert by_name["highs"].size_limit is None
    assert "gurobi" in by_name


def test_without_gurobipy_the_status_says_not_installed(monkeypatch):
    def missing(name):
        raise gurobi.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gurobi.metadata, "version", missing)
    info = gurobi.gurobi_info()
    assert not info.installed
    assert "not installed" in info.note


def test_without_gurobipy_solving_is_a_solver_error(monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name == "gurobipy":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(SolverError, match="extra `gurobi`"):
        gurobi.GurobiSolver().solve(sized(1, 1), SolveOptions())


def test_installed_is_not_licensed(tmp_path):
    """A licence file that licenses nothing: the probe, in a process of its own, says so and auto falls to HiGHS."""
    pytest.importorskip("gurobipy")
    (tmp_path / "gurobi.lic").write_text("TYPE=NODE\nVERSION=13\nHOSTID=0\nCKEY=0\n")
    code = (
        "from coral_core.solver.gurobi import gurobi_info, GurobiSolver\n"
        "from coral_core.solver.builder import ProgramBuilder\n"
        "from coral_core.solver.choose import choose_solver\n"
        "from coral_core.solver.program import SolveOptions\n"
        "from coral_core.errors import SolverError\n"
        "info = gurobi_info()\n"
        "b = ProgramBuilder(); b.add_columns('x', 1)\n"
        "assert info.installed and not info.licensed and info.note, info\n"
        "assert choose_solver(b.build()).name == 'highs'\n"
        "try:\n    GurobiSolver().solve(b.build(), SolveOptions())\n"
        "except SolverError as error:\n    print(error)\n"
    )
    env = {"GRB_LICENSE_FILE": str(tmp_path / "gurobi.lic"), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Gurobi failed" in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_program_above_the_licence_is_a_solver_error_with_a_fix():
    info = gurobi.gurobi_info()
    if info.size_limit is None:
        pytest.skip("Gurobi is absent or fully licensed here")
    with pytest.raises(SolverError, match="use HiGHS"):
        gurobi.GurobiSolver().solve(sized(info.size_limit + 1, 1), SolveOptions())
