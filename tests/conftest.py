"""What every test stands on: an isolated environment, the reference data, and how random tests are seeded.

The environment is set when this file is imported, because Prefect, Ray and boto3 read theirs on import.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REFERENCE_VARIABLE = "CORAL_REFERENCE_DATA"
ENGINE_VARIABLE = "CORAL_ENGINE_PYTHON"

# Short, because Ray puts unix sockets below it and their paths may have 107 bytes only.
SCRATCH = Path(tempfile.mkdtemp(prefix="coral-t-"))

_ENVIRONMENT = {
    # Nothing calls home.
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    # An own server with an own database, and time for it to start and to answer on a busy machine.
    "PREFECT_HOME": str(SCRATCH / "prefect"),
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "240",
    "PREFECT_API_REQUEST_TIMEOUT": "240",
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # Ray on loopback only (the name misleads: it works on Linux too), no token file in the home folder.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TMPDIR": str(SCRATCH),
    # No cloud account is ever within reach of a test.
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
_REMOVED = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "RAY_ADDRESS", "AWS_PROFILE", "AWS_SESSION_TOKEN")

os.environ.update(_ENVIRONMENT)
for _name in [
    *_REMOVED,
    *(name for name in os.environ if name.startswith("CORAL_") and name not in (REFERENCE_VARIABLE, ENGINE_VARIABLE)),
]:
    os.environ.pop(_name, None)

# Numeric code on shared machines has no steady pace, hence no deadline anywhere.
_QUIET = (HealthCheck.too_slow,)
settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True, suppress_health_check=_QUIET)
# A commit's verdict must depend on the commit alone; exploring is the nightly run's work.
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, database=None)
settings.register_profile("nightly", parent=settings.get_profile("dev"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder of reference data; skips where CORAL_REFERENCE_DATA is unset, fails where it names no folder."""
    value = os.environ.get(REFERENCE_VARIABLE)
    if not value:
        pytest.skip(f"{REFERENCE_VARIABLE} is not set: no reference data to compare with")
    folder = Path(value).expanduser().resolve()
    if not folder.is_dir():
        pytest.fail(f"{REFERENCE_VARIABLE}={value}: no such folder")
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def engine_python(repository: Path) -> Path:
    """The engine's interpreter; skips where CORAL_ENGINE_PYTHON is unset and no `.venv-engine` was made, fails where it is wrong."""
    value = os.environ.get(ENGINE_VARIABLE)
    interpreter = Path(value) if value else repository / ".venv-engine/bin/python"
    if not value and not interpreter.exists():
        pytest.skip(f"no engine environment: run `make engine-cpu`, or set {ENGINE_VARIABLE}")
    if not os.access(interpreter, os.X_OK):
        pytest.fail(f"{ENGINE_VARIABLE}={value}: no interpreter there")
    return interpreter


@pytest.fixture(scope="session")
def tiny_model(engine_python: Path, repository: Path) -> Path:
    """Folder of the tiny random model that engine tests serve: qwen3, 8 layers, float32, vocabulary of 1024, context of 4096."""
    folder = SCRATCH / "tiny-model"
    command = [engine_python, "-m", "coral_core.engine.plugin.tiny_model", folder]
    subprocess.run(command, cwd=repository, check=True, timeout=120)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for the reference data or an engine, and note it in the JUnit report: CI refuses to see one skipped."""
    for item in items:
        for fixture, marker in (("reference_data", "reference"), ("engine_python", "engine")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
            if item.get_closest_marker(marker):
                item.user_properties.append(("marker", marker))


def pytest_unconfigure() -> None:
    """Remove the scratch folder; here and not in a fixture, because xdist's controller runs no fixtures."""
    shutil.rmtree(SCRATCH, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to repeat a failed run in the same random order (the header that names the seed is off under -q)."""
    seed = config.getoption("randomly_seed", None)
    if seed is not None and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"repeat in this order: pytest --randomly-seed={seed}")
