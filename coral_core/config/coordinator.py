"""The coordinator's file: where agents reach it, whom it lets in, which gateway it serves, and how patient it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from coral_core.config.fields import NonNegative, Positive, Strict
from coral_core.config.gateway import ListenSpec
from coral_core.config.yaml_lines import read_yaml_model


class GatewaySideSpec(Strict):
    """The gateway's admin side."""

    url: str = Field(pattern=r"^http://[A-Za-z0-9.\-\[\]:]+$")
    token_file: Path


class PatienceSpec(Strict):
    """What is not given has the coordinator's own value."""

    lost_s: Annotated[float, Field(gt=2, le=60, strict=True)] | None = Field(
        default=None, description="a node whose agent is not heard of for so long is lost"
    )
    unheard_grace_s: NonNegative | None = Field(
        default=None, description="for so long after that it is kept while its engine shows that it works"
    )
    forget_s: Positive | None = Field(default=None, description="what has failed or ended is remembered for so long")


class CoordinatorSpec(Strict):
    """The file of `coral coordinator run --config`. Paths in it are relative to its own folder."""

    listen: ListenSpec
    keys_file: Path = Field(description="made by `coral keys new coordinator`; nobody else may read it")
    agents_file: Path = Field(description="public keys that are let in; may change while the coordinator runs")
    gateway: GatewaySideSpec
    folder: Path = Field(default=Path("coordinator"), description="what it keeps: state.json")
    scenario: str = Field(description="whose library has the templates, and whose models are served")
    engine_file: Path = Field(description="how engines are started: device, and each model's path and flags")
    patience: PatienceSpec = PatienceSpec()


def load_coordinator_file(path: Path) -> CoordinatorSpec:
    """The coordinator's file; InputError names file and line of the first fault. Its paths are made absolute."""
    spec = read_yaml_model(path, CoordinatorSpec)
    home = path.resolve().parent
    names = ("keys_file", "agents_file", "folder", "engine_file")
    changes: dict[str, object] = {name: home / getattr(spec, name) for name in names}
    changes["gateway"] = spec.gateway.model_copy(update={"token_file": home / spec.gateway.token_file})
    return spec.model_copy(update=changes)
