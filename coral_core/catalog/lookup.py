"""Look a name up, or say which names are near."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from coral_core.domain.hardware import Catalog, Gpu, NodeConfig
from coral_core.domain.models import ModelShape
from coral_core.errors import unknown_name

Entry = TypeVar("Entry")


def find_gpu(gpus: Mapping[str, Gpu], name: str, *, where: str = "") -> Gpu:
    """The GPU called `name`; InputError with near misses where there is none."""
    return _find(gpus, name, kind="GPU", where=where)


def find_model(models: Mapping[str, ModelShape], name: str, *, where: str = "") -> ModelShape:
    """The model called `name`; InputError with near misses where there is none."""
    return _find(models, name, kind="model", where=where)


def find_config(catalog: Catalog, name: str, *, where: str = "") -> NodeConfig:
    """The catalogue's node configuration called `name`; InputError with near misses where there is none."""
    return _find(catalog.configs, name, kind=f"node configuration in catalogue {catalog.name}", where=where)


def _find(table: Mapping[str, Entry], name: str, *, kind: str, where: str) -> Entry:
    if name not in table:
        raise unknown_name(kind, name, table, where=where)
    return table[name]
