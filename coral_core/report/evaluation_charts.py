"""The charts of an evaluation: from its summary and tables to figures of the page.

What is unknown stays out: a policy without service has no bar of goodput, an epoch without a plan interrupts its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from coral_core.domain.hardware import split_market
from coral_core.report.bar_chart import Bar, BarChart, bar_svg, letter
from coral_core.report.line_chart import Guide, Panel, Series, panel_svg
from coral_core.report.page import Figure, Key
from coral_core.report.palette import STYLES
from coral_core.report.scales import linear_ticks

Document = Mapping[str, Any]
Tables = Mapping[str, Sequence[Mapping[str, Any]]]

PREDICTED: Final = "predicted"
SIMULATED: Final = "simulated"
MEASURED: Final = "measured on the planning machine"
GIVEN: Final = "input of the scenario"
_KNOWN: Final = ("coral", "coral_paper", "homo_joint", "homo", "cauchy", "helix")
_DEMAND_STYLE: Final = STYLES - 1
_MOST_PARTS: Final = 8
_OTHERS: Final = "others"
_MANY_CHARTS: Final = 24
"""Above this many, distributions are drawn with half their points and few markers: the file must stay small."""
_BEYOND_SLO: Final = 3.0
"""Latencies are drawn up to this multiple of their bound: beyond it only how many there are matters."""


def policy_styles(document: Document) -> dict[str, int]:
    """Each policy's style, the same in all charts and all evaluations."""
    spare = iter(range(len(_KNOWN), len(_KNOWN) + len(document["policies"])))
    return {name: _KNOWN.index(name) if name in _KNOWN else next(spare) for name in document["policies"]}


def cost_figures(document: Document, tables: Tables) -> list[Figure]:
    """What each policy costs: on the mean of all epochs, and by epoch."""
    parts = ("provisioning", "start-up")
    bars = tuple(
        Bar(
            name=name,
            parts={parts[0]: one["provisioning_usd_per_h"], parts[1]: max(one["startup_usd_per_h"], 0.0)},
        )
        for name, one in document["policies"].items()
    )
    chart = BarChart(title="Mean over epochs", unit="USD/h", keys=parts, bars=bars)
    found = [_bar_figure("Cost by policy", PREDICTED, [chart])]
    by_epoch = _by_epoch(tables["epochs"], "cost_usd_per_h")
    return found + _epoch_figure(document, "Cost by epoch", PREDICTED, [("Cost", "USD/h", by_epoch)])


def breakdown_figures(document: Document, tables: Tables) -> list[Figure]:
    """What the money is spent on: phases, GPU types and models; means over epochs."""
    count = document["epochs"]

    def charts(title: str, sums: Mapping[tuple[str, str], float]) -> BarChart:
        totals: dict[str, float] = {}
        for (_, part), value in sums.items():
            totals[part] = totals.get(part, 0.0) + value
        ordered = sorted(totals, key=lambda part: (-totals[part], part))
        kept = ordered if len(ordered) <= _MOST_PARTS else ordered[: _MOST_PARTS - 1]
        keys = (*kept, *([f"{_OTHERS} ({len(ordered) - len(kept)})"] if len(kept) < len(ordered) else []))
        bars = []
        for name in document["policies"]:
            parts = {part: value / count for (policy, part), value in sums.items() if policy == name and part in kept}
            rest = sum(value / count for (policy, part), value in sums.items() if policy == name and part not in kept)
            bars.append(Bar(name=name, parts={**parts, **({keys[-1]: rest} if rest else {})}))
        return BarChart(title=title, unit="USD/h", keys=keys, bars=tuple(bars))

    found = []
    for title, sums in (
        ("by phase", _sums((row["policy"], row["phase"], row["provisioning_usd_per_h"]) for row in tables["costs"])),
        ("by GPU type", _sums(_gpu_costs(document, tables))),
        ("by model", _sums((row["policy"], row["model"], row["provisioning_usd_per_h"]) for row in tables["costs"])),
    ):
        if sums:
            chart = charts("Provisioning, mean over epochs", sums)
            caption = f"All of it is {chart.keys[0]}." if len(chart.keys) == 1 else ""
            found.append(_bar_figure(f"Cost {title}", PREDICTED, [chart], caption=caption))
    return found


