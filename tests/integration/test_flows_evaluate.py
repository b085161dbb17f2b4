"""The flow `evaluate` on a Prefect server: recorded whole, shown in the run, offered as a form."""

from __future__ import annotations

import gc
import warnings

import pytest
from pydantic import ValidationError

from artifacts.evaluations import list_evaluations, read_evaluation
from artifacts.store import open_store
from tests.fakes.evaluation_cases import micro
from tests.fakes.html_page import faults

pytestmark = [
    pytest.mark.servers,
    # Prefect leaves sockets to the garbage collector, and in 3.9 uses what its own dependencies deprecate.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def server():
    """A Prefect server of its own."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=300):
        yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_an_evaluation_is_recorded_and_shown(server, tmp_path):
    from prefect.artifacts import Artifact

    from flows.evaluate import evaluate
    from flows.parameters import EvaluateParameters

    store = open_store(str(tmp_path / "store"))
    url = evaluate(
        EvaluateParameters(
            scenario=str(micro(tmp_path)),
            store=store.url,
            policies=("coral", "homo"),
            seeds=(5,),
            decode_utilization=0.5,
        )
    )
    [time] = list_evaluations(store, "micro")
    assert url == store.url_of(f"evaluations/micro/{time:%Y%m%dT%H%M%S.%fZ}/summary.json")
    summary = read_evaluation(store, "micro", time)
    assert list(summary["policies"]) == ["coral", "homo"]
    assert summary["seeds"] == [5]
    assert summary["max_utilization_frac"] == {"prefill": 0.6, "decode": 0.5, "aggregated": 1.0}
    report = Artifact.get("evaluation-micro-report")
    assert report is not None
    assert "# Evaluation of micro" in report.data
    stored = Artifact.get("evaluation-micro-stored")
    assert stored is not None
    key = f"evaluations/micro/{time:%Y%m%dT%H%M%S.%fZ}/report.html"
    assert store.url_of(key) in stored.data
    assert f"coral artifacts show {key}" in stored.data
    assert not faults(store.get(key).decode())
    assert "report.html" in store.get("evaluations/micro/index.md").decode()
    table = Artifact.get("evaluation-micro-0")
    assert table is not None
    assert "simulated" in table.description


def test_the_form_refuses_what_makes_no_sense(server):
    from flows.deployments import deployments
    from flows.parameters import EvaluateParameters

    for wrong in ({"policies": ["korall"]}, {"seeds": [-1]}, {"decode_utilization": 1.5}, {"no_such": 1}):
        with pytest.raises(ValidationError):
            EvaluateParameters(**wrong)
    deployment = next(one for one in deployments() if one.name == "evaluate")
    assert deployment.entrypoint == "flows.evaluate.evaluate"
