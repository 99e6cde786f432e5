"""Puts a schedule on a grid of ticks, by many runs of a list scheduler that knows their costs.

The order of a schedule, kept to the letter, costs too many ticks: 1F1B has the backward of
microbatch 0 before the forward of microbatch S, which then meets a bubble on every rank. So only
the order among forwards is kept, that among backwards, and that among W. A forward may come before
earlier backwards, a W any time after its I. Nothing comes before an earlier forward, so GPipe stays
GPipe; and a rank holds no more activations than it may, so a lean schedule stays lean.

An action has an integer id: stage * M + microbatch, where M is the number of microbatches. The id
minus M is the same microbatch on the stage before, plus M on the stage after.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ..analysis._measure import makespan, peak_activations
from ..analysis._simulate import Costs, Time, check_costs, duration, simulate
from ..builders._require import require
from ..language._action import Action, Op, ScheduleStep, actions_of
from ..language._schedule import Schedule, num_ranks, slice_ids, splits_backwards
from ._ticks import PHASE, Ticks, slices_as_microbatches, ticks_of_slices

_NEVER = 1 << 60


class RankOrder(NamedTuple):
    """The actions that a rank has to run, as three lists with the next action last, and their time.

    An entry is (action id, duration). That of a B or I continues with the number of forwards before
    it in its program, and whether it is an I.
    """

    forwards: list[tuple[int, Time]]
    backwards: list[tuple[int, Time, int, bool]]
    weights: list[tuple[int, Time]]
    time: Time


class RankOrders(NamedTuple):
    """A schedule without fused pairs, as `fill_grid` reads it.

    Attributes:
        transfer: The time between two ticks.
        trust: 1, or a little less where times are floating-point numbers and sums of them inexact.
    """

    schedule: Schedule
    order_of_rank: list[RankOrder]
    transfer: Time
    trust: Time


class Grid(NamedTuple):
    """The makespan, and [stages * M] the tick of every F, of every B or I, and of every W."""

    makespan: Time
    forwards: list[int]
    inputs: list[int]
    weights: list[int]


class FillResult(NamedTuple):
    """The outcome of an attempt to fill a grid.

    Attributes:
        grid: The grid; None if it would have taken too long.
        full: Whether a forward waited for memory. If not, larger caps give the same.
        lagged: Whether a W ran because more than `lag` were owed. If not, a larger lag gives the
            same.
    """

    grid: Grid | None
    full: bool
    lagged: bool


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


@dataclass(slots=True)
class _Rank:
    """The state of a rank while a grid is filled; `left` is the time of the actions still to run.

    Attributes:
        cap: The most activations that it may hold.
        done: The forwards that it has run.
        owed: The W's whose I it has run.
        weighs: Whether it runs a W in this tick.
    """

    forwards: list[tuple[int, Time]]
    backwards: list[tuple[int, Time, int, bool]]
    weights: list[tuple[int, Time]]
    left: Time
    cap: Time
    alive: int = 0
    done: int = 0
    owed: int = 0
    time: Time = 0
    end: Time = 0
    weighs: bool = False


def rank_orders(schedule: Schedule, costs: Costs) -> RankOrders:
    """Returns the actions that every rank of a schedule without pairs runs, in order."""
    order_of_rank = [
        _order(program, schedule.num_microbatches, costs) for program in schedule.programs
    ]
    every = (costs.forward, costs.input, costs.weight, costs.transfer)
    times = [time for cost in every for time in (cost if isinstance(cost, tuple) else (cost,))]
    inexact = any(isinstance(time, float) for time in times)
    return RankOrders(schedule, order_of_rank, costs.transfer, 1 - 1e-9 if inexact else 1)


def _order(program: tuple[ScheduleStep, ...], num_microbatches: int, costs: Costs) -> RankOrder:
    forwards, backwards, weights, total = [], [], [], 0
    for action in (action for step in program for action in actions_of(step)):
        action_id = action.stage * num_microbatches + action.microbatch
        time = duration(action, costs)
        total += time
        if action.op is Op.F:
            forwards.append((action_id, time))
        elif action.op is Op.W:
            weights.append((action_id, time))
        else:
            backwards.append((action_id, time, len(forwards), action.op is Op.I))
    return RankOrder(forwards[::-1], backwards[::-1], weights[::-1], total)


def fill_grid(
    orders: RankOrders, caps: Sequence[Time], lag: int, *, longest: Time = inf, below: Time = inf
) -> FillResult:
    """Fills a grid tick by tick: every rank runs the F and the B or I that are ready.

    A rank runs a W if it owes more than `lag` of them, if it waits for memory, if it has nothing
    else to run, or if another rank takes as long anyway.

    Args:
        caps: [ranks] the most activations that each may hold.
        longest: The attempt ends as soon as the makespan must exceed this.
        below: The attempt ends as soon as the makespan must be at least this.

    Returns:
        The grid, or None in its place if the attempt has ended early, and which of the two limits,
        `caps` and `lag`, had an effect.
    """
    num_microbatches = orders.schedule.num_microbatches
    total = orders.schedule.num_stages * num_microbatches
    grid = Grid(0, [_NEVER] * total, [_NEVER] * total, [_NEVER] * total)
    ranks = [
        _Rank(order.forwards[:], order.backwards[:], order.weights[:], order.time, cap)
        for order, cap in zip(orders.order_of_rank, caps, strict=True)
    ]
    tick = 0
    start: Time = 0
    end: Time = 0
    full = lagged = False
    while ranks := [rank for rank in ranks if rank.forwards or rank.backwards or rank.weights]:
        now_full, now_lagged = _run_ready(ranks, grid, tick, start, lag, num_microbatches)
        full, lagged = full or now_full, lagged or now_lagged
        _fill_up(ranks, grid, tick)
        end = max([rank.end for rank in ranks])
        # After this tick, ticks take no less than the rank with most to do.
        least = (end + max([rank.left for rank in ranks])) * orders.trust
        if least > longest or least >= below:
            return FillResult(None, full, lagged)
        tick, start = tick + 1, end + orders.transfer
        assert tick <= 3 * total, "a schedule that passes `check` always goes on"
    is_short = end <= longest and end < below
    return FillResult(grid._replace(makespan=end) if is_short else None, full, lagged)


def _run_ready(
    ranks: list[_Rank], grid: Grid, tick: int, start: Time, lag: int, num_microbatches: int
) -> tuple[bool, bool]:
    """Runs the next F of every rank, its next B or I, and a W that is due.

    Returns `full` and `lagged` of this tick, as in `FillResult`.
    """
    forwards, inputs = grid.forwards, grid.inputs
    last_stage = len(forwards) - num_microbatches
    full = lagged = False
    for rank in ranks:
        time, end, runs, waits = 0, start, False, False
        if rank.forwards:
            action_id, length = rank.forwards[-1]
            if action_id < num_microbatches or forwards[action_id - num_microbatches] < tick:
                waits = rank.alive >= rank.cap
                if not waits:
                    rank.forwards.pop()
                    forwards[action_id] = tick
                    rank.alive += 1
                    rank.done += 1
                    time, end, runs = length, end + length, True
        if rank.backwards:
            action_id, length, after, is_split = rank.backwards[-1]
            if rank.done >= after and (
                inputs[action_id + num_microbatches] < tick
                if action_id < last_stage
                else forwards[action_id] <= tick
            ):
                rank.backwards.pop()
                inputs[action_id] = tick
                rank.owed += is_split
                rank.alive -= not is_split
                time, end, runs = time + length, end + length, True
        rank.time, rank.end, rank.weighs = time, end, False
        rank.left -= time
        full = full or waits
        if rank.weights and (waits or not runs or rank.owed > lag):
            _run_weight(rank, grid, tick)
            lagged = lagged or (runs and not waits)
    return full, lagged


def _fill_up(ranks: list[_Rank], grid: Grid, tick: int) -> None:
    """Runs a W on every rank that would otherwise wait at least as long for another rank."""
    longest = max([rank.time for rank in ranks])
    for rank in ranks:
        if rank.weights and not rank.weighs and rank.time + rank.weights[-1][1] <= longest:
            _run_weight(rank, grid, tick)


def _run_weight(rank: _Rank, grid: Grid, tick: int) -> None:
    """Runs the next W if its I has run."""
    action_id, length = rank.weights[-1]
    if grid.inputs[action_id] <= tick:
        rank.weights.pop()
        grid.weights[action_id] = tick
        rank.owed -= 1
        rank.alive -= 1
        rank.time += length
        rank.end += length
        rank.left -= length
        rank.weighs = True


def ticks_from_grid(schedule: Schedule, grid: Grid) -> Ticks:
    """Returns a schedule without pairs in the order of a grid that was filled with it."""
    num_microbatches = schedule.num_microbatches
    ticks_of_op = {Op.F: grid.forwards, Op.B: grid.inputs, Op.I: grid.inputs, Op.W: grid.weights}

    def when(action: Action) -> tuple[int, int]:
        action_id = action.stage * num_microbatches + action.microbatch
        return ticks_of_op[action.op][action_id], PHASE[action.op]

    programs = tuple(
        tuple(sorted((action for step in program for action in actions_of(step)), key=when))
        for program in schedule.programs
    )
    tick_of = tuple(tuple(when(action)[0] for action in program) for program in programs)
    return Ticks(Schedule(schedule.num_stages, num_microbatches, programs), tick_of)
