"""The kinds of values that scenario files are made of: strict, so that a wrong unit or type is never read as another."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Nodes = Annotated[int, Field(ge=0, le=1_000_000, strict=True)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]


class Strict(BaseModel):
    """Settings in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
