"""Scenario keys for variants, spot nodes, exclusions, preferences, budget and guarantees: what they mean, what is refused."""

from __future__ import annotations

import csv
import math
from datetime import UTC, datetime

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.allocation.policies import POLICIES
from coral_core.catalog import load_catalog
from coral_core.catalog.spot import SPOT_COLUMNS, load_spot, read_spot
from coral_core.cli.work import resolved_scenario
from coral_core.cloud.supply import OfferState, Reading, Supply
from coral_core.config.resolve import allocation_problem, available_nodes, node_prices, resolve_scenario
from coral_core.config.scenario import Scenario, load_scenario
from coral_core.config.spot import HOURS_PER_MONTH, with_spot_twins
from coral_core.domain.allocation import Exclusion, Preference, TemplateColumns
from coral_core.domain.hardware import Market, market_name, split_market
from coral_core.domain.workload import Phase
from coral_core.errors import DataGapError, InputError
from tasks.library import build_spec_from_scenario
from tasks.observe import with_observed_prices

YAML = """
name: levers
catalog: paper-core
configs: [1xL40S, 1xL4]
regions: [us-east-2, ap-northeast-2]
models:
  - model: phi-4
    variants: [bf16, fp8]
    requests_per_s: 10
    lengths: azure-conv
    slo: {ttft_s: 1.2, tpot_s: 0.06}
    on_demand_frac: 0.5
    spare_instances: 1
    region_fracs: {us-east-2: 0.25}
spot:
  nodes: 4
  configs:
    1xL4: {price_usd_per_h: {us-east-2: 0.3}, nodes: {us-east-2: 2}, source: our bill, as_of: 2026-11-01}
  default: {price_frac: 0.5, interruptions_per_h: 0.01, source: a guess, as_of: 2026-10-01}
exclusions:
  - {config: 1xL4, region: ap-northeast-2}
  - {model: phi-4, config: 1xL40S@spot}
preferences:
  - {region: ap-northeast-2, price_factor: 1.1}
  - {config: 1xL40S, price_factor: 0.9}
allocation: {budget_usd_per_h: 30}
"""
TEMPLATES = TemplateColumns(
    ids=("p", "d", "mix"),
    models=("phi-4",) * 3,
    phases=(Phase.PREFILL, Phase.DECODE, Phase.DECODE),
    nodes=np.array([[0, 2], [1, 0], [1, 1]]),
    throughput=np.array([6000.0, 1100.0, 1500.0]),
    variants=("bf16", "fp8", "fp8"),
)


def resolved(*changes):
    text = YAML
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    data = yaml.safe_load(text)
    return resolve_scenario(Scenario.model_validate(data))


def test_a_problem_carries_all_that_the_scenario_asks_for():
    problem = allocation_problem(resolved(), TEMPLATES)
    assert problem.configs == ("1xL40S", "1xL4", "1xL40S@spot", "1xL4@spot")
    assert problem.spot_configs == ("1xL40S@spot", "1xL4@spot")
    assert [(row.phase, row.on_demand_frac, row.spare_instances, row.region_fracs) for row in problem.demand] == [
        (phase, 0.5, 1, (("us-east-2", 0.25),)) for phase in (Phase.PREFILL, Phase.DECODE)
    ]
    # a plain name stands for both markets, a name with a market for that one
    assert problem.exclusions == (
        Exclusion(config="1xL4", region="ap-northeast-2"),
        Exclusion(config="1xL4@spot", region="ap-northeast-2"),
        Exclusion(model="phi-4", config="1xL40S@spot"),
    )
    assert problem.preferences == (
        Preference(region="ap-northeast-2", price_factor=1.1),
        Preference(config="1xL40S", price_factor=0.9),
        Preference(config="1xL40S@spot", price_factor=0.9),
    )
    assert problem.options.budget_usd_per_h == 30


