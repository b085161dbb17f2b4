"""Calibration finds what trying every point of both grids finds, and says where the goal is out of reach."""

from __future__ import annotations

import json
from itertools import product

import pytest
import yaml

from artifacts.store import open_store
from coral_core.cli.entry import run
from coral_core.config.policies import scenario_policies
from coral_core.domain.workload import Phase
from coral_core.errors import InputError
from tasks import calibrate as module
from tasks.calibrate import Search, Trial, Trials, calibrate
from tasks.executor import InlineExecutor
from tests.fakes.evaluation_cases import micro, resolved

SHARES = (0.25, 0.5, 0.75, 1.0)
PHASES = (Phase.PREFILL, Phase.DECODE)


def trial(headroom, goodput_frac, *, cost_usd_per_h=None, planned_full=True):
    shares = {phase.value: share for phase, (_, share) in headroom.items()}
    slo_frac = {phase.value: frac for phase, (frac, _) in headroom.items()}
    by_default = sum(1 / (share * slo_frac[phase] ** 0.5) for phase, share in shares.items())
    return Trial(
        model="phi-4",
        slo_frac=slo_frac,
        utilization=shares,
        cost_usd_per_h=by_default if cost_usd_per_h is None else cost_usd_per_h,
        planned_full=planned_full,
        goodput_frac=goodput_frac,
        without_handover_goodput_frac=1.0,
        latencies_s={},
    )


def search(good, *, plans=lambda headroom: True, handover=True) -> Search:
    """One whose trials reach `good(headroom)`, at costs that fall in every share."""

    def at(headroom):
        return trial(headroom, good(headroom), planned_full=plans(headroom))

    return Search(at, at, phases=PHASES, slo_fracs=SHARES, utilizations=SHARES, handover=handover)


def every_headroom():
    pairs = list(product(SHARES, SHARES))
    return [dict(zip(PHASES, chosen, strict=True)) for chosen in product(pairs, pairs)]


