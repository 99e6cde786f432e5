"""One small row of every engine: what `make quick` runs of the harness."""

import jax
import jax.numpy as jnp
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


@pytest.mark.parametrize(
    "row",
    parameters([
        Row("circular", "mlp", 2, 8, 2, tied=True, dropout=0.1, remat="none"),
        Row("scheduled", "mlp", 3, 1, 6, schedule="zero_bubble_h1", tied=True, dropout=0.1),
    ]),
)  # fmt: skip
def test_nothing_is_read_of_a_buffer_before_it_is_written(row: Row, monkeypatch):
    """`lax.empty` is zero on CPUs, but anything on TPUs and GPUs: here it is NaN."""
    filled = []

    def empty(shape, dtype):
        filled.append(shape)
        worst = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else -1
        return jnp.full(shape, worst, dtype)

    monkeypatch.setattr(jax.lax, "empty", empty)
    check_row(row)
    assert filled


def test_every_engine_has_a_row():
    assert [row.engine for row in ROWS] == [*ENGINES]
