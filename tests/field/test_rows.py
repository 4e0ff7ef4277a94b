"""The rows as tests, for `pytest tests/field -k WORD`. `make test-field` has a line for each."""

import pytest

from tests.field.outcomes import State
from tests.field.rows import Row, rows_of
from tests.field.run import BAD, run


@pytest.mark.field
@pytest.mark.parametrize("row", rows_of(), ids=lambda row: row.name)
def test_row(row: Row) -> None:
    result = run(row)
    if result.state is State.NOT_RUN:
        pytest.skip(result.detail)
    assert result.state not in BAD, result.detail