def test_spot_nodes_have_their_own_prices_and_supply_and_none_where_none_is_named():
    scenario = resolved()
    prices, on_demand = node_prices(scenario), load_catalog("paper-core").prices
    for r, region in enumerate(scenario.scenario.regions):
        base = on_demand[region, "1xL40S", Market.ON_DEMAND].price_usd_per_h
        assert prices[r, 0] == base
        assert prices[r, 2] == pytest.approx(base / 2)
    assert prices[0, 3] == 0.3
    assert math.isnan(prices[1, 3])
    problem = allocation_problem(scenario, TEMPLATES)
    assert problem.available.tolist() == [[10_000, 10_000, 4, 2], [10_000, 10_000, 4, 0]]
    assert scenario.spot.interruptions_per_h == {("us-east-2", "1xL40S"): 0.01, ("ap-northeast-2", "1xL40S"): 0.01}
    assert scenario.spot.sources == ("a guess", "our bill")
    assert scenario.spot.as_of.isoformat() == "2026-10-01"


def test_every_epoch_has_the_same_spot_supply_and_a_scarce_one_is_measured_on_demand():
    walk = "availability: {kind: random_walk, seed: 1, memory_frac_of_ample: 1.5}\nepochs: {count: 3}\nexclusions:"
    scarcity = (("exclusions:", walk), ("allocation: {budget_usd_per_h: 30}", ""), ("spare_instances: 1", ""))
    supply = available_nodes(resolved(*scarcity), TEMPLATES)
    assert supply.shape == (3, 2, 4)
    assert (supply[:, :, 2:] == [[4, 2], [4, 0]]).all()
    # spot nodes for next to nothing would leave little on demand to measure, were they part of the ample plan
    cheap = resolved(("nodes: 4", "nodes: 10000"), ("price_frac: 0.5", "price_frac: 0.001"), *scarcity)
    assert (available_nodes(cheap, TEMPLATES)[:, :, :2] == supply[:, :, :2]).all()
    assert supply[:, :, :2].any()