def goodput_figures(document: Document, tables: Tables) -> list[Figure]:
    """Goodput beside demand, over all epochs and by epoch; supply and what the plans say they miss."""
    simulated = {name: one for name, one in document["policies"].items() if one["goodput_tokens_per_s"] is not None}
    found: list[Figure] = []
    if simulated:
        bars = tuple(
            Bar(
                name=name,
                parts={"goodput": one["goodput_tokens_per_s"]},
                low=one["intervals"]["goodput_tokens_per_s"]["low"],
                high=one["intervals"]["goodput_tokens_per_s"]["high"],
            )
            for name, one in simulated.items()
        )
        offered = max(one["offered_tokens_per_s"] for one in simulated.values())
        chart = BarChart(
            title="Mean over seeds",
            unit="tokens/s",
            keys=("goodput",),
            bars=bars,
            guide=(offered, "demand"),
        )
        many = len(document["seeds"]) > 1
        caption = "Whiskers: 95% confidence interval over seeds." if many else "One seed: no confidence interval."
        found.append(_bar_figure("Goodput by policy", SIMULATED, [chart], caption=caption))
    whole = [row for row in tables["service"] if row["model"] == "*" and row["epoch"] is not None]
    demand = Series(
        name="demand",
        points=tuple((x, y) for x, y in sorted(_mean_by(whole, "epoch", "offered_tokens_per_s").items())),
        style=_DEMAND_STYLE,
    )
    found += _epoch_figure(
        document,
        "Goodput by epoch",
        SIMULATED,
        [
            ("Goodput and demand", "tokens/s", _by_epoch(whole, "goodput_tokens_per_s")),
            ("Requests within their SLO", "%", _by_epoch(whole, "attainment_frac", 100.0)),
        ],
        extra=demand,
    )
    found += _epoch_figure(
        document,
        "Demand that the plans do not meet",
        PREDICTED,
        [("Greatest shortfall of a model and phase", "%", _by_epoch(tables["epochs"], "shortfall_frac", 100.0))],
    )
    supply = tuple((float(epoch), float(nodes)) for epoch, nodes in enumerate(document["supply_nodes"]))
    if len(supply) > 1:
        panel = Panel(
            title="Nodes to be had, all regions and types",
            x_label="epoch",
            y_label="nodes",
            series=(Series(name="supply", points=supply, style=_DEMAND_STYLE),),
        )
        keys = (Key(name="supply", style=_DEMAND_STYLE),)
        found.append(Figure(title="Supply by epoch", kind=GIVEN, charts=((panel.title, panel_svg(panel)),), keys=keys))
    return found


def latency_figures(document: Document, tables: Tables) -> list[Figure]:
    """The distributions of both latencies, a pair of charts for each model."""
    rows: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in tables.get("latencies", ()):
        rows.setdefault((row["model"], row["latency"]), {}).setdefault(row["policy"], []).append(row)
    styles = policy_styles(document)
    thin = 1 if len(rows) <= _MANY_CHARTS else 2
    charts = []
    for (model, latency), by_policy in sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] != "ttft")):
        slo_s = document["slos"][model][f"{latency}_s"]
        curves = {name: _curve([*found[:-1:thin], found[-1]], latency) for name, found in by_policy.items()}
        highest = max(points[-1][0] for points in curves.values())
        end_s = linear_ticks(min(max(highest, 1.25 * slo_s), _BEYOND_SLO * slo_s))[-1]
        what = "time to first token" if latency == "ttft" else "time per output token"
        panel = Panel(
            title=f"{model}: {latency.upper()}",
            x_label=f"{what} (s)",
            y_label="% of requests",
            series=tuple(
                Series(name=name, points=_until(points, end_s), style=styles[name]) for name, points in curves.items()
            ),
            guides=(Guide(value=slo_s, label=f"SLO {slo_s:g} s", axis="x"),),
            x_end=end_s,
            y_end=100.0,
            is_brief=thin > 1,
        )
        charts.append((panel.title, panel_svg(panel)))
    if not charts:
        return []
    seed = next(iter(tables["latencies"]))["seed"]
    caption = (
        f"Share of requests at most so late, seed {seed}. TTFT: of all requests offered, so that a line that ends below "
        "100% says how many never got a first token. TPOT: of the requests that finished with more than one token. "
        f"Drawn up to about {_BEYOND_SLO:g} times the SLO."
    )
    keys = tuple(Key(name=name, style=style) for name, style in styles.items())
    title = "Latencies by model"
    return [
        Figure(title=title, kind=SIMULATED, charts=tuple(charts), keys=keys, caption=caption, in_pairs=True),
    ]


def solve_figures(document: Document, tables: Tables) -> list[Figure]:
    """Wall time of planning one epoch."""
    bars = tuple(Bar(name=name, parts={"solve": one["solve_s"]["mean"]}) for name, one in document["policies"].items())
    chart = BarChart(title="Mean over epochs", unit="s", keys=("solve",), bars=bars)
    found = [_bar_figure("Solve time by policy", MEASURED, [chart])]
    return found + _epoch_figure(
        document,
        "Solve time by epoch",
        MEASURED,
        [("Solve time of one plan", "s", _by_epoch(tables["epochs"], "solve_s"))],
    )


def instance_figures(document: Document) -> list[Figure]:
    """Instances, and how many of them mix node configurations; means over epochs."""
    keys = ("one configuration", "mixed configurations")
    bars = []
    for name, one in document["policies"].items():
        mixed, count = one["mixed_instances"], one["instances"]
        bars.append(Bar(name=name, parts={} if mixed is None else {keys[0]: count - mixed, keys[1]: mixed}))
    chart = BarChart(title="Mean over epochs", unit="instances", keys=keys, bars=tuple(bars))
    caption = "Unknown where a policy plans nodes of a fixed pool instead of templates." if _has_unknown(bars) else ""
    return [_bar_figure("Instances by policy", PREDICTED, [chart], caption=caption)]


