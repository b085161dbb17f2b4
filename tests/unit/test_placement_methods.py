import numpy as np
import pytest

from coral_core.domain.placement import PlacementProblem, PlacementStatus
from coral_core.errors import InputError
from coral_core.placement.methods import PLACEMENT_METHODS, placement_method


def test_every_method_is_found_by_its_own_name():
    assert set(PLACEMENT_METHODS) == {"lattice", "lattice-free", "ilp"}
    for name in PLACEMENT_METHODS:
        assert placement_method(name).name == name


def test_a_time_limit_reaches_the_ilp():
    rows = {name: np.linspace(9 - i, 1, 30) for i, name in enumerate("abcd")}
    problem = PlacementProblem(layers=30, nodes=tuple("abcd"), capacity_tokens_per_s=dict.fromkeys((1, 2, 3, 4), rows))
    without_time = placement_method("ilp", time_limit_s=0.0, solver="highs").solve(problem)
    assert without_time.status is PlacementStatus.UNPROVEN
    assert placement_method("lattice", time_limit_s=0.0).solve(problem).status is PlacementStatus.OPTIMAL


def test_an_unknown_method_gets_suggestions():
    with pytest.raises(InputError, match=r"latice.*did you mean lattice"):
        placement_method("latice")
    with pytest.raises(InputError, match="known: ilp, lattice"):
        placement_method("qqq")
