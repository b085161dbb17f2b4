"""What one more node of each scarce configuration would have saved in a recorded plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from artifacts.library import LibrarySnapshot
from coral_core.allocation.ilp import solve_allocation
from coral_core.allocation.one_more import one_more_node
from tasks.plan import recorded_problem


def one_more_document(decision: Mapping[str, Any], snapshot: LibrarySnapshot, *, most: int) -> list[dict[str, Any]]:
    """One entry for each node tried, the most valuable first (`OneMoreNode`); every figure is predicted.

    Solves the plan's problem again, and once more for each node. Raises what `recorded_problem` and `solve_allocation` do.
    """
    problem = recorded_problem(decision, snapshot)
    return [asdict(answer) for answer in one_more_node(problem, solve_allocation(problem), most=most)]
