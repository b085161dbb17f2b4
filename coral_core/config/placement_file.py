"""The file format of `coral placement solve`: people's own capacity tables in, placements out."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coral_core.config.strict_json import first_error, parse_json, place_of, read_text
from coral_core.domain.placement import PlacementProblem, PlacementResult
from coral_core.errors import InputError

Name = Annotated[str, Field(min_length=1)]
Rate = Annotated[float, Field(ge=0, le=1e15)]
Rows = dict[str, dict[Name, list[Rate]]]


class _Problem(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    layers: Annotated[int, Field(ge=1, le=10_000)]
    nodes: Annotated[list[Name], Field(min_length=1)]
    capacity_tokens_per_s: Rows


def read_placement_file(path: Path) -> tuple[list[PlacementProblem], bool]:
    """The problems of a file (`-`: standard input), and whether it holds a list (all or nothing) or one problem.

    Raises InputError whose place is `file[item]: key path`, or `file:line:column` where it is not JSON.
    """
    document = parse_json(read_text(path), where=place_of(path))
    was_list = isinstance(document, list)
    problems = []
    for index, item in enumerate(document if isinstance(document, list) else [document]):
        try:
            problems.append(_problem(item))
        except InputError as error:
            place = f"{place_of(path)}[{index}]" if was_list else place_of(path)
            raise InputError(error.what, where=f"{place}: {error.where}".rstrip(": "), fix=error.fix) from None
    return problems, was_list


def placement_result_to_json(result: PlacementResult) -> dict[str, object]:
    """One answer: status, throughput_tokens_per_s, stages in pipeline order (none where infeasible), method."""
    stages = result.placement.stages if result.placement else ()
    return {
        "status": result.status.value,
        "throughput_tokens_per_s": result.throughput_tokens_per_s,
        "stages": [{"layers": stage.layers, "nodes": list(stage.nodes)} for stage in stages],
        "method": result.method,
    }


def _problem(item: object) -> PlacementProblem:
    if not isinstance(item, dict):
        raise InputError("a problem must be a JSON object")
    try:
        data = _Problem.model_validate(item)
    except ValidationError as error:
        where, what = first_error(error)
        raise InputError(what, where=where) from None
    due = [str(stages) for stages in range(1, len(data.nodes) + 1)]
    tables = data.capacity_tokens_per_s
    for key in [*due, *tables]:
        if key not in tables:
            fix = "a table for each number of stages from 1 to the number of nodes"
            raise InputError(f"the table for {key} stages is missing", where="capacity_tokens_per_s", fix=fix)
        if key not in due:
            what = f"{key!r} is not a number of stages from 1 to {len(due)}"
            raise InputError(what, where="capacity_tokens_per_s")
    capacity = {int(key): _rows(data, key) for key in due}
    return PlacementProblem(layers=data.layers, nodes=tuple(data.nodes), capacity_tokens_per_s=capacity)


def _rows(data: _Problem, key: str) -> dict[str, NDArray[np.float64]]:
    """One table: a row for each node type, of one number per layer, never increasing."""
    table, place = data.capacity_tokens_per_s[key], f"capacity_tokens_per_s.{key}"
    for index, name in enumerate(data.nodes):
        if name not in table:
            close = get_close_matches(name, table, n=1)
            fix = f"did you mean {close[0]}?" if close else ""
            raise InputError(f"node {name!r} (nodes[{index}]) has no capacity", where=place, fix=fix)
    for name, row in table.items():
        if len(row) != data.layers:
            raise InputError(f"{len(row)} numbers instead of {data.layers}, one per layer", where=f"{place}.{name}")
        for layer in range(1, data.layers):
            if row[layer] > row[layer - 1]:
                raise InputError(
                    f"capacity of node {name!r} increases from {row[layer - 1]} at layer {layer}"
                    f" to {row[layer]} at layer {layer + 1}",
                    where=f"{place}.{name}[{layer}]",
                )
    return {name: np.array(row, dtype=np.float64) for name, row in table.items()}
