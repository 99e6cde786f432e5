"""Any schedule in one program equals the unpipelined program."""

from typing import Any

import pytest
from hypothesis import given, settings
from schedules.random_schedules import Draft, drafts, random_schedule

from harness.contract import Row, check_result, check_row, make_case, run_ticks
from harness.scheduled import compositions, every_family, product
from jaxpipe import schedules


def is_slow(row: Row) -> bool:
    """Rows of the second job; each of their words is in a row of the first."""
    if row.axes is None:
        return row.schedule in ("eager_1f1b", "interleaved_gpipe", "kimi_k2", "zero_bubble_h2")
    return row.remat != "full" or row.model == "deepseek" or row.ranks > 3 or row.zero


def marked() -> list[Any]:
    few = [*every_family(), *compositions()]
    rest = [row for row in product() if row not in few]
    return [
        *(pytest.param(row, marks=[pytest.mark.slow] * is_slow(row)) for row in few),
        *(pytest.param(row, marks=[pytest.mark.product]) for row in rest),
    ]


@pytest.mark.parametrize("row", marked(), ids=str)
def test_the_schedule_equals_the_unpipelined_program(row: Row):
    check_row(row)


def check_random(draft: Draft) -> None:
    schedule = random_schedule(draft)
    row = Row("scheduled", "mlp", draft.ranks, draft.chunks, draft.microbatches, tied=True)
    check_result(row, run_ticks(row, make_case(row), schedules.lock_step(schedule)))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(drafts(ranks=(2, 3, 4)))
def test_schedules_that_nobody_would_write_are_right_too(draft):
    check_random(draft)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(drafts(ranks=(1, 2, 3, 4)))
def test_two_hundred_of_them_are(draft):
    check_random(draft)
