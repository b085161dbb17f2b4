"""What a reader of an evaluation needs beside its results: prices, bounds, where everything came from, distributions."""

from __future__ import annotations

import math
from typing import Any, Final

from artifacts.canonical import canonical_json, sha256_hex
from coral_core.config.resolve import node_prices
from coral_core.domain.hardware import Market, split_market
from coral_core.sim.metrics import CURVE_FRACS
from tasks.plan_documents import manifest_sha256
from tasks.replay import Replay
from tasks.template_source import TemplateSource

Row = dict[str, Any]
LATENCIES: Final = ("ttft", "tpot")


def evaluation_facts(source: TemplateSource) -> Row:
    """`nodes` by offer, spot ones apart (its GPUs, USD/h by region), `slos` by model, `libraries` by method, `input_hashes`."""
    resolved = source.resolved
    regions = resolved.scenario.regions
    prices = node_prices(resolved).tolist()
    configs = {config.name: config for config in resolved.configs}
    spot = resolved.spot
    names = {config.name for config in resolved.configs}
    offers = [
        price
        for (region, config, market), price in resolved.catalog.prices.items()
        if region in regions and config in names and market is Market.ON_DEMAND
    ]
    return {
        "nodes": {
            offer: {
                "gpu": configs[split_market(offer)[0]].gpu.name,
                "gpu_count": configs[split_market(offer)[0]].gpu_count,
                "price_usd_per_h": {
                    region: row[c] for region, row in zip(regions, prices, strict=True) if not math.isnan(row[c])
                },
            }
            for c, offer in enumerate(resolved.offers)
        },
        "slos": {
            model.shape.name: {"ttft_s": model.demand.slo.ttft_s, "tpot_s": model.demand.slo.tpot_s}
            for model in resolved.models
        },
        "libraries": {
            method: {
                "name": snapshot.manifest.library,
                "version": snapshot.manifest.version,
                "sha256": manifest_sha256(snapshot),
            }
            for method, snapshot in source.snapshots.items()
        },
        "price_sources": sorted({price.source for price in offers}.union(spot.sources if spot else ())),
        "price_as_of": min(
            [*(price.as_of.isoformat() for price in offers), *([spot.as_of.isoformat()] if spot else [])], default=None
        ),
        "input_hashes": {
            "scenario": sha256_hex(canonical_json(resolved.scenario.model_dump(mode="json"))),
            "catalogue": sha256_hex(
                canonical_json(
                    [
                        [config for _, config in sorted(resolved.catalog.configs.items())],
                        [price for _, price in sorted(resolved.catalog.prices.items())],
                    ]
                )
            ),
            "models": sha256_hex(canonical_json([model.shape for model in resolved.models])),
        },
    }


def latency_rows(run: Replay) -> list[Row]:
    """Distributions by model: `value_s` that the share `frac` of the `measured_requests` did not exceed.

    Requests without a first token are offered and not measured; so are, for the time per output token, those that did
    not finish or have a single token.
    """
    return [
        {
            "policy": run.policy,
            "seed": run.seed,
            "model": name,
            "latency": latency,
            "frac": frac,
            "value_s": value_s,
            "measured_requests": found.requests,
            "offered_requests": one.offered_requests,
        }
        for name, one in run.whole.items()
        if name != "*"
        for latency, found in zip(LATENCIES, (one.ttft, one.tpot), strict=True)
        for frac, value_s in zip(CURVE_FRACS[: len(found.curve_s)], found.curve_s, strict=True)
    ]
