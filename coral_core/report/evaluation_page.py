"""The page of an evaluation: what it found, drawn and in tables, each figure with its kind, and what it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from coral_core.report import evaluation_charts as charts
from coral_core.report.evaluation_report import (
    epochs_table,
    evaluation_notes,
    models_table,
    percent,
    policies_table,
    ratios_table,
)
from coral_core.report.figures import figure, nodes_text, stages_text, usd
from coral_core.report.page import Block, Details, Figure, Page, Pipelines, Section, Tile, ident_of, render_page
from coral_core.report.pipelines import pipelines_of
from coral_core.report.plan_report import PlanTable
from coral_core.report.region_map import map_svg, spots
from coral_core.report.sensitivity_report import sensitivity_figure

Document = Mapping[str, Any]
Tables = Mapping[str, Sequence[Mapping[str, Any]]]

_MOST_PIPELINES: Final = 120
_MOST_BESIDE: Final = 30
"""Pipelines drawn of the policy that the page is about, and of each other one: the file must stay small."""


def evaluation_html(
    document: Document, tables: Tables, *, time: str, sensitivity: Sequence[Mapping[str, Any]] = ()
) -> str:
    """One self-contained HTML file. `time` says when it was made, `sensitivity` are points of a sweep of the scenario.

    Raises InputError where jinja2 is not installed.
    """
    return render_page(evaluation_page(document, tables, time=time, sensitivity=sensitivity))


def evaluation_page(
    document: Document, tables: Tables, *, time: str, sensitivity: Sequence[Mapping[str, Any]] = ()
) -> Page:
    """The page's content."""
    subject = page_subject(document)
    sections: list[tuple[str, str, Sequence[Block | None]]] = [
        ("Policies side by side", _SIDE_BY_SIDE, [policies_table(document)]),
        ("Against the baselines", _RATIOS, [ratios_table(document, name) for name in document["ratios"]]),
        ("Cost", "", [*charts.cost_figures(document, tables), *charts.breakdown_figures(document, tables)]),
        ("Goodput", _GOODPUT, charts.goodput_figures(document, tables)),
        ("Latencies", "", [*charts.latency_figures(document, tables), *_opened(models_table(document))]),
        ("Chosen templates", _PIPELINES, _pipelines(document, tables, subject)),
        ("Regions", "", _regions(document, tables, subject)),
        ("Instances", _MIXED, charts.instance_figures(document)),
        ("Solve times", "", [*charts.solve_figures(document, tables), *_opened(epochs_table(tables))]),
        ("Sensitivity", _SENSITIVITY, [sensitivity_figure(sensitivity)]),
        ("Inputs", _INPUTS, _inputs(document)),
    ]
    return Page(
        title=f"Evaluation of {document['scenario']}",
        subtitle=f"{document['inputs'].get('description') or 'A comparison of policies.'} Made {time}.",
        tiles=tuple(_tiles(document, subject)),
        warnings=tuple(_warnings(document, subject)),
        notes=tuple(evaluation_notes({**document, "failed": {}})),  # failures stand among the warnings
        sections=tuple(
            Section(ident=ident_of([title]), title=title, text=text, blocks=tuple(found))
            for title, text, blocks in sections
            if (found := [block for block in blocks if block is not None and _has_content(block)])
        ),
        footer=(
            "Costs, throughputs and shortfalls of plans are predicted at list prices; service is simulated; solve times "
            "are measured on the machine that planned. Nothing on this page was measured on GPUs."
        ),
    )


_SIDE_BY_SIDE: Final = "All policies plan for the same demand and supply, and meet the same simulated requests."
_RATIOS: Final = (
    "A cost ratio above 1 says that the other policy is dearer, a goodput ratio above 1 that the other serves less. "
    "Intervals are of 95% over seeds; costs are those of plans and do not depend on the seed."
)
_GOODPUT: Final = "Goodput counts the generated tokens of requests that met both latency bounds of their model."
_PIPELINES: Final = (
    "Each box is a stage of a pipeline: how many of the model's layers it holds, and the nodes that share its work."
)
_OPEN: Final = ("within error", "error not known")
"""Verdicts that leave open which plan is cheaper."""
_MIXED: Final = "An instance is mixed where one pipeline runs on nodes of more than one configuration."
_SENSITIVITY: Final = "The newest stored sweep of this scenario: how large a library needs to be."
_INPUTS: Final = "With the same inputs the plans and simulated figures come out the same."


