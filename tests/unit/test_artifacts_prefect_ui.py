"""What is shown in Prefect's UI, and that a server that is away costs the show only."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from uuid import uuid4

import httpx
import numpy as np
import pytest

from artifacts import prefect_ui
from artifacts.prefect_ui import (
    ProgressReporter,
    checked_key,
    publish_link,
    publish_markdown,
    publish_objects,
    publish_table,
)
from artifacts.store import open_store
from coral_core.clock import ManualClock
from coral_core.errors import InputError


@pytest.fixture
def shown(monkeypatch):
    """Calls that would go to Prefect's server, in order."""
    calls = []
    artifact = uuid4()

    class Artifacts:
        def __getattr__(self, function):
            def call(**content):
                calls.append((function, content))
                return artifact

            return call

    class Prefect:
        artifacts = Artifacts()

        class exceptions:  # noqa: N801 - Prefect's name
            PrefectException = KeyError

    monkeypatch.setattr(prefect_ui, "_prefect", Prefect)
    return calls


@pytest.mark.parametrize("key", ["", "A", "a_b", "-a", "a-", "a--b", "a b", "ä"])
def test_keys_that_prefect_would_refuse(key):
    with pytest.raises(InputError, match="is not an artifact key"):
        checked_key(key)


def test_tables_are_plain_and_keep_the_order_of_columns(shown):
    publish_table("plan", [{"z": np.int64(1), "a": np.float64(0.5)}], description="costs")
    assert shown == [("create_table_artifact", {"table": [{"z": 1, "a": 0.5}], "key": "plan", "description": "costs"})]
    assert list(shown[0][1]["table"][0]) == ["z", "a"]
    with pytest.raises(InputError, match=r"^rows\[0\]\.a: nan"):
        publish_table("plan", [{"a": float("nan")}])


def test_markdown(shown):
    publish_markdown("report", "# Title")
    assert shown == [("create_markdown_artifact", {"markdown": "# Title", "key": "report", "description": None})]


def test_links_may_have_no_key(shown):
    publish_link("plan.json", "s3://b/plan.json")
    publish_link("plan.json", "s3://b/plan.json", key="plan")
    assert [content["key"] for _, content in shown] == [None, "plan"]
    assert shown[0][1]["link"] == "s3://b/plan.json"


def test_stored_objects_are_shown_with_a_link_that_opens_and_the_command(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    bucket, folder = open_store("s3://bucket/prefix"), open_store(str(tmp_path / "a folder"))
    publish_objects("stored", bucket, {"plan.json": bucket.url_of("plans/x/plan.json"), "all": "plans/x"})
    publish_objects("stored", folder, {"plan.json": folder.url_of("plans/x/plan.json")}, description="Where")
    (_, first), (_, second) = shown
    name, where, command, _, _, _, whole = first["markdown"].splitlines()
    assert (name, command) == ("**plan.json**", "- `coral artifacts show plans/x/plan.json`")
    assert where.startswith("- [s3://bucket/prefix/plans/x/plan.json](https://eu-west-1.console.aws")
    assert whole == "- `coral artifacts show plans/x`"
    assert second["markdown"].splitlines()[1:3] == [f"- `{folder.url}/plans/x/plan.json`", command]
    assert "](" not in second["markdown"]


def test_progress_is_shown_every_two_seconds_and_at_the_end(shown):
    clock = ManualClock(start=datetime(2030, 1, 1, tzinfo=UTC))
    with ProgressReporter("build", total=100, description="starts", clock=clock) as progress:
        for done in range(1, 51):
            clock.advance(0.1)
            progress.update(done, description=f"{done} of 100")
    assert [(name, content["progress"], content["description"]) for name, content in shown] == [
        ("create_progress_artifact", 0.0, "starts"),
        ("update_progress_artifact", 20.0, "20 of 100"),
        ("update_progress_artifact", 40.0, "40 of 100"),
        ("update_progress_artifact", 50.0, "50 of 100"),
    ]


def test_the_end_is_not_shown_twice(shown):
    clock = ManualClock(start=datetime(2030, 1, 1, tzinfo=UTC))
    with ProgressReporter("build", total=2, clock=clock) as progress:
        clock.advance(3)
        progress.update(2)
    assert [content["progress"] for _, content in shown] == [0.0, 100.0]


def test_failed_work_shows_how_far_it_came(shown):
    def fail():
        with ProgressReporter("build", total=4) as progress:
            progress.update(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert shown[-1][1]["progress"] == 25.0


def test_odd_totals():
    assert ProgressReporter("build", total=0).percent == 100.0
    over = ProgressReporter("build", total=2)
    over._done = 3
    assert over.percent == 100.0
    with pytest.raises(InputError, match="-1 units"):
        ProgressReporter("build", total=-1)


def test_a_server_that_is_away_stops_no_work(monkeypatch, caplog, shown):
    def away(*_, **__):
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(prefect_ui, "_created", away)
    with ProgressReporter("build", total=2) as progress:
        progress.update(1)
    assert "progress build is not shown: refused" in caplog.text


def test_without_prefect_the_fix_is_named():
    # A child, so that hiding Prefect hides it from nobody else; and the module itself must not need it.
    program = (
        "import sys; sys.modules['prefect'] = None\n"
        "from artifacts.prefect_ui import publish_markdown\n"
        "try: publish_markdown('a', 'b')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.startswith("InputError artifacts: Prefect is not installed")
    assert "coral-serve[flows]" in told


@pytest.mark.servers
def test_prefect_stores_what_is_shown():
    # A child: Prefect's client leaves sockets to the garbage collector, which here would be an error in a later test.
    told = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True).stdout
    assert json.loads(told.splitlines()[-1]) == {
        "table": '[{"model": "m", "count": 2}]',
        "text": "# Title",
        "link": "[a plan](file:///tmp/plan.json)",
        "progress": 75.0,
    }


SHOW = """
import json
import numpy as np
from prefect import flow
from prefect.artifacts import Artifact
from prefect.testing.utilities import prefect_test_harness
from artifacts.prefect_ui import ProgressReporter, publish_link, publish_markdown, publish_table

@flow
def show():
    publish_table("coral-table", [{"model": "m", "count": np.int64(2)}], description="d")
    publish_markdown("coral-text", "# Title")
    publish_link("a plan", "file:///tmp/plan.json", key="coral-link")
    with ProgressReporter("coral-progress", total=4) as progress:
        progress.update(3)

with prefect_test_harness(server_startup_timeout=300):
    show()
    print(json.dumps({key: Artifact.get(f"coral-{key}").data for key in ("table", "text", "link", "progress")}))
"""
