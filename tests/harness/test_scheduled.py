"""Any schedule in one program equals the unpipelined program."""

import pytest
from hypothesis import given, settings
from schedules.random_schedules import Draft, drafts, random_schedule

from harness.contract import (
    Row,
    check_result,
    check_row,
    make_case,
    parameters,
    run_ticks,
)
from harness.scheduled import compositions, every_family, product, slices
from jaxpipe.schedules import lock_step


@pytest.mark.parametrize(
    "row", parameters([*every_family(), *compositions(), *slices(), *product()])
)
def test_the_schedule_equals_the_unpipelined_program(row: Row):
    check_row(row)


def check_random(draft: Draft) -> None:
    schedule = random_schedule(draft)
    row = Row("scheduled", "mlp", draft.ranks, draft.chunks, draft.microbatches, tied=True)
    check_result(row, run_ticks(row, make_case(row), lock_step.to_lock_step(schedule)))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(drafts(ranks=(2, 3, 4)))
def test_schedules_that_nobody_would_write_are_right_too(draft):
    check_random(draft)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(drafts(ranks=(1, 2, 3, 4)))
def test_two_hundred_of_them_are(draft):
    check_random(draft)
