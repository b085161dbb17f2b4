"""What spot nodes were seen to cost and how often they were taken back: dated facts beside the catalogues' prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources.abc import Traversable
from typing import Final

from coral_core.catalog.hardware import catalog_names, load_catalog
from coral_core.catalog.tables import add_once, package_table, read_table
from coral_core.domain.hardware import NodeConfig
from coral_core.errors import InputError, unknown_name

SPOT_COLUMNS: Final = (
    *("config", "region", "saving_pct", "interrupted_pct_per_month_from", "interrupted_pct_per_month_to"),
    *("source", "as_of"),
)
_TABLES: Final = {"aws-real": "aws_spot.csv"}
"""Paper catalogues have prices that nobody charges, hence no spot discounts either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotFact:
    """The discount on the on-demand price, and which share of nodes was taken back in a month: a range.

    The upper end is None where only the lower is published.
    """

    config: str
    region: str
    saving_frac: float
    interrupted_frac_per_month_from: float
    interrupted_frac_per_month_to: float | None
    source: str
    as_of: date


def load_spot(catalog: str) -> Mapping[tuple[str, str], SpotFact]:
    """The spot facts beside a catalogue, by (region, configuration); none where nobody publishes them."""
    if catalog not in catalog_names():
        raise unknown_name("catalogue", catalog, catalog_names())
    return dict(_load(catalog)) if catalog in _TABLES else {}


def read_spot(file: Traversable, configs: Mapping[str, NodeConfig]) -> dict[tuple[str, str], SpotFact]:
    """Spot facts of a table with SPOT_COLUMNS, of the `configs` given. Raises InputError with file and line."""
    facts: dict[tuple[str, str], SpotFact] = {}
    for row in read_table(file, SPOT_COLUMNS):
        saving_pct = row.positive("saving_pct")
        low_pct, high_pct = row.count_or_zero("interrupted_pct_per_month_from"), None
        if row.filled("interrupted_pct_per_month_to"):
            high_pct = row.count("interrupted_pct_per_month_to")
        if not (saving_pct < 100 and low_pct < (high_pct or 100) <= 100):
            raise InputError("a saving below 100 and a range of shares, from below to, are due", where=row.where)
        fact = SpotFact(
            config=row.member("config", configs).name,
            region=row.text("region"),
            saving_frac=saving_pct / 100,
            interrupted_frac_per_month_from=low_pct / 100,
            interrupted_frac_per_month_to=None if high_pct is None else high_pct / 100,
            source=row.text("source"),
            as_of=row.day("as_of"),
        )
        add_once(facts, (fact.region, fact.config), fact, row)
    return facts


@cache
def _load(catalog: str) -> Mapping[tuple[str, str], SpotFact]:
    return read_spot(package_table(_TABLES[catalog]), load_catalog(catalog).configs)