def page_subject(document: Document) -> str:
    """The policy that the page is about: Coral where it is among them, else the first."""
    names = list(document["policies"])
    return "coral" if "coral" in names else names[0]


def _has_content(block: Block) -> bool:
    match block:
        case PlanTable(rows=rows) | Details(table=PlanTable(rows=rows)):
            return bool(rows)
        case Pipelines(pipelines=found):
            return bool(found)
        case _:
            return True


def _opened(table: PlanTable) -> list[Block]:
    return [Details(table=table)]


def _tiles(document: Document, subject: str) -> list[Tile]:
    one = document["policies"][subject]
    goodput = one["goodput_tokens_per_s"]
    tiles = [
        Tile(
            label=f"{subject}: cost",
            value=f"{usd(one['cost_usd_per_h'])} USD/h",
            kind=charts.PREDICTED,
            note=f"of it {usd(one['startup_usd_per_h'])} start-up",
        ),
        Tile(
            label=f"{subject}: goodput",
            value="not simulated" if goodput is None else f"{figure(goodput)} tokens/s",
            kind=charts.SIMULATED,
            note="" if goodput is None else f"of {figure(one['offered_tokens_per_s'])} asked for",
        ),
        Tile(
            label=f"{subject}: requests within their SLO",
            value=percent(one["attainment_frac"]),
            kind=charts.SIMULATED,
        ),
    ]
    for name, ratio in document["ratios"].get(subject, {}).items():
        published = (ratio["published"] or {}).get("cost_ratio")
        value = ratio["cost_ratio"]
        short = document["policies"][name]["shortfall_frac"]
        remarks = [f"leaves up to {short:.1%} of a model's demand unserved"] if short else []
        remarks += [] if published is None else [f"published: {published:.3g}"]
        verdict = ratio.get("cost_verdict")
        remarks += [verdict] if verdict in _OPEN else []
        tiles.append(
            Tile(
                label=f"{name}: cost over that of {subject}",
                value=figure(value),
                kind=charts.PREDICTED,
                note="; ".join(remarks),
            )
        )
    return tiles


def _warnings(document: Document, subject: str) -> list[str]:
    texts = [f"policy {name} failed and is in no figure: {why}" for name, why in document.get("failed", {}).items()]
    short = document["policies"][subject]["shortfall_frac"]
    if short:
        texts.append(
            f"{subject} cannot plan for all demand: up to {short:.1%} of a model's demand is not met in some epoch "
            "(predicted)"
        )
    return texts


def shown_epoch(tables: Tables, policy: str) -> int:
    """The epoch whose fleet is drawn: the dearest of the policy, the first of equals."""
    rows = [row for row in tables["epochs"] if row["policy"] == policy]
    return int(max(rows, key=lambda row: (row["provisioning_usd_per_h"], -row["epoch"]))["epoch"])


def _pipelines(document: Document, tables: Tables, subject: str) -> list[Block]:
    found: list[Block] = []
    for policy in (subject, *(name for name in document["policies"] if name != subject)):
        epoch = shown_epoch(tables, policy)
        rows = [row for row in tables["instances"] if (row["policy"], row["epoch"]) == (policy, epoch)]
        found.append(
            pipelines_of(
                [row for row in rows if row["stages"]],
                title=f"{policy}, epoch {epoch}",
                most=_MOST_PIPELINES if policy == subject else _MOST_BESIDE,
                is_open=policy == subject,
            )
        )
    return found


