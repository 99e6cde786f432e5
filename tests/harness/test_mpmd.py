"""Programs of every rank, under any schedule, equal the unpipelined program."""

from typing import Any

import pytest
from hypothesis import given, settings
from schedules.random_schedules import Draft, drafts, random_schedule

from harness.contract import Row, check_result, check_row, make_case, run_mpmd
from harness.mpmd import compositions, every_family, product


def is_slow(row: Row) -> bool:
    """Rows of the second job. In the first, the compiler's own tests are in small what these are
    in large: any schedule, halves, groups of several devices."""
    if row.model == "mlp":
        return row.schedule != "interleaved_1f1b"
    return ("context", 2) not in (row.axes or ())


def marked() -> list[Any]:
    few = [*every_family(), *compositions()]
    rest = [row for row in product() if row not in few]
    return [
        *(pytest.param(row, marks=[pytest.mark.slow] * is_slow(row)) for row in few),
        *(pytest.param(row, marks=[pytest.mark.product]) for row in rest),
    ]


@pytest.mark.parametrize("row", marked(), ids=str)
def test_programs_of_every_rank_equal_the_unpipelined_program(row: Row):
    check_row(row)


def check_random(draft: Draft) -> None:
    row = Row("mpmd", "mlp", draft.ranks, draft.chunks, draft.microbatches, axes=(), tied=True)
    check_result(row, run_mpmd(row, make_case(row), random_schedule(draft)))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(drafts(ranks=(2, 3, 4)))
def test_schedules_that_nobody_would_write_are_right_too(draft):
    check_random(draft)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(drafts(ranks=(1, 2, 3, 4)))
def test_fifty_of_them_are(draft):
    check_random(draft)
