"""What a scenario says of the offers: the spot market, what not to use, and what to prefer."""

from __future__ import annotations

from datetime import date
from typing import Self

from pydantic import Field, model_validator

from coral_core.config.fields import Nodes, NonNegative, Positive, Strict


class _Chosen(Strict):
    """Instances of a model, with nodes of a configuration, in a region; what is not named stands for all."""

    model: str | None = None
    config: str | None = Field(default=None, description="in both markets; `name@spot` is its spot nodes only")
    region: str | None = None

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if self.model is None and self.config is None and self.region is None:
            raise ValueError("it names everything: give a model, config or region")
        return self


class ExclusionSpec(_Chosen):
    """What must not be used."""


class PreferenceSpec(_Chosen):
    """What counts as dearer or cheaper than it is where instances are chosen; what is paid stays what it is."""

    price_factor: Positive = Field(le=1000, description="above 1 to avoid it, below 1 to prefer it")


class _SpotTerms(Strict):
    nodes: dict[str, Nodes] = Field(default_factory=dict, description="by region; default: `spot.nodes`")
    interruptions_per_h: NonNegative | None = Field(
        default=None, le=60, description="of one node; not known where absent"
    )
    source: str = Field(min_length=1)
    as_of: date


class SpotOffer(_SpotTerms):
    """What one configuration costs and how much of it there is on the spot market. One of the two prices is given."""

    price_frac: Positive | None = Field(default=None, le=1, description="of the on-demand price, wherever it is sold")
    price_usd_per_h: dict[str, Positive] | None = Field(
        default=None, min_length=1, description="by region; a region that is left out has none"
    )

    @model_validator(mode="after")
    def _one_price(self) -> SpotOffer:
        if (self.price_frac is None) == (self.price_usd_per_h is None):
            raise ValueError("give either price_frac or price_usd_per_h")
        return self


class SpotDefault(_SpotTerms):
    """The same for every configuration without an offer of its own, wherever it is sold on demand."""

    price_frac: Positive = Field(le=1, description="of the on-demand price")


class SpotSpec(Strict):
    """The spot market beside on demand. An instance has all its nodes in one market."""

    nodes: Nodes = Field(description="spot nodes of each configuration in each region, where its offer names no other")
    configs: dict[str, SpotOffer] = Field(default_factory=dict, description="by configuration")
    from_catalog: bool = Field(default=False, description="for those not in `configs`, the catalogue's dated discounts")
    default: SpotDefault | None = Field(default=None, description="for all configurations that have no offer otherwise")

    @model_validator(mode="after")
    def _offers_something(self) -> SpotSpec:
        if not self.configs and not self.from_catalog and self.default is None:
            raise ValueError("it offers nothing: give configs, from_catalog or default")
        return self