@pytest.mark.parametrize("prefill_limit", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("decode_limit", [0.3, 0.5, 1.0])
def test_phases_that_do_not_meet_get_the_cheapest_there_is(prefill_limit, decode_limit):
    limits = dict(zip(PHASES, (prefill_limit, decode_limit), strict=True))

    def good(headroom):
        return float(all(frac * share <= limits[phase] for phase, (frac, share) in headroom.items()))

    found = search(good).calibration("phi-4", 0.99)
    cheapest = min(trial(one, 1.0).cost_usd_per_h for one in every_headroom() if good(one))
    assert found.found.cost_usd_per_h == pytest.approx(cheapest)
    assert found.found.goodput_frac == 1.0
    assert found.without.goodput_frac == good(dict.fromkeys(PHASES, (1.0, 1.0)))
    assert len(found.trials) < len(every_headroom()) / 4


def test_phases_that_share_what_may_be_late_meet_the_target_together():
    def good(headroom):
        return 1 - sum(0.008 * frac * share for frac, share in headroom.values())

    found = search(good).calibration("phi-4", 0.99)
    assert 0.99 <= found.found.goodput_frac < 0.995
    assert good(dict.fromkeys(PHASES, (1.0, 1.0))) < 0.99


def test_shares_of_the_bounds_at_which_nothing_can_be_planned_are_left_out():
    def plans(headroom):
        return headroom[Phase.DECODE][0] > 0.5

    found = search(lambda _: 1.0, plans=plans).calibration("phi-4", 0.99)
    assert found.found.slo_frac == {"prefill": 1.0, "decode": 1.0}
    assert all(one.slo_frac["decode"] > 0.5 for one in found.trials)


def test_where_the_roomiest_plan_is_the_worse_one_the_next_is_tried():
    def good(headroom):
        return float(headroom[Phase.PREFILL][0] == 0.75)

    assert search(good).calibration("phi-4", 0.99).found.slo_frac["prefill"] == 0.75


def test_a_goal_out_of_reach_is_said_with_what_came_nearest():
    found = search(lambda headroom: 0.5 + 0.1 * headroom[Phase.DECODE][0]).calibration("phi-4", 0.99)
    assert found.found is None
    assert found.shown.slo_frac["decode"] == 1.0
    relaxed = search(lambda _: 0.5, handover=False).calibration("phi-4", 0.99)
    assert relaxed.found.utilization == {"prefill": 1.0, "decode": 1.0}
    assert not trial(dict.fromkeys(PHASES, (1.0, 1.0)), 1.0, planned_full=False).meets(target_frac=0.5, handover=True)


def calibrated(folder, *changes, **options):
    scenario = resolved(folder, *changes)
    store = open_store(options.pop("store", "memory://calibrate"))
    given = {"seeds": [0], "slo_fracs": (0.4, 1.0), "utilizations": (0.4, 0.7, 1.0), **options}
    return calibrate(scenario, scenario_policies(scenario)["coral"], store, InlineExecutor(), **given)


BUSY = ("requests_per_s: 4", "requests_per_s: 12")


def test_what_is_found_holds_in_the_simulator_and_is_cheaper_than_what_is_roomier(tmp_path):
    heard = []
    found = calibrated(tmp_path, BUSY, target_frac=0.95, on_trial=heard.append)
    assert found.complete
    (one,) = found.models
    assert one.found.planned_full
    assert one.found.goodput_frac >= 0.95 > one.without.goodput_frac
    assert one.found.latencies_s["ttft_bound"] == 1.2
    roomier = [t for t in one.trials if t.meets(target_frac=0.95, handover=True)]
    assert one.found.cost_usd_per_h == min(t.cost_usd_per_h for t in roomier)
    assert one.without.cost_usd_per_h <= one.found.cost_usd_per_h
    assert len(heard) <= len(one.trials)
    document = json.loads(json.dumps(found.document))
    assert document["headroom"]["phi-4"]["slo_frac"] == one.found.slo_frac
    assert document["kinds"]["goodput_frac"] == "simulated"


def test_the_yaml_is_the_scenarios_own_key(tmp_path):
    found = calibrated(tmp_path, target_frac=0.5)
    text = yaml.safe_load(found.capacity_yaml)["capacity"]
    assert text["headroom"]["phi-4"]["slo_frac"] == found.models[0].found.slo_frac
    line = "capacity: {max_utilization_frac: {prefill: 0.6, decode: 0.6}}"
    scenario = resolved(tmp_path, (line, found.capacity_yaml)).scenario
    utilization = found.models[0].found.utilization
    assert scenario.capacity.max_utilization_frac_of("phi-4", Phase.DECODE) == utilization["decode"]
    assert scenario.capacity.headroom_source.startswith("simulated, coral calibrate micro")


def test_trials_of_one_headroom_are_made_once(tmp_path):
    scenario = module._alone(resolved(tmp_path), 0, 2)
    assert scenario.scenario.epochs.count == 1
    heard = []
    trials = Trials(
        scenario,
        scenario_policies(scenario)["coral"],
        open_store("memory://calibrate"),
        InlineExecutor(),
        seeds=[0],
        on_trial=heard.append,
    )
    headroom = dict.fromkeys(PHASES, (0.4, 0.7))
    assert trials.simulated(headroom) == trials.simulated(headroom) == heard[0]
    assert trials.planned(headroom).goodput_frac == 0.0
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"utilizations": ()}, "not within"),
        ({"utilizations": (0.5, 1.2)}, "not within"),
        ({"slo_fracs": (0.0, 0.5)}, "not within"),
        ({"target_frac": 0.0}, "not in"),
    ],
)
def test_unusable_grids_and_targets_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        calibrated(tmp_path, **options)


@pytest.mark.parametrize("is_json", [True, False])
def test_the_command_says_what_to_put_into_the_scenario(tmp_path, monkeypatch, capsys, is_json):
    monkeypatch.chdir(tmp_path)
    limit = 0.7

    def simulated(self, headroom):
        return trial(headroom, float(all(share <= limit for _, share in headroom.values())))

    monkeypatch.setattr(Trials, "planned", simulated)
    monkeypatch.setattr(Trials, "simulated", simulated)
    path = micro(tmp_path)
    code = run(["calibrate", str(path), "--seeds", "0", *(["--json"] if is_json else [])])
    out = capsys.readouterr().out
    assert code == 0
    if is_json:
        assert json.loads(out)["headroom"]["phi-4"]["max_utilization_frac"] == {"prefill": 0.7, "decode": 0.7}
    else:
        assert "max_utilization_frac: {prefill: 0.7, decode: 0.7}" in out
    limit = 0.0
    assert run(["calibrate", str(path), *(["--json"] if is_json else [])]) == 3
    out = capsys.readouterr().out
    assert not json.loads(out)["complete"] if is_json else "not met at any headroom tried" in out
