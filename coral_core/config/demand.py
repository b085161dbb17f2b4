"""Which demand a reallocation plans for: the scenario's own rates, or a forecast from what was measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from coral_core.config.form_titles import form_title
from coral_core.forecast import ForecastTuning
from coral_core.forecast.methods import DAY_S, WEEK_S

Seconds = Annotated[float, Field(ge=0, le=30 * DAY_S, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=30 * DAY_S, allow_inf_nan=False)]


class DemandSpec(BaseModel):
    """How demand is told ahead, and how fast planned capacity follows it."""

    model_config = ConfigDict(extra="forbid", frozen=True, field_title_generator=form_title)

    method: Literal["scenario", "last", "ewma", "seasonal"] = Field(
        default="scenario",
        description="`scenario`: the scenario's rates. `last`: the newest measured rate. `ewma`: an exponential mean. "
        "`seasonal`: the peak at this time of earlier days or weeks, shifted to today's level.",
    )
    when_unknown: Literal["hold", "scenario", "refuse"] = Field(
        default="hold",
        description="What to do for a model whose measured demand is missing or too old: keep what the last plan held "
        "(refuse where there is none), take the scenario's rate, or make no plan.",
    )
    horizon_s: Seconds = Field(default=900.0, description="How far ahead the plan must hold: interval plus start-up.")
    up_s: Seconds = Field(default=0.0, description="Time constant with which a plan follows a rise. 0: at once.")
    down_s: Seconds = Field(default=1800.0, description="Time constant with which a plan follows a fall.")
    max_age_s: PositiveSeconds = Field(default=900.0, description="Older measurements are stale, and not used.")
    ewma_s: PositiveSeconds = Field(default=600.0, description="Method ewma: time constant of the mean.")
    season: Literal["day", "week"] = Field(default="day", description="Method seasonal: what demand repeats with.")
    seasons: int = Field(default=4, ge=1, le=12, description="Method seasonal: how many of them are averaged.")

    @property
    def tuning(self) -> ForecastTuning:
        """The constants of the forecast."""
        return ForecastTuning(
            max_age_s=self.max_age_s,
            ewma_s=self.ewma_s,
            period_s=WEEK_S if self.season == "week" else DAY_S,
            periods=self.seasons,
        )
