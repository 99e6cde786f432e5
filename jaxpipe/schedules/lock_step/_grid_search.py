"""Puts a schedule on a grid of ticks, by many runs of a list scheduler that knows their costs.

The order of a schedule, kept to the letter, costs too many ticks: 1F1B has the backward of
microbatch 0 before the forward of microbatch S, which then meets a bubble on every rank. So only
the order among forwards is kept, that among backwards, and that among W. A forward may come before
earlier backwards, a W any time after its I. Nothing comes before an earlier forward, so GPipe stays
GPipe; and a rank holds no more activations than it may, so a lean schedule stays lean.
"""

from collections.abc import Sequence
from math import inf

from ..analysis._measure import makespan, peak_activations
from ..analysis._simulate import Costs, Time, check_costs, simulate
from ..builders._require import require
from ..language._schedule import Schedule, num_ranks, slice_ids, splits_backwards
from ._grid import Grid, RankOrders, fill_grid, rank_orders, ticks_from_grid
from ._slices import slices_as_microbatches, ticks_of_slices
from ._ticks import Ticks


def to_lock_step(
    schedule: Schedule, costs: Costs | None = None, *, spare: int | None = None
) -> Ticks:
    """Puts a schedule on a grid of ticks.

    Returns the grid with the least peak memory whose makespan does not exceed the asynchronous
    schedule's. If none exists, returns the one with the least peak memory among those that cost no
    more than the grid with the most memory.

    1F1B and interleaved 1F1B reach their ideal, (M + (S - 1) / v) (F + B) for F and B of a rank.
    A rank then holds up to 2 (S - 1 - rank) + 1 microbatches instead of S - rank.

    Args:
        schedule: A schedule that passes `check`, or the `forward_only` of one.
        costs: Costs of a stage. None: one each.
        spare: Activations that a rank may hold beyond its peak in `schedule`. None: as many as pay.

    Returns:
        The schedule in the order of the grid, with the tick of every action.

    Raises:
        ValueError: If `spare` is negative, or costs are negative or not
            one per stage.

    Example:
        >>> from jaxpipe.schedules import build
        >>> from jaxpipe.schedules.lock_step import num_ticks
        >>> num_ticks(to_lock_step(build("1f1b", ranks=4, microbatches=16)))
        22
    """
    require(spare is None or spare >= 0, f"`spare` is {spare}.", "Give 0 or more activations.")
    costs, plain = costs or Costs(), slices_as_microbatches(schedule)
    check_costs(costs, schedule.num_stages)
    tries = _affordable_tries(plain)
    free = 0 if spare is not None else makespan(simulate(plain, costs))
    orders, peaks, lags = (
        rank_orders(plain, costs),
        peak_activations(plain),
        list(candidate_lags(plain)),
    )
    *lean, most = candidate_spares(plain) if spare is None else (spare,)
    thinned = -(-len(lean) * len(lags) // tries) or 1
    grid = _cheapest(orders, peaks, most, lags)
    assert grid, "without a longest makespan there is a grid"
    longest = max(grid.makespan, free)
    found = (_cheapest(orders, peaks, spare, lags, longest) for spare in lean[::thinned])
    ticks = ticks_from_grid(plain, next((leaner for leaner in found if leaner), grid))
    return ticks_of_slices(ticks, slice_ids(schedule))


_MAX_TURNS = 1 << 27
"""The most turns of ranks, one in each tick of each grid that is tried: some two minutes."""


def _affordable_tries(schedule: Schedule) -> int:
    """Returns how many grids of a schedule may be tried: all, unless it is very large."""
    ticks = max(map(len, schedule.programs), default=0) + 2 * schedule.num_stages
    tries = _MAX_TURNS // (1 + ticks * num_ranks(schedule))
    require(
        tries >= len(candidate_lags(schedule)),
        f"The schedule has {num_ranks(schedule)} ranks and {schedule.num_stages} stages.",
        "That is too large to be put in lock-step: give fewer ranks or microbatches.",
    )
    return tries


def candidate_spares(schedule: Schedule) -> tuple[int, ...]:
    """Returns the numbers of spare activations to try, with growing gaps.

    Spares that are larger than needed to fill every hand-over with a tick do not pay.
    """
    spares = [0]
    while spares[-1] < 2 * schedule.num_stages:
        spares.append(spares[-1] + max(1, spares[-1] // 4))
    return tuple(spares)


def candidate_lags(schedule: Schedule) -> tuple[int, ...]:
    """Returns how many W's a rank may defer, one number per try.

    Deferring more of them fills more bubbles, and holds more activations.
    """
    S = num_ranks(schedule)
    return (
        tuple(sorted({0, 1, 2, S // 2, S - 1, S, 2 * S - 1}))
        if splits_backwards(schedule)
        else (0,)
    )


def _cheapest(
    orders: RankOrders, peaks: Sequence[int], spare: int, lags: list[int], longest: Time = inf
) -> Grid | None:
    """Returns the cheapest grid among those of all lags, the first of equals.

    Args:
        orders: What the ranks have to run.
        peaks: [ranks] the most activations that each holds in the schedule.
        spare: How many more it may hold.
        lags: The numbers of W's that a rank may put off, in ascending order. Those for which no
            larger spare can give a grid that is short enough are removed.
        longest: The longest makespan that is of use. None is returned if no grid is that short.
    """
    caps = [peak + spare for peak in peaks]
    cheapest: Grid | None = None
    for lag in lags.copy():
        below = inf if cheapest is None else cheapest.makespan
        filled = fill_grid(orders, caps, lag, longest=longest, below=below)
        same = [lag] if filled.lagged else [other for other in lags if other >= lag]
        if filled.grid:
            cheapest = filled.grid
        elif cheapest is None and not filled.full:
            lags[:] = [other for other in lags if other not in same]
        if not filled.lagged:
            break
    return cheapest
