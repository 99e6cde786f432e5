"""Planning stays near-linear: 16 times the actions take about 16 times the time."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxpipe.schedules import Costs, Schedule, build, check, simulate
from jaxpipe.schedules.lock_step import check_ticks, simulate_ticks, tick_tables, to_lock_step

SMALL, LARGE = (8, 32), (32, 128)
MOST = 36
"""A quadratic step takes 256 times as long. A linear one takes 16 times as long, and a little more
for caches and for the grids that `to_lock_step` tries, whose number grows with the logarithm of the
ranks: growth by at most the power 1.3 of the number of actions. The sizes lie this far apart
because the small one takes less than a millisecond, in which noise counts."""


def seconds(run: Callable[[], Any]) -> float:
    """The least CPU time of three runs, which the load of the machine hardly changes."""
    times = []
    for _ in range(3):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def growth(run: Callable[[Any], Any], small: Any, large: Any) -> float:
    return seconds(lambda: run(large)) / seconds(lambda: run(small))


def test_256_ranks_and_1024_microbatches_are_not_too_large():
    assert len(build("1f1b", ranks=256, microbatches=1024).programs) == 256


@pytest.mark.parametrize("name", ["1f1b", "zbv", "v_half"])
def test_building_takes_time_in_proportion_to_the_actions(name):
    def run(counts: tuple[int, int]) -> Schedule:
        return build(name, ranks=counts[0], microbatches=counts[1])

    assert growth(run, SMALL, LARGE) < MOST


@pytest.mark.parametrize("step", [check, lambda s: simulate(s, Costs())])
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1"])
def test_checking_and_simulating_take_time_in_proportion_to_the_actions(name, step):
    small, large = (build(name, ranks=p, microbatches=m) for p, m in (SMALL, LARGE))
    assert growth(step, small, large) < MOST


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1"])
def test_lock_step_and_its_tables_take_time_in_proportion_to_the_actions(name):
    small, large = (build(name, ranks=p, microbatches=m) for p, m in (SMALL, LARGE))
    assert growth(to_lock_step, small, large) < MOST
    grids = to_lock_step(small), to_lock_step(large)
    for step in (tick_tables, check_ticks, lambda ticks: simulate_ticks(ticks, Costs())):
        assert growth(step, *grids) < MOST
