"""`coral catalog`: GPUs, node configurations and prices, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from coral_core.cli.options import AsJson
from coral_core.cli.output import print_json, print_table
from coral_core.domain.hardware import Catalog, NodeConfig
from coral_core.units import GBIT_PER_S, GIB, TERA

if TYPE_CHECKING:
    from coral_core.catalog.spot import SpotFact

app = App(name="catalog", help="GPUs, node configurations and their prices.")


@app.command(name="list")
def list_catalogs(*, as_json: AsJson = False) -> None:
    """List the catalogues: how many configurations, which regions, what they are."""
    from coral_core.catalog import catalog_names, load_catalog

    catalogs = [load_catalog(name) for name in catalog_names()]
    if as_json:
        print_json(
            [
                {"name": c.name, "configs": sorted(c.configs), "regions": list(c.regions), "note": c.note}
                for c in catalogs
            ]
        )
        return
    rows = [(c.name, len(c.configs), len(c.regions)) for c in catalogs]
    notes = "\n".join(f"{c.name}: {c.note}" for c in catalogs)
    print_table("Catalogues", ("name", "configurations", "regions"), rows, note=notes)


@app.command
def show(
    name: str,
    *,
    region: Annotated[str | None, Parameter(help="Only this region's prices.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a catalogue's configurations, their hardware and what they cost where ('-': not sold or not known)."""
    from coral_core.catalog import load_catalog
    from coral_core.catalog.spot import load_spot
    from coral_core.config.availability import look_up

    catalog = load_catalog(name)
    if region is not None:
        look_up(dict.fromkeys(catalog.regions), region, "region", "--region", f"catalogue {name}")
    regions = catalog.regions if region is None else (region,)
    configs = sorted(catalog.configs.values(), key=lambda config: (config.gpu.name, config.gpu_count, config.name))
    spot = load_spot(name)
    if as_json:
        found = [{**_config_json(catalog, config), "spot": _spot_json(spot, config)} for config in configs]
        print_json({"name": catalog.name, "note": catalog.note, "configs": found})
        return
    rows = [
        (
            config.name,
            config.gpu.name,
            config.gpu_count,
            config.memory_bytes / GIB,
            config.nic_bytes_per_s / GBIT_PER_S,
            config.cloud,
            *_price_cells(catalog, config, regions),
            *(_spot_cells(spot.get((region, config.name))) if region and spot else ()),
        )
        for config in configs
    ]
    columns = ["configuration", "GPU", "GPUs", "memory GiB", "NIC Gbit/s", "cloud"]
    columns += ["USD/h"] if region is not None else ["from USD/h", "to USD/h", "regions"]
    columns += ["spot saves", "taken back a month"] if region and spot else []
    title = f"Catalogue {catalog.name}, on-demand prices"
    if spot:
        note = f"Spot: as of {min(fact.as_of for fact in spot.values())}; by region with --region."
        print_table(title, columns, rows, note=f"{catalog.note}\n{note}")
        return
    print_table(title, columns, rows, note=catalog.note)


@app.command
def gpus(*, as_json: AsJson = False) -> None:
    """List the GPU facts: visible memory, bandwidth, dense compute by dtype, link, source."""
    from coral_core.catalog import load_gpus

    found = sorted(load_gpus().values(), key=lambda gpu: gpu.name)
    if as_json:
        print_json(
            [
                {
                    "name": gpu.name,
                    "memory_bytes": gpu.memory_bytes,
                    "memory_bandwidth_bytes_per_s": gpu.memory_bandwidth_bytes_per_s,
                    "compute_flops_per_s": dict(gpu.compute_flops_per_s),
                    "link_kind": gpu.link_kind.value,
                    "link_bytes_per_s": gpu.link_bytes_per_s,
                    "source": gpu.source,
                    "as_of": gpu.as_of.isoformat(),
                }
                for gpu in found
            ]
        )
        return
    rows = [
        (
            gpu.name,
            gpu.memory_bytes / GIB,
            gpu.memory_bandwidth_bytes_per_s / 1e9,
            ", ".join(f"{dtype} {flops / TERA:g}" for dtype, flops in gpu.compute_flops_per_s.items()),
            f"{gpu.link_kind.value} {gpu.link_bytes_per_s / 1e9:g} GB/s",
            gpu.as_of.isoformat(),
        )
        for gpu in found
    ]
    sources = "\n".join(f"{gpu.name}: {gpu.source}" for gpu in found)
    print_table("GPUs", ("GPU", "memory GiB", "GB/s", "dense TFLOP/s", "link", "as of"), rows, note=sources)


def _price_cells(catalog: Catalog, config: NodeConfig, regions: tuple[str, ...]) -> tuple[object, ...]:
    from coral_core.domain.hardware import Market

    found = [catalog.prices.get((region, config.name, Market.ON_DEMAND)) for region in regions]
    sold = [price.price_usd_per_h for price in found if price is not None]
    if len(regions) == 1:
        return (sold[0] if sold else None,)
    return (min(sold, default=None), max(sold, default=None), len(sold))


def _spot_cells(fact: SpotFact | None) -> tuple[object, ...]:
    if fact is None:
        return (None, None)
    low, high = fact.interrupted_frac_per_month_from, fact.interrupted_frac_per_month_to
    share = f"{low:.0%} to {high:.0%}" if high is not None else f"above {low:.0%}"
    return (f"{fact.saving_frac:.0%}", share)


def _spot_json(spot: Mapping[tuple[str, str], SpotFact], config: NodeConfig) -> list[dict[str, object]]:
    return [
        {
            "region": fact.region,
            "saving_frac": fact.saving_frac,
            "interrupted_frac_per_month_from": fact.interrupted_frac_per_month_from,
            "interrupted_frac_per_month_to": fact.interrupted_frac_per_month_to,
            "source": fact.source,
            "as_of": fact.as_of.isoformat(),
        }
        for (_, name), fact in sorted(spot.items())
        if name == config.name
    ]


def _config_json(catalog: Catalog, config: NodeConfig) -> dict[str, object]:
    prices = [price for (_, name, _), price in sorted(catalog.prices.items()) if name == config.name]
    return {
        "name": config.name,
        "gpu": config.gpu.name,
        "gpu_count": config.gpu_count,
        "memory_bytes": config.memory_bytes,
        "nic_bytes_per_s": config.nic_bytes_per_s,
        "cloud": config.cloud,
        "source": config.source,
        "as_of": config.as_of.isoformat(),
        "prices": [
            {
                "region": price.region,
                "market": price.market.value,
                "price_usd_per_h": price.price_usd_per_h,
                "source": price.source,
                "as_of": price.as_of.isoformat(),
            }
            for price in prices
        ],
    }