def test_the_catalogues_discounts_are_taken_where_they_are_known():
    text = YAML.replace("catalog: paper-core", "catalog: aws-real").replace("[1xL40S, 1xL4]", "[g6e.xlarge, g6.xlarge]")
    text = text.replace("ap-northeast-2", "us-west-2")
    head, tail = text.split("spot:\n")[0], "allocation: {budget_usd_per_h: 30}\n"
    found = resolve_scenario(
        Scenario.model_validate(yaml.safe_load(f"{head}spot: {{nodes: 3, from_catalog: true}}\n{tail}"))
    )
    facts, prices = load_spot("aws-real"), node_prices(found)
    for r, region in enumerate(found.scenario.regions):
        for c, config in enumerate(("g6e.xlarge", "g6.xlarge")):
            fact = facts[region, config]
            assert prices[r, 2 + c] == pytest.approx(prices[r, c] * (1 - fact.saving_frac))
            rate = found.spot.interruptions_per_h.get((region, config))
            share = fact.interrupted_frac_per_month_to
            # an open range is not known, and not known is not zero
            assert (rate is None) == (share is None)
            assert rate is None or 1 - math.exp(-rate * HOURS_PER_MONTH) == pytest.approx(share)


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ("[bf16, fp8]", "[bf16, fp9]", InputError, r"models\[0\]\.variants\[1\]: unknown variant .* 'fp9'"),
        ("variants: [bf16, fp8]", "variant: fp9", InputError, r"models\[0\]\.variant: unknown variant"),
        ("us-east-2: 0.25", "mars: 0.25", InputError, r"models\[0\]\.region_fracs\.mars: unknown region"),
        ("config: 1xL4,", "config: 1xL5,", InputError, r"exclusions\[0\]\.config: unknown configuration"),
        ("1xL40S@spot", "1xA100@spot", InputError, r"exclusions\[1\]\.config"),
        ("model: phi-4, config", "model: phi-5, config", InputError, r"exclusions\[1\]\.model: unknown model"),
        ("{region: ap-northeast-2, p", "{region: mars, p", InputError, r"preferences\[0\]\.region: unknown region"),
        ("    1xL4: {", "    1xL5: {", InputError, r"spot\.configs\.1xL5: unknown configuration"),
        ("_h: {us-east-2: 0.3}", "_h: {mars: 0.3}", InputError, r"spot\.configs\.1xL4\.price_usd_per_h\.mars"),
        ("nodes: {us-east-2: 2}", "nodes: {mars: 2}", InputError, r"spot\.configs\.1xL4\.nodes\.mars"),
        ("{price_frac: 0.5", "{nodes: {mars: 1}, price_frac: 0.5", InputError, r"spot\.default\.nodes\.mars"),
    ],
)
def test_unknown_names_are_refused_with_their_place(old, new, error, words):
    with pytest.raises(error, match=words):
        resolved((old, new))


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("[bf16, fp8]", "[fp8, fp8]", 8, "variant 'fp8' is given twice"),
        ("[bf16, fp8]", "[]", 8, "at least 1"),
        ("    variants", "    variant: bf16\n    variants", 7, "give either variant or variants"),
        ("spare_instances: 1", "spare_instances: 2", 13, "less than or equal to 1"),
        ("on_demand_frac: 0.5", "on_demand_frac: 1.5", 12, "less than or equal to 1"),
        ("us-east-2: 0.25", "us-east-2: 0.6, ap-northeast-2: 0.6", 14, "add up to 1.2"),
        ("  nodes: 4\n", "", 15, "required"),
        ("{price_usd_per_h: {us-east-2: 0.3}, n", "{n", 18, "price_frac or price_usd_per_h"),
        ("{price_usd_per_h", "{price_frac: 0.5, price_usd_per_h", 18, "price_frac or price_usd_per_h"),
        ("price_frac: 0.5", "price_frac: 1.5", 19, "less than or equal to 1"),
        ("price_frac: 0.5", "price_usd_per_h: {us-east-2: 1.0}", 19, "unknown key"),
        ("{config: 1xL4, region: ap-northeast-2}", "{}", 21, "it names everything"),
        ("price_factor: 1.1", "price_factor: 0", 24, "greater than 0"),
        (", price_factor: 1.1", "", 24, "required"),
        ("budget_usd_per_h: 30", "budget_usd_per_h: .nan", 26, "budget_usd_per_h"),
    ],
)
def test_values_without_a_meaning_are_refused_with_their_line(tmp_path, old, new, line, words):
    path = tmp_path / "mine.yaml"
    assert old in YAML
    path.write_text(YAML.replace(old, new))
    with pytest.raises(InputError, match=words) as caught:
        load_scenario(str(path))
    assert caught.value.where == f"{path}:{line}"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("us-east-2: 0.25", "mars: 0.25", "mine.yaml:14: models[0].region_fracs.mars: unknown region"),
        ("config: 1xL4,", "config: 1xL5,", "mine.yaml:21: exclusions[0].config: unknown configuration"),
        ("    1xL4: {", "    1xL5: {", "mine.yaml:18: spot.configs.1xL5: unknown configuration"),
    ],
)
def test_the_command_line_names_the_line_of_an_unknown_name(tmp_path, monkeypatch, old, new, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(YAML.replace(old, new))
    with pytest.raises(InputError) as caught:
        resolved_scenario("mine.yaml")
    assert str(caught.value).startswith(place)


def test_a_spot_market_that_offers_nothing_is_refused():
    with pytest.raises(ValueError, match="it offers nothing"):
        Scenario.model_validate({**yaml.safe_load(YAML), "spot": {"nodes": 4}})
    nowhere = {"price_usd_per_h": {"us-east-2": 0.3}, "source": "x", "as_of": "2026-10-01"}
    with pytest.raises(DataGapError, match="no spot price is known"):
        resolve_scenario(
            Scenario.model_validate(
                {
                    **yaml.safe_load(YAML),
                    "regions": ["ap-northeast-2"],
                    "models": [{**yaml.safe_load(YAML)["models"][0], "region_fracs": {}}],
                    "spot": {"nodes": 4, "from_catalog": True},
                }
            )
        )
    with pytest.raises(InputError, match=r"price_usd_per_h\.us-east-2"):
        resolve_scenario(
            Scenario.model_validate(
                {
                    **yaml.safe_load(YAML),
                    "regions": ["ap-northeast-2"],
                    "models": [{**yaml.safe_load(YAML)["models"][0], "region_fracs": {}}],
                    "spot": {"nodes": 4, "configs": {"1xL4": nowhere}},
                }
            )
        )


def test_measured_times_and_own_names_of_spot_nodes_are_refused():
    data = yaml.safe_load(YAML)
    times = {"table": "t.csv", "model": "m", "nodes": {"1xL4": {"node": "l4", "max_layers": 4}}}
    with pytest.raises(ValueError, match="phi-4 has several"):
        Scenario.model_validate({**data, "capacity": {"layer_times": times}})
    own = {
        "gpu": "L4",
        "gpu_count": 1,
        "nic_gbit_per_s": 10,
        "price_usd_per_h": {"us-east-2": 1.0},
        "source": "x",
        "as_of": "2026-10-01",
    }
    with pytest.raises(InputError, match=r"own_configs\.mine@spot"):
        resolve_scenario(Scenario.model_validate({**data, "own_configs": {"mine@spot": own}}))


def test_a_library_has_every_variant():
    spec = build_spec_from_scenario(resolved())
    assert [(model.shape.name, model.variant) for model in spec.models] == [("phi-4", "bf16"), ("phi-4", "fp8")]


@st.composite
def libraries(draw):
    n, c = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    nodes = np.array([[draw(st.integers(0, 2)) for _ in range(c)] for _ in range(n)], dtype=np.int64).reshape(n, c)
    names = [f"c{i}" for i in range(c)]
    offered = tuple(name for name in names if draw(st.booleans()))
    columns = TemplateColumns(
        ids=tuple(f"t{i}" for i in range(n)),
        models=("m",) * n,
        phases=(Phase.DECODE,) * n,
        nodes=nodes,
        throughput=np.arange(n, dtype=np.float64),
        variants=draw(st.sampled_from([None, ("v",) * n])),
    )
    return columns, names, offered


@given(case=libraries())
@settings(max_examples=60, deadline=None)
def test_twins_are_the_same_templates_on_spot_nodes_wherever_all_their_nodes_are_offered(case):
    columns, names, offered = case
    both = with_spot_twins(columns, names, offered)
    all_names = [*names, *(market_name(name, Market.SPOT) for name in offered)]
    assert both.nodes.shape == (len(both), len(all_names))
    assert len(set(both.ids)) == len(both)
    original = {name: t for t, name in enumerate(columns.ids)}
    markets = {}
    for t, name in enumerate(both.ids):
        base, market = split_market(name)
        markets.setdefault(base, set()).add(market)
        i = original[base]
        assert (both.models[t], both.phases[t], both.throughput[t]) == ("m", Phase.DECODE, columns.throughput[i])
        used = {split_market(all_names[c]): int(n) for c, n in enumerate(both.nodes[t]) if n}
        assert used == {(names[c], market): int(n) for c, n in enumerate(columns.nodes[i]) if n}
    for base, i in original.items():
        can = offered and all(names[c] in offered for c in np.flatnonzero(columns.nodes[i]))
        assert markets[base] == ({Market.ON_DEMAND, Market.SPOT} if can else {Market.ON_DEMAND})
    assert (both.variants is None) == (columns.variants is None)


def test_every_policy_takes_a_scenario_with_variants_and_spot():
    scenario = resolved(("spare_instances: 1", "spare_instances: 0"))
    problem = allocation_problem(scenario, TEMPLATES)
    for policy in POLICIES.values():
        assert policy.solve(problem).method == policy.name


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("saving_pct", "0", "saving_pct is '0', must be a number above 0"),
        ("saving_pct", "100", "a saving below 100"),
        ("interrupted_pct_per_month_from", "x", "interrupted_pct_per_month_from is 'x'"),
        ("interrupted_pct_per_month_to", "3", "from below to"),
        ("interrupted_pct_per_month_to", "101", "from below to"),
        ("config", "g6.huge", "unknown config 'g6.huge'"),
        ("as_of", "June", "as_of is 'June', must be a date"),
    ],
)
def test_a_wrong_cell_of_spot_facts_is_named(tmp_path, column, value, words):
    cells = dict(zip(SPOT_COLUMNS, ["g6.xlarge", "us-east-1", "49", "5", "10", "test", "2025-06-01"], strict=True))
    path = tmp_path / "spot.csv"
    path.write_text(",".join(SPOT_COLUMNS) + "\n" + ",".join((cells | {column: value}).values()) + "\n")
    with pytest.raises(InputError, match=words) as caught:
        read_spot(path, load_catalog("aws-real").configs)
    assert caught.value.where == "spot.csv:2"


