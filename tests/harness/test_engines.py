"""One small row of every engine: what `make quick` runs of the harness."""

import pytest

from harness.contract import ENGINES, Row, check_row, parameters

ROWS = [
    Row("circular", "mlp", 3, 2, 6, delay=True, tied=True, dropout=0.1),
    Row("scheduled", "mlp", 2, 2, 4, schedule="zbv", tied=True, dropout=0.1),
    Row("mpmd", "mlp", 2, 1, 4, axes=(), schedule="1f1b", tied=True, dropout=0.1),
    Row("linen", "llama", 2, 1, 2, packed=True),
    Row("nnx", "llama", 2, 1, 2, packed=True),
]


@pytest.mark.parametrize("row", parameters(ROWS))
def test_an_engine_equals_the_unpipelined_program(row: Row):
    check_row(row)


def test_every_engine_has_a_row():
    assert [row.engine for row in ROWS] == [*ENGINES]
