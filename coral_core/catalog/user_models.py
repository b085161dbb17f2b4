"""The user's own models: one JSON file each in a directory, written and read strictly."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from coral_core.catalog.json_files import read_json
from coral_core.catalog.models import package_models
from coral_core.catalog.shape_check import checked_shape
from coral_core.domain.models import ModelShape
from coral_core.errors import InputError

FORMAT: Final = 1


class _Stored(BaseModel):
    """A file's content; the strict configuration holds for the nested dataclasses too."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal[1]
    model: ModelShape


def load_models(user_directory: Path | None = None) -> dict[str, ModelShape]:
    """All models by name: the package's and, where a directory is given, the user's.

    A directory that does not exist holds none. InputError for a broken file, and for a name that is there twice.
    """
    models = package_models()
    for path, shape in () if user_directory is None else _read_user_models(user_directory):
        _refuse_package_name(shape, where=str(path))
        models[shape.name] = shape
    return models


def save_user_model(shape: ModelShape, directory: Path) -> Path:
    """Write `shape` as `<name>.json` into `directory` (made if absent), whole or not at all; the path is returned.

    InputError when the shape is impossible, or its name is taken: nothing is overwritten.
    """
    path = directory / f"{checked_shape(shape, where=shape.name).name}.json"
    _refuse_package_name(shape, where=str(path))
    content = {"format": FORMAT, "model": dataclasses.asdict(shape) | {"as_of": shape.as_of.isoformat()}}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = _write_new(path, text)
    except OSError as error:
        raise InputError(f"cannot be written: {error}", where=str(path)) from error
    if not written:
        raise InputError(
            f"model {shape.name!r} is there already", where=str(path), fix="remove the file or choose another name"
        )
    return path


def read_user_model(path: Path) -> ModelShape:
    """The model in `path`; InputError names file and key of the first fault (unknown and repeated keys are faults)."""
    try:
        text, _ = read_json(path)
        stored = _Stored.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise InputError(f"{key}: {fault['msg']}", where=str(path)) from None
    shape = checked_shape(stored.model, where=str(path))
    if path.stem != shape.name:
        raise InputError(f"holds model {shape.name!r}", where=str(path), fix=f"name the file {shape.name}.json")
    return shape


def _read_user_models(directory: Path) -> Iterator[tuple[Path, ModelShape]]:
    if directory.exists() and not directory.is_dir():
        raise InputError("is not a directory", where=str(directory))
    for path in sorted(directory.glob("*.json")):
        yield path, read_user_model(path)


def _refuse_package_name(shape: ModelShape, *, where: str) -> None:
    if shape.name in package_models():
        raise InputError(
            f"model {shape.name!r} is one of the package's own (its models.csv)", where=where, fix="choose another name"
        )


def _write_new(path: Path, text: str) -> bool:
    """Create `path` with `text`, so that a reader sees all of it or no file; False where there is one."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(partial).chmod(0o644)
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        Path(partial).unlink()
    return True
