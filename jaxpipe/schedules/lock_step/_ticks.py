"""A schedule in lock-step: the tick of every action, and the cost of that.

One program for all ranks has loops of as many ticks for all ranks. In a tick a rank runs at most
one F, then at most one B or I, then at most one W; then all ranks hand over. A rank can use its own
outputs at once, and those of others one tick later; and a tick takes as long as its busiest rank.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..analysis._simulate import Costs, Time, TimedStep, Timeline, check_costs, duration
from ..builders._require import require
from ..language._action import Action, Op, ScheduleStep, actions_of
from ..language._check import check
from ..language._dependencies import ScheduleError, dependencies, outputs
from ..language._schedule import Schedule, enumerate_actions, num_slices, slice_ids

PHASE = {Op.F: 0, Op.B: 1, Op.I: 1, Op.W: 2}
"""The phase of an action in a tick. Two actions of a tick and rank never have the same phase."""


@dataclass(frozen=True)
class Ticks:
    """A schedule without fused pairs, and for every rank the ticks of its steps, counted from 0.

    Attributes:
        memory_cap: The most activations that a rank may hold, if the grid was filled with a cap.
    """

    schedule: Schedule
    tick_of: tuple[tuple[int, ...], ...]
    memory_cap: int | None = None


def num_ticks(ticks: Ticks) -> int:
    """Returns the number of ticks.

    Example:
        >>> from jaxpipe.schedules import Costs, build
        >>> from jaxpipe.schedules.lock_step import to_lock_step
        >>> num_ticks(to_lock_step(build("1f1b", ranks=4, microbatches=8), Costs()))
        14
    """
    return 1 + max((tick for row in ticks.tick_of for tick in row), default=-1)


def has_forwards_first(ticks: Ticks) -> bool:
    """Returns whether all forwards run before all backwards, of which there are some."""
    forwards, backwards = (
        [tick for _, tick, action in enumerate_ticks(ticks) if action.op in ops]
        for ops in ((Op.F,), (Op.B, Op.I))
    )
    return bool(backwards) and max(forwards) <= min(backwards)


def enumerate_ticks(ticks: Ticks) -> Iterator[tuple[int, int, Action]]:
    """Yields every action with its rank and its tick: (rank, tick, action), rank by rank."""
    for rank, (program, ticks_of_rank) in enumerate(
        zip(ticks.schedule.programs, ticks.tick_of, strict=True)
    ):
        for step, tick in zip(program, ticks_of_rank, strict=True):
            for action in actions_of(step):
                yield rank, tick, action


def check_ticks(ticks: Ticks) -> Ticks:
    """Returns `ticks` if a loop over them computes the same as the schedule.

    The schedule may have forwards alone.
    """
    lengths = [len(program) for program in ticks.schedule.programs]
    if [len(numbers) for numbers in ticks.tick_of] != lengths:
        raise ScheduleError(
            f"`tick_of` has {', '.join(str(len(n)) for n in ticks.tick_of)} ticks for programs of "
            f"{', '.join(map(str, lengths))} steps. Give one for each."
        )
    if any(action.op is not Op.F for _, _, action in enumerate_ticks(ticks)):
        check(ticks.schedule)
    else:
        _check_forwards(ticks.schedule)
    computed = {
        result: (rank, tick)
        for rank, tick, action in enumerate_ticks(ticks)
        for result in outputs(action)
    }
    before: dict[int, tuple[int, int]] = {}
    slices = num_slices(ticks.schedule)
    for rank, tick, action in enumerate_ticks(ticks):
        now = tick, PHASE[action.op]
        if before.get(rank, (-1, 0)) >= now:
            raise ScheduleError(
                f"Rank {rank} runs {action} in tick {tick}, after what it cannot follow there. A "
                "tick is one F, then one B or I, then one W at the most. Take a later tick."
            )
        before[rank] = now
        for need in dependencies(action, ticks.schedule.num_stages, slices):
            home, ready = computed[need]
            if home != rank and need.stage == action.stage:
                raise ScheduleError(
                    f"Rank {rank} runs {action}, and rank {home} runs {need}. Slices of a "
                    "microbatch carry a state: run those of a stage on one rank."
                )
            if ready > tick or (home != rank and ready == tick):
                raise ScheduleError(
                    f"Rank {rank} runs {action} in tick {tick}, but {need} runs on rank {home} in "
                    f"tick {ready}. Take a later tick."
                )
    return ticks


def check_no_slices(schedule: Schedule) -> None:
    """Refuses schedules with slices, for loops that run whole microbatches."""
    require(
        num_slices(schedule) == 1,
        "`schedule` has slices of sequences, and a loop with marks of your own runs whole "
        "microbatches.",
        "Give a schedule of whole microbatches, such as 1f1b; or run slices by "
        "`jaxpipe.pipeline(..., engine='mpmd')`, whose layers take `past`.",
    )


def _check_forwards(schedule: Schedule) -> None:
    """Checks that every stage has a forward of every microbatch, once."""
    counts = Counter(action for _, action in enumerate_actions(schedule))
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for slice_id in slice_ids(schedule):
                forward = Action(stage, Op.F, microbatch, slice_id)
                if counts.pop(forward, 0) != 1:
                    raise ScheduleError(f"No rank runs {forward}, or it runs twice:\n{schedule}")
    if counts:
        raise ScheduleError(f"{next(iter(counts))} is out of range:\n{schedule}")


def simulate_ticks(ticks: Ticks, costs: Costs) -> Timeline:
    """Runs tick after tick, each as soon as every rank has finished the one before.

    The makespan, compared with that of `simulate`, shows the price of lock-step.
    """
    check_costs(costs, ticks.schedule.num_stages)
    work: list[list[list[ScheduleStep]]] = [
        [[] for _ in ticks.tick_of] for _ in range(num_ticks(ticks))
    ]
    for rank, tick, action in enumerate_ticks(ticks):
        work[tick][rank].append(action)
    rows: list[list[TimedStep]] = [[] for _ in ticks.tick_of]
    start: Time = 0
    for tick in work:
        ends = [start]
        for rank, steps in enumerate(tick):
            end = start
            for step in steps:
                end, begin = end + duration(step, costs), end
                rows[rank].append(TimedStep(step, begin, end))
            ends.append(end)
        start = max(ends) + costs.transfer
    return Timeline(ticks.schedule, tuple(map(tuple, rows)))


def slices_as_microbatches(schedule: Schedule) -> Schedule:
    """Returns a schedule of `num_microbatches * num_slices` microbatches without slices.

    A schedule with slices runs those of a microbatch in order, forwards from the first to the last
    and backwards from the last to the first. A rank keeps the order among its forwards and among
    its backwards when it is put on a grid, so a grid of slices is one of as many microbatches:
    piece `microbatch * num_slices + slice`.

    Example:
        >>> from jaxpipe.schedules import build
        >>> print(slices_as_microbatches(build("seq1f1b", ranks=1, microbatches=1, slices=2)))
        0F0 0F1 0B1 0B0
    """
    slices = num_slices(schedule)

    def piece(action: Action) -> Action:
        number = action.microbatch * slices + (action.slice or 0)
        return Action(action.stage, action.op, number)

    programs = tuple(
        tuple(piece(action) for step in program for action in actions_of(step))
        for program in schedule.programs
    )
    return Schedule(schedule.num_stages, schedule.num_microbatches * slices, programs)


def ticks_of_pieces(ticks: Ticks) -> Ticks:
    """Returns a grid whose slices are microbatches; one without slices is returned as it is."""
    if slice_ids(ticks.schedule) == (None,):
        return ticks
    return replace(ticks, schedule=slices_as_microbatches(ticks.schedule))


def ticks_of_slices(ticks: Ticks, slices: tuple[int | None, ...]) -> Ticks:
    """Returns a grid with slices again: the inverse of `ticks_of_pieces`."""

    def action(step: ScheduleStep) -> Action:
        (piece,) = actions_of(step)
        microbatch, index = divmod(piece.microbatch, len(slices))
        return Action(piece.stage, piece.op, microbatch, slices[index])

    old = ticks.schedule
    programs = tuple(tuple(map(action, program)) for program in old.programs)
    schedule = Schedule(old.num_stages, old.num_microbatches // len(slices), programs)
    return replace(ticks, schedule=schedule)
