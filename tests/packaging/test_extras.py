"""Every extra resolves by itself, and the two that cannot share an environment are declared so."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

UV = Path(sys.executable).with_name("uv")
LIMIT_S = 240


def resolve(repository: Path, *extras: str) -> subprocess.CompletedProcess[str]:
    """Resolve, without installing anything, the project with `extras` for Python 3.11."""
    options = [option for extra in extras for option in ("--extra", extra)]
    command = [UV, "pip", "compile", "-q", "--python-version", "3.11", *options, repository / "pyproject.toml"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


@pytest.mark.parametrize("extra", ["flows", "aws", "gcp", "gurobi", "serve", "report", "dev", "vllm"])
def test_an_extra_resolves(repository, extra):
    done = resolve(repository, extra)
    assert done.returncode == 0, done.stderr
    wanted = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert wanted[0].split(">")[0].split("=")[0].split("[")[0] in done.stdout


def test_the_orchestrator_resolves_with_all_it_uses(repository):
    done = resolve(repository, "flows", "aws", "gcp", "gurobi", "serve", "report", "dev")
    assert done.returncode == 0, done.stderr


def test_flows_and_vllm_do_not_resolve_together(repository):
    """Should this fail, the two environments of docs/packaging.md may have become one: good news."""
    done = resolve(repository, "flows", "vllm")
    assert done.returncode != 0
    assert "incompatible" in done.stderr


def test_the_declared_conflict_lets_the_whole_project_be_locked(repository, tmp_path):
    """A universal lock has to resolve all extras at once; only the declaration makes that possible."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, tmp_path)
    command = [UV, "lock", "-q", "--python", sys.executable, "--project", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    locked = {package["name"] for package in tomllib.loads((tmp_path / "uv.lock").read_text())["package"]}
    assert {"prefect", "ray", "vllm", "nixl"} <= locked