def _has_unknown(bars: Iterable[Bar]) -> bool:
    return any(not bar.parts for bar in bars)


def _bar_figure(title: str, kind: str, charts: Sequence[BarChart], *, caption: str = "") -> Figure:
    names = charts[0].keys
    keys = tuple(Key(name=name, style=i, letter=letter(i)) for i, name in enumerate(names)) if len(names) > 1 else ()
    return Figure(
        title=title,
        kind=kind,
        charts=tuple((chart.title, bar_svg(chart)) for chart in charts),
        keys=keys,
        caption=caption,
    )


def _epoch_figure(
    document: Document,
    title: str,
    kind: str,
    panels: Sequence[tuple[str, str, Mapping[str, Mapping[float, float]]]],
    *,
    extra: Series | None = None,
) -> list[Figure]:
    """A line for each policy over the epochs, `extra` in the first panel; nothing where there is a single epoch."""
    count = document["epochs"]
    styles = policy_styles(document)
    charts = []
    for i, (name, unit, values) in enumerate(panels):
        series = [
            Series(
                name=policy,
                points=tuple((float(epoch), values[policy].get(epoch)) for epoch in range(count)),
                style=style,
            )
            for policy, style in styles.items()
            if values.get(policy)
        ]
        if series and extra is not None and i == 0 and extra.points:
            series.append(extra)
        if series:
            panel = Panel(title=name, x_label="epoch", y_label=unit, series=tuple(series))
            charts.append((name, panel_svg(panel)))
    if count < 2 or not charts:
        return []
    keys = [Key(name=policy, style=style) for policy, style in styles.items()]
    keys += [Key(name=extra.name, style=_DEMAND_STYLE)] if extra is not None else []
    return [Figure(title=title, kind=kind, charts=tuple(charts), keys=tuple(keys))]


def _by_epoch(rows: Iterable[Mapping[str, Any]], column: str, factor: float = 1.0) -> dict[str, dict[float, float]]:
    """By policy: the mean of a column over the rows of each epoch; epochs without a known value are left out."""
    by_policy: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row)
    return {
        policy: {epoch: factor * value for epoch, value in _mean_by(found, "epoch", column).items()}
        for policy, found in by_policy.items()
    }


def _mean_by(rows: Iterable[Mapping[str, Any]], key: str, column: str) -> dict[float, float]:
    values: dict[float, list[float]] = {}
    for row in rows:
        if row[column] is not None:
            values.setdefault(float(row[key]), []).append(row[column])
    return {at: fmean(found) for at, found in values.items()}


def _sums(items: Iterable[tuple[str, str, float]]) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = {}
    for policy, part, value in items:
        sums[policy, part] = sums.get((policy, part), 0.0) + value
    return sums


def _gpu_costs(document: Document, tables: Tables) -> Iterable[tuple[str, str, float]]:
    """(policy, GPU type, USD/h) of every node of every instance: its price, shared out as the nodes cost on demand."""
    for row in tables["instances"]:
        if row["stages"] is None or row["price_usd_per_h"] is None:
            continue
        facts = [document["nodes"][split_market(name)[0]] for stage in row["stages"] for name in stage["nodes"]]
        for fact, share in zip(facts, price_shares(facts, row["region"]), strict=True):
            yield row["policy"], fact["gpu"], row["count"] * row["price_usd_per_h"] * share


def price_shares(facts: Sequence[Mapping[str, Any]], region: str) -> list[float]:
    """The share of each node in the price of an instance; by its GPUs where a node's price there is not known."""
    prices = [fact["price_usd_per_h"].get(region) for fact in facts]
    weights = [price for price in prices if price]
    if len(weights) < len(facts):
        weights = [float(fact["gpu_count"]) for fact in facts]
    return [weight / sum(weights) for weight in weights]


def _curve(rows: Sequence[Mapping[str, Any]], latency: str) -> list[tuple[float, float]]:
    """(seconds, percent of requests) of one policy's requests for a model."""
    first = rows[0]
    share = first["measured_requests"] / first["offered_requests"] if latency == "ttft" else 1.0
    return [(row["value_s"], 100.0 * share * row["frac"]) for row in rows]


def _until(points: Sequence[tuple[float, float]], end: float) -> tuple[tuple[float, float], ...]:
    """The points up to `end`, the line there between its neighbours."""
    kept = [point for point in points if point[0] <= end]
    rest = points[len(kept) :]
    if not kept:
        return ((0.0, 0.0), (end, 0.0))
    if rest:
        (x0, y0), (x1, y1) = kept[-1], rest[0]
        kept.append((end, y0 + (y1 - y0) * (end - x0) / (x1 - x0)))
    else:
        kept.append((end, kept[-1][1]))
    return tuple(kept)


def total_by(rows: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], str]) -> dict[str, float]:
    """USD/h of instances, summed by what `key` says of them; those of unknown price are left out."""
    sums: dict[str, float] = {}
    for row in rows:
        if row["price_usd_per_h"] is not None:
            sums[key(row)] = sums.get(key(row), 0.0) + row["count"] * row["price_usd_per_h"]
    return sums
