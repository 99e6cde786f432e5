"""Puts a schedule on a grid of ticks, by many runs of a list scheduler that knows their costs.

The order of a schedule, kept to the letter, costs too many ticks: 1F1B has the backward of
microbatch 0 before the forward of microbatch S, which then meets a bubble on every rank. So only
the order among forwards is kept, that among backwards, and that among W. A forward may come before
earlier backwards, a W any time after its I. Nothing comes before an earlier forward, so GPipe stays
GPipe; and a rank holds no more activations than it may, so a lean schedule stays lean.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ..analysis._measure import makespan, peak_activations
from ..analysis._simulate import Costs, Time, check_costs, simulate
from ..builders._require import require
from ..language._schedule import Schedule, num_ranks, slice_ids, splits_backwards
from ._grid import Grid, RankOrders, fill_grid, rank_orders, ticks_from_grid
from ._ticks import Ticks, slices_as_microbatches, ticks_of_slices


def to_lock_step(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    spare: int | None = None,
    memory_cap: int | Sequence[int] | None = None,
) -> Ticks:
    """Puts a schedule on a grid of ticks.

    Returns the grid with the least peak memory whose makespan does not exceed the asynchronous
    schedule's. If none exists, returns the one with the least peak memory among those that cost no
    more than the grid with the most memory.

    1F1B and interleaved 1F1B reach their ideal, (M + (S - 1) / v) (F + B) for F and B of a rank.
    A rank then holds up to 2 (S - 1 - rank) + 1 microbatches instead of S - rank. With a
    `memory_cap` the grid is the fastest that keeps it, and of equally fast ones the leanest.

    Args:
        spare: Activations that a rank may hold beyond its peak in `schedule`. None: as many as pay.
        memory_cap: The most activations that a rank may hold, or [ranks] that of every rank: one
            activation is what the F of a stage stores for a microbatch, or a slice. None: no cap.

    Returns:
        The schedule, without fused pairs, and the tick of each of its actions.

    Raises:
        ValueError: If `spare` is negative, `memory_cap` is less than what the order of the
            schedule holds on a rank, or costs are negative or not one per stage.

    Example:
        >>> from jaxpipe.schedules import build
        >>> from jaxpipe.schedules.lock_step import num_ticks
        >>> num_ticks(to_lock_step(build("1f1b", ranks=4, microbatches=16)))
        22
        >>> ticks = to_lock_step(build("1f1b", ranks=4, microbatches=16), memory_cap=5)
        >>> num_ticks(ticks), max(peak_activations(ticks.schedule))
        (28, 5)
    """
    require(spare is None or spare >= 0, f"`spare` is {spare}.", "Give 0 or more activations.")
    costs, plain = costs or Costs(), slices_as_microbatches(schedule)
    check_costs(costs, schedule.num_stages)
    tries = _affordable_tries(plain)
    orders, peaks, lags = (
        rank_orders(plain, costs),
        peak_activations(plain),
        list(candidate_lags(plain)),
    )
    caps = _checked_caps(memory_cap, peaks)
    spares = candidate_spares(plain) if spare is None else (spare,)
    thinned = -(-len(spares) * len(lags) // tries) or 1
    if memory_cap is not None:
        tried = (*spares[:-1:thinned], spares[-1])
        grid = _fastest(orders, [_with_spare(peaks, caps, spare) for spare in tried], lags)
        ticks = replace(ticks_from_grid(plain, grid), memory_cap=int(max(caps)))
        return ticks_of_slices(ticks, slice_ids(schedule))
    free = 0 if spare is not None else makespan(simulate(plain, costs))
    *lean, most = spares
    grid = _cheapest(orders, _with_spare(peaks, caps, most), lags)
    assert grid, "without a longest makespan there is a grid"
    longest = max(grid.makespan, free)
    lean_grids = (
        _cheapest(orders, _with_spare(peaks, caps, spare), lags, longest)
        for spare in lean[::thinned]
    )
    ticks = ticks_from_grid(plain, next((leaner for leaner in lean_grids if leaner), grid))
    return ticks_of_slices(ticks, slice_ids(schedule))


_MAX_TURNS = 1 << 27
"""The most turns of ranks, one in each tick of each grid that is tried: some two minutes."""


def _affordable_tries(schedule: Schedule) -> int:
    """Returns the number of grids of a schedule that may be tried: all, unless it is very large."""
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
    """Returns the numbers of W's that a rank may defer, one per try.

    Deferring more of them fills more bubbles, and holds more activations.
    """
    S = num_ranks(schedule)
    return (
        tuple(sorted({0, 1, 2, S // 2, S - 1, S, 2 * S - 1}))
        if splits_backwards(schedule)
        else (0,)
    )


def _checked_caps(memory_cap: int | Sequence[int] | None, peaks: Sequence[int]) -> tuple[Time, ...]:
    """Returns [ranks] the most activations that each rank may hold; inf without a cap."""
    if memory_cap is None:
        return (inf,) * len(peaks)
    caps = tuple(memory_cap) if isinstance(memory_cap, Sequence) else (memory_cap,) * len(peaks)
    require(
        len(caps) == len(peaks),
        f"`memory_cap` has {len(caps)} entries for {len(peaks)} ranks.",
        "Give one number, or one per rank.",
    )
    for rank, (cap, peak) in enumerate(zip(caps, peaks, strict=True)):
        require(
            cap >= peak,
            f"`memory_cap` is {cap} activations for rank {rank}, and the order of the schedule "
            f"holds {peak} there.",
            f"Give at least {peak}, or a schedule that `search` finds for this cap.",
        )
    return caps


def _with_spare(peaks: Sequence[int], caps: Sequence[Time], spare: int) -> tuple[Time, ...]:
    """Returns [ranks] what each may hold: its peak in the schedule and `spare`, within `caps`."""
    return tuple(min(peak + spare, cap) for peak, cap in zip(peaks, caps, strict=True))


def _fastest(orders: RankOrders, tried: Sequence[tuple[Time, ...]], lags: list[int]) -> Grid:
    """Returns the grid with the least makespan, the first of equals, for the caps of any try."""
    fastest: Grid | None = None
    for caps in dict.fromkeys(tried):
        grid = _cheapest(orders, caps, lags.copy())
        if grid and (fastest is None or grid.makespan < fastest.makespan):
            fastest = grid
    assert fastest, "without a longest makespan there is a grid"
    return fastest


def _cheapest(
    orders: RankOrders, caps: Sequence[Time], lags: list[int], longest: Time = inf
) -> Grid | None:
    """Returns the cheapest grid among those of all lags, the first of equals.

    Removes from `lags`, which ascend, those for which no larger caps can give a short enough grid.
    """
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
