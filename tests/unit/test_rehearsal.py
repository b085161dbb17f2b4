"""The rehearsal: a fake cloud that processes share; supply as stated; the serving side that is assumed."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace

import pytest

from artifacts.fleets import (
    FleetIdentity,
    Outcome,
    RunResult,
    claim_fleet,
    list_runs,
    mark_regions,
    read_identity,
    read_run,
    used_regions,
    write_result,
)
from artifacts.store import open_store
from coral_core.clock import ManualClock
from coral_core.cloud.assumed_engine import AssumedEngine
from coral_core.cloud.engine_port import Readiness
from coral_core.cloud.fleet_view import gather
from coral_core.cloud.provisioner import NodeOrder, Refused, Started
from coral_core.cloud.rehearsal import RehearsalCloud
from coral_core.cloud.stated_supply import StatedSupply
from coral_core.cloud.supply import Reading
from coral_core.domain.fleet import FleetId, NodeState, NodeTags
from coral_core.domain.hardware import Market
from coral_core.domain.workload import Phase
from coral_core.errors import InputError, ProvisionError, StoreError
from tests.fakes.fleet_cases import START, ZONES

FLEET = FleetId(name="demo", account="111111111111")


def order(number: int = 0, *, nodes: int = 2, market: Market = Market.ON_DEMAND) -> NodeOrder:
    tags = NodeTags(
        instance_id="d-two-1",
        template_id="d-two",
        model="m",
        phase=Phase.DECODE,
        config="a",
        stage=number,
        node=number,
        nodes=nodes,
        epoch=3,
    )
    return NodeOrder(region="east", zone="east-a", market=market, tags=tags)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "rehearsal"


def opened(folder) -> RehearsalCloud:
    return RehearsalCloud(folder, clock=ManualClock(start=START), zones=ZONES)


def test_what_one_process_starts_another_finds_and_ends(folder):
    first = opened(folder).start(FLEET, order(0))
    assert isinstance(first, Started)
    again = opened(folder).start(FLEET, order(0))
    assert isinstance(again, Started)
    assert again.node.node_id == first.node.node_id
    opened(folder).start(FLEET, order(1, market=Market.SPOT))
    listing = opened(folder).describe(FLEET, "east")
    assert [(node.tags, node.market, node.state) for node in listing.nodes] == [
        (order(0).tags, Market.ON_DEMAND, NodeState.RUNNING),
        (order(1).tags, Market.SPOT, NodeState.RUNNING),
    ]
    assert listing.groups == ("d-two-1",)
    assert not opened(folder).release_group(FLEET, "east", "d-two-1")
    opened(folder).stop(FLEET, "east", listing.nodes)
    assert {node.state for node in opened(folder).describe(FLEET, "east").nodes} == {NodeState.GONE}
    assert opened(folder).release_group(FLEET, "east", "d-two-1")
    assert opened(folder).describe(FLEET, "east").groups == ()
    assert opened(folder).account() == FLEET.account


def test_scarcity_is_rehearsed_by_editing_the_file(folder):
    opened(folder).account()
    state = json.loads((folder / "cloud.json").read_text())
    (folder / "cloud.json").write_text(json.dumps({**state, "capacity": [["east-a", "a", 1]]}))
    assert isinstance(opened(folder).start(FLEET, order(0)), Started)
    assert isinstance(opened(folder).start(FLEET, order(1)), Refused)


@pytest.mark.parametrize("text", ["{", "[]", '{"machines": [{}], "groups": [], "capacity": []}', '{"machines": 1}'])
def test_a_damaged_file_is_named_and_kept(folder, text):
    opened(folder).account()
    (folder / "cloud.json").write_text(text)
    with pytest.raises(ProvisionError, match=r"cloud\.json: the rehearsal's file is damaged"):
        opened(folder).account()
    assert (folder / "cloud.json").read_text() == text


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProvisionError, match=r"the rehearsal cannot be kept.*CORAL_REHEARSAL"):
        opened(tmp_path / "file" / "below").account()


def test_the_assumed_engine_is_ready_when_all_nodes_run(folder):
    engine, cloud = AssumedEngine(), opened(folder)
    cloud.start(FLEET, order(0))
    (part,) = gather(cloud.describe(FLEET, "east").nodes)
    assert engine.ready(part) is Readiness.NOT_READY
    cloud.start(FLEET, order(1))
    (whole,) = gather(cloud.describe(FLEET, "east").nodes)
    assert engine.ready(whole) is Readiness.READY
    engine.set_weight(whole, 1.0)
    assert engine.drain(whole)


def test_stated_supply_says_what_is_sold_and_how_much():
    price = Reading(value=2.0, source="s", as_of=START)
    stated = StatedSupply(
        prices={("east", "a", Market.ON_DEMAND): price, ("east", "a", Market.SPOT): price},
        nodes={("east", "a", Market.ON_DEMAND): 7},
        zones_by_region=ZONES,
        source="a test",
        clock=ManualClock(start=START),
    )
    assert stated.on_demand_usd_per_h("east", ["a", "b"]) == {"a": price}
    assert stated.spot_usd_per_h("east", ["a", "b"]) == {("a", "east-a"): price, ("a", "east-b"): price}
    assert stated.zones("east", ["a", "b"]).value == {"a": ("east-a", "east-b"), "b": ()}
    assert {pool: reading.value for pool, reading in stated.limit_vcpus("east").items()} == {
        "a on_demand": 7.0,
        "a spot": 0.0,
    }
    assert stated.limit_vcpus("west") == {}


# What is kept of fleets and runs -------------------------------------------------------------------------------------


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}")


def test_a_fleet_is_claimed_once_and_for_one_account(store):
    mine = FleetIdentity(fleet="demo", provider="aws", account="1")
    assert read_identity(store, "demo") is None
    claim_fleet(store, mine)
    claim_fleet(store, mine)
    assert read_identity(store, "demo") == mine
    for other in ({"account": "2"}, {"provider": "gcp"}):
        with pytest.raises(ProvisionError, match=r"fleet demo: belongs to account 1 \(aws\), the credentials to"):
            claim_fleet(store, mine.model_copy(update=other))
    store.put("fleets/demo/identity.json", b'{"fleet": "demo"}')
    with pytest.raises(StoreError, match="provider: Field required"):
        read_identity(store, "demo")


def test_regions_once_used_are_never_forgotten(store):
    mark_regions(store, "demo", ["west", "east", "east"])
    mark_regions(store, "demo", ["east"])
    assert used_regions(store, "demo") == ("east", "west")
    assert used_regions(store, "other") == ()


def test_records_of_runs_are_listed_from_a_time_on_and_damage_costs_themselves_only(store):
    times = [replace_hour(hour) for hour in (1, 2, 3)]
    for time in times:
        write_result(store, "demo", time, RunResult(outcome=Outcome.DECLINED, reason="no", ended_at=time))
    store.put("plans/demo/notes/plan.json", b"somebody's")
    assert [run.time for run in list_runs(store, "demo")] == times
    assert [run.time for run in list_runs(store, "demo", since=times[1])] == times[1:]
    assert [run.time for run in list_runs(store, "demo", newest=1)] == times[2:]
    store.put("plans/demo/20261129T020000.000000Z/result.json", b"[]")
    middle = list_runs(store, "demo")[1]
    assert "result.json" in middle.damaged
    with pytest.raises(StoreError, match=r"result\.json"):
        read_run(store, "demo", times[1])
    with pytest.raises(InputError, match="fleet demo has no run of"):
        read_run(store, "demo", replace_hour(9))


def replace_hour(hour: int):
    return START.replace(hour=hour)


def test_an_order_of_another_request_for_the_same_node_conflicts(folder):
    cloud = opened(folder)
    cloud.start(FLEET, order(0))
    other = replace(order(0), zone="east-b")
    outcome = cloud.start(FLEET, other)
    assert isinstance(outcome, Refused)
    assert outcome.code == "IdempotentParameterMismatch"
