"""Programs of every rank, under any schedule, equal the unpipelined program."""

import pytest
from hypothesis import given, settings
from schedules.random_schedules import Draft, drafts, random_schedule

from harness.contract import (
    Row,
    check_result,
    check_row,
    make_case,
    parameters,
    run_mpmd,
)
from harness.mpmd import compositions, every_family, product


@pytest.mark.parametrize("row", parameters([*every_family(), *compositions(), *product()]))
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