def test_spot_facts_are_shares_of_offers_that_are_sold_and_unknown_catalogues_are_refused():
    catalog, facts = load_catalog("aws-real"), load_spot("aws-real")
    assert len(facts) > 200
    for (region, config), fact in facts.items():
        assert (region, config, Market.ON_DEMAND) in catalog.prices
        assert 0 < fact.saving_frac < 1
    assert load_spot("paper-core") == {}
    with pytest.raises(InputError, match="did you mean"):
        load_spot("aws-reel")


def test_spot_facts_are_those_of_the_reference(reference_data):
    with (reference_data / "prices" / "aws_spot_advisor_gpu.csv").open(newline="", encoding="utf-8") as file:
        rows = {(row["region"], row["instance_type"]): row for row in csv.DictReader(file)}
    shares = {"<5%": (0, 5), "5-10%": (5, 10), "10-15%": (10, 15), "15-20%": (15, 20), ">20%": (20, None)}
    facts = load_spot("aws-real")
    for key, fact in facts.items():
        assert fact.saving_frac == int(rows[key]["savings_vs_od_pct"]) / 100
        low, high = shares[rows[key]["interrupt_label_pct_month"]]
        assert fact.interrupted_frac_per_month_from == low / 100
        assert fact.interrupted_frac_per_month_to == (None if high is None else high / 100)
    # left out: what is not in our catalogue, and spot nodes that cost more than on demand
    left_out = [row for key, row in rows.items() if key in set(_sold()) - set(facts)]
    assert all(int(row["savings_vs_od_pct"]) <= 0 for row in left_out)


def _sold():
    return [(region, config) for region, config, _ in load_catalog("aws-real").prices]


def test_observed_spot_prices_replace_what_the_scenario_says_of_theirs():
    seen = datetime(2026, 11, 20, tzinfo=UTC)

    def state(usd_per_h):
        price = Reading(value=usd_per_h, as_of=seen, source="price history")
        return OfferState(
            available=Reading(value=3, as_of=seen, source="quota"), price_usd_per_h=price, zones=(), held=0
        )

    offers = {("us-east-2", "1xL4", Market.ON_DEMAND): state(0.9), ("us-east-2", "1xL4", Market.SPOT): state(0.31)}
    found = with_observed_prices(resolved(), Supply(as_of=seen, offers=offers, pools=()))
    assert (found.spot.sources, found.spot.as_of.isoformat()) == (("price history",), "2026-11-20")
    assert set(found.catalog.prices) == {("us-east-2", "1xL4", Market.ON_DEMAND)}
    unseen = with_observed_prices(resolved(), Supply(as_of=seen, offers={}, pools=()))
    assert unseen.spot.sources == ("a guess", "our bill")
