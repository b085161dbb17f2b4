import pytest

from coral_core.errors import InputError
from coral_core.placement.methods import PLACEMENT_METHODS, placement_method


def test_every_method_is_found_by_its_own_name():
    assert set(PLACEMENT_METHODS) == {"lattice", "ilp"}
    for name in PLACEMENT_METHODS:
        assert placement_method(name).name == name


def test_an_unknown_method_gets_suggestions():
    with pytest.raises(InputError, match=r"latice.*did you mean lattice.*ilp, lattice"):
        placement_method("latice")
    with pytest.raises(InputError, match="one of ilp, lattice"):
        placement_method("qqq")
