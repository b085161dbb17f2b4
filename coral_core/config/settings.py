"""Settings from the environment (`CORAL_*`): where things live, never what the plan is."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from coral_core.errors import InputError


class Settings(BaseSettings):
    """`CORAL_STORE`, `CORAL_MODELS`, `CORAL_RAY_ADDRESS`, `CORAL_FLEET`: all have working defaults."""

    model_config = SettingsConfigDict(env_prefix="CORAL_", extra="ignore", frozen=True)

    store: str = Field(default="", description="object store URL; default: file:// under the working folder")
    models: Path = Field(default=Path(".coral/models"), description="folder of the models added by the user")
    ray_address: str = Field(default="local", description="`local`, or host:port of a Ray cluster's head")
    fleet: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=32)

    @property
    def store_url(self) -> str:
        """The object store's URL."""
        return self.store or (Path.cwd() / ".coral" / "store").as_uri()


def load_settings() -> Settings:
    """Settings from the environment; InputError names the variable that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = f"CORAL_{'_'.join(str(part) for part in fault['loc']).upper()}"
        raise InputError(str(fault["msg"]), where=f"environment variable {name}") from None
