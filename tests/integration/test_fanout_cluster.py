"""The same fan-out on a Ray cluster of three nodes, one of which is lost in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coral_core.errors import InputError
from tasks.fanout import RayExecutor, fan_out
from tests.fakes.ray_work import Order, double, obey

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """A head and one node with a CPU each; tests add the node that they lose."""
    from ray.cluster_utils import Cluster

    fast_detection = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,
    }
    size = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "_system_config": fast_detection})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        yield cluster
    finally:
        cluster.shutdown()


def test_a_node_lost_in_the_middle_loses_no_item(cluster, tmp_path):
    victim = cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    orders = [Order(number, "mark", str(tmp_path)) for number in range(24)]
    outcomes = []
    for outcome in RayExecutor(address=cluster.address, max_in_flight=8)(orders, obey):
        outcomes.append(outcome)
        if victim is not None and len(outcomes) == 6:
            cluster.remove_node(victim, allow_graceful=False)
            victim = None
    assert sorted(outcome.result for outcome in outcomes) == list(range(0, 48, 2))
    assert max(outcome.attempts for outcome in outcomes) >= 2, "no item was on the node when it was lost"
    assert len(list(Path(tmp_path).iterdir())) == 24


def test_a_cluster_is_left_as_it_was(cluster):
    assert [outcome.result for outcome in fan_out([1, 2], double, address=cluster.address)] in ([2, 4], [4, 2])
    assert [outcome.result for outcome in fan_out([3], double, address=cluster.address)] == [6]


def test_an_address_where_nothing_answers_is_said_before_ray_is_asked():
    with pytest.raises(InputError, match=r"no Ray head answers at 127\.0\.0\.1:9"):
        list(fan_out([1], double, address="127.0.0.1:9"))
