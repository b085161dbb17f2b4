import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_core.solver.builder import ProgramBuilder
from coral_core.solver.check import activity


def dense(program):
    return np.array([activity(program, unit) for unit in np.eye(program.n_columns)]).T


def test_blocks_keep_their_families_and_order():
    builder = ProgramBuilder(name="p", maximize=True, offset=3.0)
    a = builder.add_columns("a", 2, objective=[1, 2], upper=5)
    b = builder.add_columns("b", 1, integer=True, lower=-1)
    more = builder.add_columns("a", 1)
    first = builder.add_rows("cap", 2, rows=[0, 1, 1], columns=[0, 1, 2], values=[1, 2, 3], upper=[7, 8])
    second = builder.add_rows("demand", 1, lower=4)
    builder.add_entries(second, b, 9)
    builder.add_entries(second, b, 1)
    program = builder.build()
    assert a.tolist() == [0, 1]
    assert builder.columns_of("a").tolist() == [0, 1, *more.tolist()]
    assert builder.rows_of("cap").tolist() == first.tolist() == [0, 1]
    assert builder.rows_of("none").size == 0
    assert [builder.row_family(row) for row in range(3)] == ["cap", "cap", "demand"]
    np.testing.assert_array_equal(dense(program), [[1, 0, 0, 0], [0, 2, 3, 0], [0, 0, 10, 0]])
    assert program.integer.tolist() == [False, False, True, False]
    assert program.lower.tolist() == [0, 0, -1, 0]
    assert program.upper.tolist() == [5, 5, np.inf, np.inf]
    assert program.row_lower.tolist() == [-np.inf, -np.inf, 4]
    assert program.row_upper.tolist() == [7, 8, np.inf]
    assert (program.name, program.maximize, program.offset) == ("p", True, 3.0)


@pytest.mark.parametrize("row", [-1, 3])
def test_indices_outside_are_refused(row):
    builder = ProgramBuilder()
    builder.add_columns("x", 1)
    with pytest.raises(ValueError, match="family 'r'"):
        builder.add_rows("r", 3, rows=[row], columns=[0])
    with pytest.raises(IndexError):
        builder.row_family(row)


def test_an_empty_program_builds():
    program = ProgramBuilder().build()
    assert (program.n_columns, program.n_rows) == (0, 0)
    assert program.indptr.tolist() == [0]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(-3, 3)), max_size=30),
)
def test_terms_are_summed_as_in_a_dense_matrix(m, n, terms):
    terms = [(row % m, column % n, value) for row, column, value in terms]
    expected = np.zeros((m, n))
    builder = ProgramBuilder()
    builder.add_columns("x", n)
    rows = builder.add_rows("r", m)
    for row, column, value in terms:
        expected[row, column] += value
        builder.add_entries(rows[row], column, value)
    program = builder.build()
    np.testing.assert_array_equal(dense(program), expected)
    assert (program.values != 0).all()
    for row in range(m):
        assert (np.diff(program.indices[program.indptr[row] : program.indptr[row + 1]]) > 0).all()