def _regions(document: Document, tables: Tables, subject: str) -> list[Block]:
    count = document["epochs"]
    by_policy = {
        policy: {
            region: value / count
            for region, value in charts.total_by(
                (row for row in tables["instances"] if row["policy"] == policy), lambda row: row["region"]
            ).items()
        }
        for policy in document["policies"]
    }
    unknown = {row["policy"] for row in tables["instances"] if row["price_usd_per_h"] is None}
    numbered = spots(by_policy[subject])
    others = [region for region in document["inputs"].get("regions", ()) if region not in by_policy[subject]]
    places = {spot.region: spot for spot in [*numbered, *spots(dict.fromkeys(others, 0.0))]}
    table = PlanTable(
        title="USD/h by region, mean over epochs, without start-up (predicted)",
        columns=("region", "on the map", "place", *by_policy),
        rows=[
            (
                region,
                spot.number if region in by_policy[subject] and spot.place else None,
                spot.place.name if spot.place else None,
                *(None if policy in unknown else usd(costs.get(region, 0.0)) for policy, costs in by_policy.items()),
            )
            for region, spot in places.items()
        ],
    )
    epoch = shown_epoch(tables, subject)
    runs = PlanTable(
        title=f"What {subject} runs where, epoch {epoch} (predicted)",
        columns=("region", "model", "phase", "count", "layers on nodes", "USD/h each", "template"),
        rows=[
            (
                row["region"],
                row["model"],
                row["phase"],
                row["count"],
                None if row["stages"] is None else stages_text(row["stages"]),
                None if row["price_usd_per_h"] is None else usd(row["price_usd_per_h"]),
                row["template"],
            )
            for row in sorted(tables["instances"], key=lambda row: (row["region"], str(row["model"])))
            if (row["policy"], row["epoch"]) == (subject, epoch)
        ],
    )
    maps = [
        Figure(
            title=f"Where {subject} rents",
            kind=charts.PREDICTED,
            charts=(("", map_svg(numbered)),),
            caption="Numbers as in the table below; areas by USD/h. Land is schematic.",
        )
    ]
    return [*(maps if numbered else []), table, Details(table=runs)]


def _some(texts: Sequence[str]) -> str:
    """The first of them, and how many more there are: each price of a scenario may have a source of its own."""
    return f"{texts[0]}, and {len(texts) - 1} more sources" if len(texts) > 1 else "".join(texts)


def _inputs(document: Document) -> list[Block]:
    rows: list[tuple[object, ...]] = [
        *((f"{name} (sha256)", value) for name, value in document["input_hashes"].items()),
        *(
            (f"library of {method}", f"{one['name']} version {one['version']}, manifest sha256 {one['sha256']}")
            for method, one in document["libraries"].items()
        ),
        ("prices", f"{_some(document['price_sources'])}; oldest of {document['price_as_of']}"),
        ("code", document["code_version"]),
        ("seeds", ", ".join(map(str, document["seeds"]))),
        ("epochs", document["epochs"]),
        *(
            (
                f"headroom of {row['model']}, {row['phase']}",
                f"{row['max_utilization_frac']:g} of {row['slo_frac']:g} of the bound",
            )
            for row in document["headroom"]
        ),
    ]
    models = PlanTable(
        title="What is served",
        columns=("model", "variant", "requests/s", "TTFT bound s", "TPOT bound s"),
        rows=[
            (
                spec["model"],
                ", ".join(spec.get("variants") or ()) or spec["variant"],
                spec["requests_per_s"],
                *(document["slos"].get(spec["model"], {}).get(name) for name in ("ttft_s", "tpot_s")),
            )
            for spec in document["inputs"].get("models", ())
        ],
    )
    nodes = PlanTable(
        title="Node configurations and their prices",
        columns=("configuration", "GPUs", "USD/h by region"),
        rows=[
            (
                name,
                nodes_text({facts["gpu"]: facts["gpu_count"]}),
                ", ".join(f"{region} {usd(price)}" for region, price in facts["price_usd_per_h"].items()) or None,
            )
            for name, facts in document["nodes"].items()
        ],
    )
    digests = PlanTable(
        title="Digests of the simulated runs",
        columns=("policy", "seed", "digest of all events"),
        rows=[
            (name, seed, digest)
            for name, one in document["policies"].items()
            for seed, digest in zip(document["seeds"], one["digests"], strict=False)
        ],
    )
    return [
        PlanTable(title="Made from", columns=("input", "value"), rows=rows),
        models,
        Details(table=nodes),
        Details(table=digests),
    ]
