"""From a schedule to ticks: a list scheduler that looks at what a tick costs, tried many ways.

The order of a schedule, kept to the letter, costs too many ticks: 1F1B has the backward of
microbatch 0 before the forward of microbatch S, which then meets a bubble on every rank. So only
the order among forwards is kept, that among backwards, and that among W. A forward may come before
earlier backwards, a W any time after its I. Nothing comes before an earlier forward, so GPipe stays
GPipe; and a rank holds no more activations than it may, so a lean schedule stays lean.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from ._action import Action, Op, Step
from ._measure import makespan, peak_activations
from ._require import require
from ._schedule import Schedule, num_ranks, splits_backwards, without_pairs
from ._simulate import Costs, Time, duration, simulate
from ._ticks import Ticks, check_plain, simulate_ticks


def lock_step(schedule: Schedule, costs: Costs | None = None, *, spare: int | None = None) -> Ticks:
    """The leanest of the grids that cost no more than the schedule does without lock-step; if there
    are none, the leanest that costs no more than the one with most memory.

    1F1B and interleaved 1F1B come to their ideal, (M + (S - 1) / v) (F + B) for F and B of a rank.
    A rank then holds up to 2 (S - 1 - rank) + 1 microbatches instead of S - rank.

    Args:
        schedule: A schedule that passes `check`, or the `forward_only` of one.
        costs: Of a stage. None: one each.
        spare: Activations that a rank may hold beyond its peak in `schedule`. None: what pays.

    Raises:
        ValueError: If microbatches are sliced, a stage lies on two ranks, or `spare` is negative.
    """
    require(spare is None or spare >= 0, f"`spare` is {spare}.", "Give 0 or more activations.")
    check_plain(schedule)
    costs, plain = costs or Costs(), without_pairs(schedule)
    peaks, lags = peak_activations(plain), _lags(plain)

    def cheapest(spare: int) -> tuple[Time, Ticks]:
        caps = tuple(peak + spare for peak in peaks)
        grids = [_grid(plain, caps, lag, costs) for lag in lags]
        return min(
            ((makespan(simulate_ticks(grid, costs)), grid) for grid in grids),
            key=lambda found: found[0],
        )

    tries = _affordable_tries(plain)
    if spare is not None:
        return cheapest(spare)[1]
    *lean, most = _spares(plain)
    thinned = max(1, -(-len(lean) // max(1, tries // len(lags))))
    cost, grid = cheapest(most)
    lean = lean[::thinned]
    enough = max(cost, makespan(simulate(plain, costs)))
    return next((g for c, g in map(cheapest, lean) if c <= enough), grid)


_MOST_TURNS = 3_000_000
"""Turns of ranks, one in each tick of each grid that is tried: some 30 seconds."""


def _affordable_tries(schedule: Schedule) -> int:
    """Returns how many grids of a schedule may be tried: all, unless it is very large."""
    ticks = makespan(simulate(schedule, Costs()))
    tries = int(_MOST_TURNS / max(1, ticks * num_ranks(schedule)))
    require(
        tries > 0,
        f"The schedule has {num_ranks(schedule)} ranks and lasts {ticks:g} actions.",
        "That is too large to be put in lock-step: give fewer ranks or microbatches.",
    )
    return tries


def _spares(schedule: Schedule) -> tuple[int, ...]:
    """Fewer tries the larger they are. More than fill every hand-over with a tick do not pay."""
    spares = [0]
    while spares[-1] < 2 * schedule.num_stages:
        spares.append(spares[-1] + max(1, spares[-1] // 4))
    return tuple(spares)


def _lags(schedule: Schedule) -> tuple[int, ...]:
    """How many W a rank puts off: more of them fill more bubbles, and hold more activations."""
    S = num_ranks(schedule)
    return (
        tuple(sorted({0, 1, 2, S // 2, S - 1, S, 2 * S - 1}))
        if splits_backwards(schedule)
        else (0,)
    )


def _plain(program: tuple[Step, ...]) -> list[Action]:
    """A program without pairs."""
    return [step for step in program if isinstance(step, Action)]


class _Backward(NamedTuple):
    """A B or an I, and how many forwards come before it in its program."""

    action: Action
    forwards: int


@dataclass
class _Rank:
    """What a rank has still to do, the next of each kind last; and what it has done.

    Attributes:
        forwards: F.
        backwards: B and I.
        weights: W.
        cap: Most activations that it may hold.
        alive: Those that it holds.
        done: Forwards that it has run.
        owed: W whose I it has run.
        now: What it runs in this tick.
        program: What it has run.
        numbers: The ticks of these.
    """

    forwards: list[Action]
    backwards: list[_Backward]
    weights: list[Action]
    cap: int
    alive: int = 0
    done: int = 0
    owed: int = 0
    now: list[Action] = field(default_factory=list)
    program: list[Action] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


def _rank(program: tuple[Step, ...], cap: int) -> _Rank:
    rank = _Rank([], [], [], cap)
    for action in _plain(program):
        if action.op is Op.F:
            rank.forwards.append(action)
        elif action.op is Op.W:
            rank.weights.append(action)
        else:
            rank.backwards.append(_Backward(action, len(rank.forwards)))
    for kind in (rank.forwards, rank.backwards, rank.weights):
        kind.reverse()
    return rank


_Made = dict[tuple[int, int], int]
"""The tick that made the result of a (stage, microbatch)."""


def _grid(schedule: Schedule, caps: tuple[int, ...], lag: int, costs: Costs) -> Ticks:
    """Tick by tick: every rank runs the F and the B or I that are ready.

    It runs a W if it owes more than `lag` of them, if it waits for memory, if it has nothing else
    to run, or if another rank takes as long anyway.
    """
    ranks = [_rank(program, cap) for program, cap in zip(schedule.programs, caps, strict=True)]
    forwards, inputs = _Made(), _Made()
    tick = 0
    while any(rank.forwards or rank.backwards or rank.weights for rank in ranks):
        for rank in ranks:
            waits = not _forward(rank, tick, forwards)
            _backward(rank, tick, schedule.num_stages, forwards, inputs)
            if waits or rank.owed > lag or not rank.now:
                _weight(rank, inputs)
        times = [_time(rank, costs) for rank in ranks]
        for rank, time in zip(ranks, times, strict=True):
            if rank.weights and time + duration(rank.weights[-1], costs) <= max(times):
                _weight(rank, inputs)
        assert any(rank.now for rank in ranks), "a schedule that passes `check` always goes on"
        for rank in ranks:
            rank.program += rank.now
            rank.numbers += [tick] * len(rank.now)
            rank.now = []
        tick += 1
    programs = tuple(tuple(rank.program) for rank in ranks)
    order = Schedule(schedule.num_stages, schedule.num_microbatches, programs)
    return Ticks(order, tuple(tuple(rank.numbers) for rank in ranks))


def _forward(rank: _Rank, tick: int, made: _Made) -> bool:
    """Runs the next F if its input is there; False if there is no memory for it."""
    if not rank.forwards:
        return True
    stage, microbatch = rank.forwards[-1].stage, rank.forwards[-1].microbatch
    if stage and made.get((stage - 1, microbatch), tick) >= tick:
        return True
    if rank.alive >= rank.cap:
        return False
    rank.now.append(rank.forwards.pop())
    rank.alive += 1
    rank.done += 1
    made[stage, microbatch] = tick
    return True


def _backward(rank: _Rank, tick: int, num_stages: int, forwards: _Made, inputs: _Made) -> None:
    """Runs the next B or I, if its turn has come and its cotangent is there."""
    if not rank.backwards or rank.backwards[-1].forwards > rank.done:
        return
    action = rank.backwards[-1].action
    stage, microbatch = action.stage, action.microbatch
    last = stage == num_stages - 1
    if last and (stage, microbatch) not in forwards:
        return
    if not last and inputs.get((stage + 1, microbatch), tick) >= tick:
        return
    rank.backwards.pop()
    rank.now.append(action)
    inputs[stage, microbatch] = tick
    if action.op is Op.B:
        rank.alive -= 1
    else:
        rank.owed += 1


def _weight(rank: _Rank, inputs: _Made) -> None:
    """Runs the next W, if its I has run and no other W in this tick."""
    if not rank.weights or any(action.op is Op.W for action in rank.now):
        return
    if (rank.weights[-1].stage, rank.weights[-1].microbatch) in inputs:
        rank.now.append(rank.weights.pop())
        rank.owed -= 1
        rank.alive -= 1


def _time(rank: _Rank, costs: Costs) -> Time:
    return sum(duration(action, costs) for action in rank.now)
