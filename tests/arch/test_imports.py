"""Who imports whom: the layers, one adapter per heavy library, and a command line that answers at once."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coral_core", "artifacts", "tasks", "flows")

ADAPTERS = {
    "boto3": ["coral_core/cloud/aws.py"],
    "botocore": ["coral_core/cloud/aws.py"],
    "cyclopts": ["coral_core/cli/*"],
    "google": ["coral_core/cloud/gcp.py"],
    "gurobipy": ["coral_core/solver/gurobi.py"],
    "highspy": ["coral_core/solver/highs.py"],
    "jinja2": ["coral_core/report/*"],
    "numba": ["coral_core/placement/*", "coral_core/allocation/*", "coral_core/sim/*"],
    "obstore": ["artifacts/store.py"],
    "pandas": ["coral_core/report/*"],
    "prefect": ["flows/*", "tasks/*", "artifacts/prefect_ui.py"],
    "ray": ["tasks/fanout.py"],
    "torch": ["coral_core/engine/plugin/*"],
    "vllm": ["coral_core/engine/plugin/*"],
    "zmq": ["coral_core/serving/control/wire.py", "coral_core/engine/plugin/*"],
}
"""Library -> the files that may import it, as patterns of paths from the root."""

EXTRAS = ("google", "prefect", "ray", "boto3", "botocore", "gurobipy", "zmq", "jinja2", "pandas", "torch", "vllm")
"""Libraries that the base install lacks."""

HELP_FORBIDDEN = (*EXTRAS, "numba", "llvmlite", "highspy", "numpy", "pyarrow", "obstore", "pydantic", "yaml")
"""Libraries whose import alone would use up the time that `coral --help` has."""


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported_libraries(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level names that a file imports, `importlib.import_module("...")` included, each with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name.partition(".")[0], node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0], node.lineno
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield module.partition(".")[0], node.lineno


def test_import_contracts_hold():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_heavy_library_stays_in_its_adapter():
    strays = [
        f"{path.relative_to(ROOT)}:{line}: imports {library}, which belongs into {' or '.join(ADAPTERS[library])}"
        for path in sources()
        for library, line in imported_libraries(path)
        if library in ADAPTERS
        and not any(fnmatch.fnmatch(path.relative_to(ROOT).as_posix(), pattern) for pattern in ADAPTERS[library])
    ]
    assert not strays, "\n".join(strays)


def test_what_runs_in_the_engines_process_needs_only_what_is_there():
    """The plugin has the engine's environment, itself and the clock, which needs nothing; the keeper has no environment at all."""
    engine = ROOT / "coral_core" / "engine"
    there = {"msgspec", "nixl", "numpy", "safetensors", "tokenizers", "torch", "uvicorn", "vllm", "zmq"}
    strays = []
    plugin = sorted((engine / "plugin").rglob("*.py"))
    for path in [*plugin, engine / "keeper.py", ROOT / "coral_core" / "clock.py"]:
        libraries = sys.stdlib_module_names | (there if path in plugin else set())
        allowed = r"(?!\.(?:engine\.plugin|clock)\b)" if path in plugin else ""
        own = re.findall(
            rf"^\s*(?:from|import) (coral_core{allowed}\S*)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        foreign = {name for name, _ in imported_libraries(path)} - libraries - {"coral_core"}
        strays += [f"{path.relative_to(ROOT)}: imports {name}" for name in [*own, *sorted(foreign)]]
    assert not strays, "\n".join(strays)


def loaded_after(code: str, *, absent: tuple[str, ...] = ()) -> set[str]:
    """Top-level modules a fresh interpreter has loaded after `code`; `absent` ones raise ImportError there."""
    program = (
        f"import sys, json\nfor name in {absent!r}: sys.modules[name] = None\n{code}\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name, m in sys.modules.items() if m is not None})),"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"], ["library", "--help"]])
def test_help_loads_no_heavy_library(arguments):
    loaded = loaded_after(f"from coral_core.cli.entry import run\nassert run({arguments!r}) == 0")
    allowed = () if len(arguments) == 1 else ("numpy", "pydantic", "yaml", "pyarrow", "obstore")
    assert not loaded & (set(HELP_FORBIDDEN) - set(allowed))


def test_every_core_module_imports_with_the_base_install_alone():
    extra_only = {"coral_core.cloud.aws", "coral_core.serving", "coral_core.engine.plugin"}
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources()
        if path.relative_to(ROOT).parts[0] in {"coral_core", "artifacts"}
    ]
    wanted = [name for name in modules if not any(f"{name}.".startswith(f"{prefix}.") for prefix in extra_only)]
    wanted.remove("artifacts.prefect_ui") if "artifacts.prefect_ui" in wanted else None
    assert len(wanted) > 20
    loaded_after(f"import importlib\nfor name in {wanted!r}: importlib.import_module(name)", absent=EXTRAS)
